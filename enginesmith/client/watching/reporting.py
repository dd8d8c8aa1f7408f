"""Reports to a rollout what this node serves, and whether it is well: one small document, written seldom.

A node reports only what a rollout that has reached it brought, and only if it is among those that are asked
(`rollouts.reports`). A report that cannot be sent is said once and tried again later; it never stops a watcher.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from urllib.parse import urlsplit

from enginesmith.client.locate import VersionLocator
from enginesmith.client.watching.health import Health, HealthAnswer
from enginesmith.core.address import read_token
from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.core.names import Reference
from enginesmith.registry.rollouts.reports import (
    HEARTBEAT_S,
    LEAST_S,
    MOST_DETAIL,
    TOKEN,
    Failure,
    NodeReport,
    SentReport,
    report_key,
    write_report,
)
from enginesmith.registry.rollouts.state import Rollout, format_time
from enginesmith.registry.rollouts.waves import reports
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.state import Channel

# Seconds after a swap within which a server that is not well yet counts as starting.
GRACE_S = 20.0
_RETRY_S = 600.0
_MOST_WHY = 300


class HookFailed(EnginesmithError):  # noqa: N818 - says what happened
    """A hook that failed after a swap."""


@dataclass(frozen=True)
class ReportUrl:
    """An endpoint to post reports to, for nodes that may not write the registry (`enginesmith rollout receive`).

    The token in ENGINESMITH_REPORT_TOKEN, if there is one, goes along.
    """

    url: str
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"report URL: scheme {urlsplit(self.url).scheme!r} is not http or https")

    def send(self, sent: SentReport) -> None:
        """Post a report. Raises UnavailableError, InputError for a token that is none."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        token = read_token(TOKEN)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        asked = Request(self.url, sent.to_bytes(), headers)  # noqa: S310 - checked
        try:
            with urlopen(asked, timeout=self.timeout_s):  # noqa: S310 - the scheme was checked
                return
        except HTTPError as error:
            why = ""
            with error, suppress(OSError, HTTPException, ValueError):
                why = error.read(_MOST_WHY).decode(errors="replace").strip()
            raise UnavailableError(f"the report URL answers {error.code}: {why or error.reason}") from error
        except (OSError, HTTPException, ValueError) as error:  # ValueError: it leads to what is no URL
            why = getattr(error, "reason", None) or type(error).__name__
            raise UnavailableError(f"the report URL does not answer: {why}") from error


class Reporter:
    """Reports of one channel by one node. url: where to; None is the registry.  health: None is well after each swap.

    say: called where reports cannot be sent.  clock: seconds, for tests.
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
        self._key, self._written = "", b""
        self._last: NodeReport | None = None
        self._at = self._swapped_at = self._silent_until = 0.0
        self._version = ""

    def look(
        self,
        locator: VersionLocator,
        reference: Reference,
        channel: Channel | None,
        facts: Mapping[str, str] | None,
        error: EnginesmithError | None,
    ) -> None:
        """Report after a look of a watcher, where it is time. channel: what was followed; None where that is not known,
        and it is read again.  facts: of what is served, as hooks get them.  error: what went wrong, None if nothing."""
        version = facts["version"] if facts else ""
        if version != self._version:
            self._version, self._swapped_at = version, self._clock()
        try:
            if channel is None and not isinstance(error, UnavailableError):
                channel = locator.read_channel(reference.model, str(reference.channel))
            if channel and (rollout := channel.active_rollout):
                self._report(locator, rollout, facts, error)
        except EnginesmithError as failure:
            if self._clock() >= self._silent_until:
                self._say(f"what this node serves cannot be reported, and no gate of a rollout sees it: {failure}")
            self._silent_until, self._written = self._clock() + _RETRY_S, b""

    def _report(
        self, locator: VersionLocator, rollout: Rollout, facts: Mapping[str, str] | None, error: EnginesmithError | None
    ) -> None:
        node, now = locator.node, self._clock()
        if node is None or now < self._silent_until:
            return
        if not (rollout.serves(node) and reports(digest_of_bytes(node.name.encode()), rollout.reporters_ppm)):
            return
        answer = self._judge(rollout.version, facts, error)
        if answer is None:
            return
        failure, health = answer
        time_ = format_time(datetime.fromtimestamp(now, UTC))
        report = NodeReport(
            node.name,
            node.region,
            self._version,
            time_,
            time_,
            failure,
            health.failure[:MOST_DETAIL],
            health.requests,
            health.errors,
        )
        key = report_key(rollout.model, rollout.channel, rollout.id, node.name)
        if key != self._key:
            self._key, self._last, self._written, self._at = key, None, b"", 0.0
        if self._is_due(report, now):
            sent = SentReport(rollout.model, rollout.channel, rollout.id, report, node.labels)
            self._send(locator.store, key, sent, now)

    def _judge(
        self, wanted: str, facts: Mapping[str, str] | None, error: EnginesmithError | None
    ) -> tuple[Failure, HealthAnswer] | None:
        """How this node is; None where nothing can be said yet. wanted: the version that the rollout brings."""
        if facts is None or facts["version"] != wanted:
            return ("pull", HealthAnswer(str(error))) if error else None
        if isinstance(error, HookFailed):
            return "hook", HealthAnswer(str(error))
        answer = self._health(facts) if self._health else HealthAnswer()
        if not answer.failure:
            return "", answer
        starting = self._clock() < self._swapped_at + self._grace_s
        return None if starting else ("unhealthy", answer)

    def _is_due(self, report: NodeReport, now: float) -> bool:
        last = self._last
        if last is None:
            return True
        changed = (report.version, report.failure, report.errors) != (last.version, last.failure, last.errors)
        return now - self._at >= (LEAST_S if changed else HEARTBEAT_S)

    def _send(self, store: Store, key: str, sent: SentReport, now: float) -> None:
        last, report = self._last, sent.report
        if last and (last.version, last.failure) == (report.version, report.failure):
            report = replace(report, since=last.since)
        if self._url:
            self._url.send(replace(sent, report=report))
        else:
            self._written = write_report(store, key, report, self._written or None)
        self._last, self._at = report, now
