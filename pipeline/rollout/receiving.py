"""Takes reports over HTTP from nodes that may read the registry and not write it, and stores them.

A report is taken only of a node that is asked for it: in a rollout that runs, has reached the node and has the version,
or outside of one; and at most once a minute from each. All else is answered with the reason. It counts as of the time
when it is stored, whatever the node's clock says. The only state of a node is its report in the registry. Beyond
loopback all nodes show one token (`ENGINESMITH_REPORT_TOKEN`); each node states its own name.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from threading import Lock

from enginesmith.core.codec import parse_as
from enginesmith.core.errors import (
    EnginesmithError,
    HttpAddress,
    IntegrityError,
    UnavailableError,
    digest_of_bytes,
    read_token,
    require_token,
)
from enginesmith.core.names import is_name
from enginesmith.listening import HttpAnswer, HttpLimits, HttpRequest, HttpServer
from enginesmith.registry.rollouts.reports import (
    LEAST_S,
    MAX_BYTES,
    MOST_DETAIL,
    MOST_REPORTERS,
    OUTSIDE,
    TOKEN,
    NodeReport,
    SentReport,
    parse_report,
    report_key,
    write_report,
)
from enginesmith.registry.rollouts.rollout_state import (
    Rollout,
    ServingNode,
    format_time,
    is_reached,
    is_reporter,
    parse_time,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import serving_prefix
from enginesmith.registry.versions.channel_state import Channel, read_channel

LIMITS = HttpLimits(body_bytes=MAX_BYTES, connections=1024, threads=16)
# Maximum number of nodes with reports in a rollout, or in a channel without one: ten times the number asked.
MOST_NODES = 10 * MOST_REPORTERS
# Seconds after which they are counted again, because a collection deletes reports of removed nodes.
_COUNTED_S = 3600.0


@dataclass
class ReportReceiver:
    """Checks and stores reports. clock: seconds, for tests."""

    store: Store
    clock: Callable[[], float] = time.time
    # Of the channels, and whether it is outside of a rollout: the rollout, how many nodes have reported, counted when.
    _counts: dict[tuple[str, str, bool], tuple[str, int, float]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __call__(self, request: HttpRequest) -> HttpAnswer:
        """The answer to a report. Raises UnavailableError without the registry."""
        status, reason = self.take(request.body)
        return HttpAnswer(status, f"{reason}\n".encode() if reason else b"")

    def take(self, data: bytes) -> tuple[int, str]:
        """Store a report; the HTTP status and the reason. Raises UnavailableError without the registry."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        try:
            message = parse_as(data, MAX_BYTES, SentReport)
            report = parse_report(message.report.to_bytes())
            node = ServingNode(report.node, report.region, message.labels)
            key = report_key(message.model, message.channel, message.rollout, report.node)
            channel = read_channel(self.store, message.model, message.channel)
            rollout = channel.active_rollout if channel and message.rollout != OUTSIDE else None
            if channel is None or message.rollout != (rollout.id if rollout else OUTSIDE):
                return 409, "no such rollout is running"
            if objection := find_objection(channel, rollout, node, report):
                return 422, objection
            old_report = self.store.read(key)
            if old_report is not None and _is_recent(old_report, now):
                return 429, f"a node reports at most every {LEAST_S:g} s"
            if old_report is None and not self._admit(message):
                return 429, f"{MOST_NODES} nodes have reported, and no more are accepted"
        except UnavailableError:
            raise
        except EnginesmithError as error:
            return 400, str(error)
        write_report(self.store, key, replace(report, at=format_time(now)), old_report)
        return 204, ""

    def _admit(self, message: SentReport) -> bool:
        """Count one more node of the rollout, or outside of one; False where there are too many."""
        channel_key, rollout_id = (message.model, message.channel, message.rollout == OUTSIDE), message.rollout
        with self._lock:
            counted_rollout, count, counted_s = self._counts.get(channel_key, ("", 0, 0.0))
            if counted_rollout != rollout_id or self.clock() > counted_s + _COUNTED_S:
                count = sum(1 for _ in self.store.list(serving_prefix(message.model, message.channel, rollout_id)))
                counted_s = self.clock()
            self._counts[channel_key] = rollout_id, count + (count < MOST_NODES), counted_s
            return count < MOST_NODES


def find_objection(channel: Channel, rollout: Rollout | None, node: ServingNode, report: NodeReport) -> str:
    """Why a report cannot be one of this node in this rollout, or (None) outside of one; '' where it can be."""
    if rollout and not is_reached(node, rollout.id, rollout.reach):
        return f"the rollout has not reached node {node.name}"
    if not is_reporter(digest_of_bytes(node.name.encode()), (rollout or channel).reporters_ppm):
        return f"node {node.name} is not among those that report"
    # Outside of a rollout a node may serve any version for long, as none that came later fits it.
    is_expected = report.version in (rollout.version, rollout.base) if rollout else is_name(report.version)
    if not is_expected and (report.version or report.failure != "pull"):
        expected_text = f"neither new {rollout.version} nor old {rollout.base}" if rollout else "not a version name"
        return f"version {report.version[:80]!r} is {expected_text}"
    if (length := max(map(len, (report.detail, report.unit, report.machine)))) > MOST_DETAIL:
        return f"one of its texts has {length} characters; at most {MOST_DETAIL} are allowed"
    return ""


def _is_recent(data: bytes, now: datetime) -> bool:
    """Whether a stored report was taken less than LEAST_S ago; one that is damaged, or that a receiver with another
    clock took, was not."""
    try:
        return timedelta(0) <= now - parse_time(parse_report(data).at) < timedelta(seconds=LEAST_S - 1)
    except IntegrityError:
        return False


def make_server(store: Store, address: HttpAddress, clock: Callable[[], float] = time.time) -> HttpServer:
    """A server of reports, not started. Raises as `read_token`, InputError beyond loopback without a token."""
    token = read_token(TOKEN)
    require_token(address, token, TOKEN)
    receiver, remedy = ReportReceiver(store, clock), "give another --listen"
    return HttpServer(receiver, address, LIMITS, methods=("POST",), token=token, remedy=remedy)
