"""Tasks of a watcher beside a server: hooks after a swap, health checks, reports to a rollout, times of polls."""

import json
import os
import random
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import Event
from urllib.parse import urlsplit

from enginesmith.client.locate import VersionLocator
from enginesmith.core import parsing
from enginesmith.core.errors import (
    EnginesmithError,
    InputError,
    IntegrityError,
    UnavailableError,
    digest_of_bytes,
    read_token,
)
from enginesmith.core.names import Reference
from enginesmith.core.text import run_command
from enginesmith.registry.rollouts import reports
from enginesmith.registry.rollouts.rollout_state import ServingNode, format_time, is_reporter, parse_time
from enginesmith.registry.versions.channel_state import Channel

_MOST_BYTES = 64 << 10
_JSON = {"Content-Type": "application/json"}
# Output of a command or response of a URL, and the reason of a failure; '' on success.
_Ended = tuple[bytes, str]

# Shared code of hooks, health checks and reports: a command with the facts of a swap, and a request to a URL.


def _check_command(line: str, what: str) -> None:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InputError(f"the {what} {line!r} cannot be split into words: {error}") from None
    if not words:
        raise InputError(f"the {what} is empty; give a command line")


def _run(line: str, timeout_s: float, facts: Mapping[str, str], what: str, stdout: int = subprocess.PIPE) -> _Ended:
    """The output of a command, and the reason of its failure ('' on success). At the limit its processes are killed."""
    environment = {**os.environ, **{f"ENGINESMITH_{name.upper()}": value for name, value in facts.items()}}
    try:
        process = run_command(shlex.split(line), timeout_s, environment=environment, stdout=stdout)
    except subprocess.TimeoutExpired:
        return b"", f"{what} took over {timeout_s:g} s and was killed"
    except OSError as error:
        return b"", f"{what} cannot be started: {error.strerror}"
    return process.stdout or b"", f"{what} ended with {process.returncode}" if process.returncode else ""


def _check_url(url: str, what: str) -> None:
    try:
        parts = urlsplit(url)
        is_named = bool(parts.hostname) and parts.port != 0  # ValueError for a wrong port
    except ValueError:
        is_named = False
    if not is_named or parts.scheme not in ("http", "https"):
        raise InputError(f"the {what} URL must be http or https and have a host, as in http://HOST:PORT/PATH")


def _ask(
    url: str, timeout_s: float, what: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
) -> _Ended:
    """Response of a URL of `_check_url`, and the reason of a failure; '' for a 2xx response.

    data: the body of a POST request, whose 2xx response is not read; None: a GET request.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, data, {**(headers or {})}), timeout=timeout_s) as answer:  # noqa: S310 - checked
            return b"" if data else answer.read(_MOST_BYTES), ""
    except HTTPError as error:
        failure = f"{what} answers {error.code}"
        with error, suppress(OSError, HTTPException, ValueError):
            return error.read(_MOST_BYTES), failure
        return b"", failure
    except (OSError, HTTPException, ValueError) as error:  # ValueError: a redirect to an invalid URL
        return b"", f"{what} does not answer: {getattr(error, 'reason', None) or type(error).__name__}"


# Health of a server after a swap, from a command or a URL, and its numbers of answered requests.
#
# Exit code 0 or a 2xx response means healthy. The output or response may be a JSON object with `requests` and `errors`,
# whole numbers counted since the swap; anything else is ignored.

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class HealthAnswer:
    """A health check's result. failure: '' if healthy.  requests, errors: the server's counts, None if unknown."""

    failure: str = ""
    requests: int | None = None
    errors: int | None = None


# Called with the facts of a swap.
Health = Callable[[Mapping[str, str]], HealthAnswer]


@dataclass(frozen=True)
class HealthCommand:
    """A command line, split as by a shell but run without one, with the variables that hooks get."""

    line: str
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        _check_command(self.line, "health command")

    def __call__(self, facts: Mapping[str, str]) -> HealthAnswer:
        """Run the command; at the time limit it and its children are killed."""
        return _counts(*_run(self.line, self.timeout_s, facts, "health command"))


@dataclass(frozen=True)
class HealthUrl:
    """A URL for GET requests. Raises InputError for one that is not http or https."""

    url: str
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        _check_url(self.url, "health")

    def __call__(self, facts: Mapping[str, str]) -> HealthAnswer:  # noqa: ARG002 - a `Health`
        """Send a GET request to the URL."""
        return _counts(*_ask(self.url, self.timeout_s, "health URL"))


def _counts(data: bytes, failure: str) -> HealthAnswer:
    payload: object = None
    with suppress(ValueError, RecursionError):
        payload = parsing.load_json(data[:_MOST_BYTES])
    counts = [payload.get(name) if isinstance(payload, dict) else None for name in ("requests", "errors")]
    if all(type(count) is int and 0 <= count < 1 << 53 for count in counts):
        return HealthAnswer(failure, counts[0], counts[1])
    return HealthAnswer(failure)


# Hooks that run after a swap, within a time limit: a command, or a POST to a URL.
#
# Both get the same facts: a command in environment variables (ENGINESMITH_MODEL, ENGINESMITH_VERSION,
# ENGINESMITH_CHANNEL, ENGINESMITH_DIGEST, ENGINESMITH_FOLDER, ENGINESMITH_ENGINE, ENGINESMITH_DESCRIPTION,
# ENGINESMITH_CURRENT, ENGINESMITH_PREVIOUS), a URL in a JSON object with the same names in lower case without the
# prefix. Success is exit code 0, or any 2xx answer.

HOOK_TIMEOUT_S = 30.0

# Called with the facts of a swap; returns the reason of its failure, or None.
Hook = Callable[[Mapping[str, str]], str | None]


@dataclass(frozen=True)
class Command:
    """A command line, split as by a shell but run without one; its output goes to stderr."""

    line: str
    timeout_s: float = HOOK_TIMEOUT_S

    def __post_init__(self) -> None:
        _check_command(self.line, "hook's command")

    def __call__(self, facts: Mapping[str, str]) -> str | None:
        """Run the command; at the time limit it and its children are killed. Returns the failure's reason, or None."""
        return _run(self.line, self.timeout_s, facts, f"hook {self.line!r}", stdout=2)[1] or None


@dataclass(frozen=True)
class Post:
    """A URL for POST requests. Raises InputError for one that is not http or https."""

    url: str
    timeout_s: float = HOOK_TIMEOUT_S

    def __post_init__(self) -> None:
        _check_url(self.url, "hook")

    def __call__(self, facts: Mapping[str, str]) -> str | None:
        """Post the facts as JSON; return the reason of a failure, or None."""
        hook_url = urlsplit(self.url)
        # Without user, password and query, which may be secret.
        hook_name = (
            f"hook {hook_url.scheme}://{hook_url.hostname}{f':{hook_url.port}' if hook_url.port else ''}{hook_url.path}"
        )
        return _ask(self.url, self.timeout_s, hook_name, json.dumps(facts).encode(), _JSON)[1] or None


# The times of a watcher's polls: at random around an interval, later after errors.
#
# An interval of 120 s means 0.0083 requests per second and node, and 417 for 50,000 nodes: a thirteenth of Amazon
# S3's limit for one prefix (docs/scale.md). Random times keep nodes that were started together from polling together,
# also after the registry was unreachable.

# Seconds between polls, for each document that a poll reads.
INTERVAL_S = 120.0
JITTER = 0.2
# After errors the interval doubles, up to this multiple of it.
MOST_INTERVALS = 8


def keep_looking(look: Callable[[], bool], stop: Event, interval_s: float) -> None:
    """Call `look` until `stop` is set. look: polls, and returns whether it succeeded.  interval_s: seconds between."""
    failure_count = 0
    while not stop.is_set():
        failure_count = 0 if look() else failure_count + 1
        stop.wait(pause_s(interval_s, failure_count))


def pause_s(interval_s: float, failures: int) -> float:
    """Seconds to wait after a poll; failures: number of failed polls since the last good one."""
    delay_s = interval_s * min(2.0 ** min(failures, 16), MOST_INTERVALS)
    return delay_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret


# Reports of the engine that this node serves, and its health: one small document, written rarely.
#
# A node reports to the rollout that has reached it, otherwise outside of rollouts, and only if it belongs to the
# reporting share (`rollouts.reports`). The channel's state has all this: a poll without a change sends no other
# request. A report that cannot be sent is mentioned once and tried again later; it never stops a watcher.

# Seconds after a swap within which an unhealthy server counts as starting.
GRACE_S = 20.0
_RETRY_S = 600.0
_MOST_WHY = 300
# Outside of a rollout the time to the next try doubles at most this many times, to 85 hours.
_MOST_DOUBLINGS = 9


class HookFailed(EnginesmithError):  # noqa: N818 - says what happened
    """A hook that failed after a swap."""


@dataclass(frozen=True)
class ReportUrl:
    """An endpoint that receives reports, for nodes that may not write the registry (`enginesmith rollout receive`).

    Sends the token in ENGINESMITH_REPORT_TOKEN, if there is one.
    """

    url: str
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        _check_url(self.url, "report")

    def send(self, sent: reports.SentReport) -> None:
        """Post a report. Raises UnavailableError, InputError for an invalid token."""
        token = read_token(reports.TOKEN)
        headers = {**_JSON, **({"Authorization": f"Bearer {token}"} if token else {})}
        answer, failure = _ask(self.url, self.timeout_s, "the report URL", sent.to_bytes(), headers)
        if failure:
            answer_text = answer[:_MOST_WHY].decode(errors="replace").strip()
            raise UnavailableError(f"{failure}: {answer_text}" if answer_text else failure)


class Reporter:
    """Sends one node's reports about one channel. url: of the endpoint; None is the registry.  health: None means
    healthy after each swap.

    say: called if reports cannot be sent.  clock: seconds, for tests.
    grace_s: seconds after a swap within which an unhealthy server counts as starting.
    """

    def __init__(
        self,
        url: ReportUrl | None = None,
        health: Health | None = None,
        *,
        grace_s: float = GRACE_S,
        say: Callable[[str], object] = print,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url, self._health, self._grace_s, self._say, self._clock = url, health, grace_s, say, clock
        # The rollout that requests reports, or OUTSIDE, and the last report to it, as it was written.
        self._asker, self._written = "", b""
        self._last: reports.NodeReport | None = None
        self._judged: reports.NodeReport | None = None
        self._at = self._swapped_at = self._silent_until = 0.0
        self._version, self._failures = "", 0

    def look(
        self,
        locator: VersionLocator,
        reference: Reference,
        channel: Channel | None,
        facts: Mapping[str, str],
        error: EnginesmithError | None,
    ) -> None:
        """Report after a poll of a watcher, if a report is due. channel: the followed state; if None (unknown), it is
        read again.  facts: of the served engine, as for hooks, with `unit` and `machine` as in `NodeReport`;
        empty if none is served. error: of the poll, or None.

        locator: reads channels.  reference: the channel.
        """
        version = facts.get("version", "")
        if version != self._version:
            self._version, self._swapped_at = version, self._clock()
        try:
            if channel is None and not isinstance(error, UnavailableError):
                channel = locator.read_channel(reference.model, str(reference.channel))
            if channel:
                self._report(locator, channel, facts, error)
        except EnginesmithError as failure:
            self._complain(failure)

    def _complain(self, failure: EnginesmithError) -> None:
        """Print that a report cannot be delivered, and set the time of the next try.

        Outside of a rollout, the message is printed once and the wait doubles with each failure, because many nodes
        have no right to write.
        """
        delay_s, consequence = _RETRY_S, "rollout gates do not count the node"
        if self._asker == reports.OUTSIDE:
            delay_s *= 2 ** min(self._failures, _MOST_DOUBLINGS)
            consequence = (
                "`enginesmith rollout status --nodes` does not list the node (--report URL sends reports to a "
                "receiver, --report none sends none)"
            )
        if self._clock() >= self._silent_until and not (self._asker == reports.OUTSIDE and self._failures):
            self._say(f"the report of this node cannot be delivered, so {consequence}: {failure}")
        self._silent_until, self._written = self._clock() + delay_s, b""
        self._failures += self._asker == reports.OUTSIDE

    def _report(
        self, locator: VersionLocator, channel: Channel, facts: Mapping[str, str], error: EnginesmithError | None
    ) -> None:
        node, now_s = locator.node, self._clock()
        if node is None or not (report_scope := _find_asker(channel, node)):
            return
        if report_scope != self._asker:
            self._asker, self._last, self._written, self._silent_until = report_scope, None, b"", 0.0
        if now_s < self._silent_until:
            return
        judgement = self._judge(channel.served_to(node).version, facts, error)
        if judgement is None:
            return
        failure, health = judgement
        timestamp = format_time(datetime.fromtimestamp(now_s, UTC))
        report = reports.NodeReport(
            node.name,
            node.region,
            self._version,
            timestamp,
            timestamp,
            failure,
            health.failure[: reports.MOST_DETAIL],
            health.requests,
            health.errors,
            facts.get("digest"),
            facts.get("unit", "")[: reports.MOST_DETAIL],
            facts.get("machine", "")[: reports.MOST_DETAIL],
        )
        key = reports.report_key(channel.model, channel.name, report_scope, node.name)
        if self._last is None and report_scope == reports.OUTSIDE and self._url is None:
            self._adopt(locator.store.read(key), report, now_s)
        if self._judged and self._judged.has_same_state(report):
            report = replace(report, since=self._judged.since)
        self._judged = report
        if self._is_due(report, now_s):
            if self._url:
                self._url.send(reports.SentReport(channel.model, channel.name, report_scope, report, node.labels))
            else:
                self._written = reports.write_report(locator.store, key, report, self._written or None)
            self._last, self._at, self._failures = report, now_s, 0

    def _adopt(self, stored: bytes | None, report: reports.NodeReport, now_s: float) -> None:
        """Adopt the report of an earlier process of this node, so that a restart without a change sends none."""
        self._written = stored or b""
        with suppress(IntegrityError):
            last_report = reports.parse_report(self._written)
            if last_report.has_same_state(report):
                self._last = self._judged = last_report
                self._at = min(now_s, parse_time(last_report.at).timestamp())

    def _judge(
        self, version: str, facts: Mapping[str, str], error: EnginesmithError | None
    ) -> tuple[reports.Failure, HealthAnswer] | None:
        """The health of this node; None if unknown. version: the one that the channel assigns to the node."""
        if self._version != version:
            return ("pull", HealthAnswer(str(error))) if error else None
        if isinstance(error, HookFailed):
            return "hook", HealthAnswer(str(error))
        answer = self._health(facts) if self._health else HealthAnswer()
        if not answer.failure:
            return "", answer
        is_starting = self._clock() < self._swapped_at + self._grace_s
        return None if is_starting else ("unhealthy", answer)

    def _is_due(self, report: reports.NodeReport, now: float) -> bool:
        """Whether a report is due: soon after a change, else after a heartbeat. New counts matter only in rollouts."""
        if self._last is None:
            return True
        is_outside = self._asker == reports.OUTSIDE
        has_new_counts = not is_outside and report.errors != self._last.errors
        if has_new_counts or not report.has_same_state(self._last):
            return now - self._at >= reports.LEAST_S
        return now - self._at >= (reports.OUTSIDE_HEARTBEAT_S if is_outside else reports.HEARTBEAT_S)


def _find_asker(channel: Channel, node: ServingNode) -> str:
    """The id of the rollout that a node reports to; OUTSIDE without one; '' if the node must not report."""
    name_digest, rollout = digest_of_bytes(node.name.encode()), channel.active_rollout
    if rollout and rollout.serves(node) and is_reporter(name_digest, rollout.reporters_ppm):
        return rollout.id
    return reports.OUTSIDE if is_reporter(name_digest, channel.reporters_ppm) else ""
