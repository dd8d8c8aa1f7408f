"""What nodes report of a rollout: one small document a node, and only of nodes that the rollout has reached.

A node writes when something changed and every two minutes, at most once a minute. About `MOST_REPORTERS` nodes report,
however many there are: the controller lowers the share of those that do (`PointedRollout.reporters_ppm`) and reads no
more of them. So neither the writes nor the reads of a rollout grow with the fleet (docs/scale.md).

They lie under a prefix of their own, which no collection reads; the next rollout of the channel deletes them. A node's
document is named by the digest of its name, so that the first of them are a random sample.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Annotated, Literal, TypeVar

from enginesmith.core.codec import encode, parse_as
from enginesmith.core.errors import (
    ConflictError,
    IntegrityError,
    UndecidedError,
    canonical_json,
    digest_of_bytes,
    is_digest,
)
from enginesmith.core.parsing import Timestamp
from enginesmith.core.requirements import Count, Format
from enginesmith.registry.rollouts.state import Rollout, format_time, parse_time, reports
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import serving_prefix

FORMAT = 1
MAX_BYTES = 4 << 10
MOST_REPORTERS = 2_000
MOST_DETAIL = 200
# The variable with the token that nodes show to an endpoint, which asks for it beyond loopback.
TOKEN = "ENGINESMITH_REPORT_TOKEN"  # noqa: S105 - the name of the variable
# A node writes at most so often, and at least so often; the controller counts it as silent after so long.
LEAST_S, HEARTBEAT_S, SILENT_S = 60.0, 120.0, 600.0
_AT_ONCE = 16
T = TypeVar("T")

Failure = Literal["", "pull", "hook", "unhealthy"]


@dataclass(frozen=True)
class NodeReport:
    """What a node serves. failure: '' where all is well.  detail: the failure in words, at most 200 characters.

    since: since when it is so.  at: time of the report (ISO 8601, UTC), by the store's clock where it was read from
    there, since nodes' clocks may be wrong.  requests, errors: that the server counted of
    this version, None where it says none.
    """

    node: str
    region: str
    version: str
    since: Timestamp
    at: Timestamp
    failure: Failure = ""
    detail: str = ""
    requests: Count | None = None
    errors: Count | None = None
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        return canonical_json(encode(self))

    def is_silent(self, now: datetime) -> bool:
        """Whether the node has not been heard of for too long. now: by the store's clock."""
        return (now - parse_time(self.at)).total_seconds() > SILENT_S


@dataclass(frozen=True)
class SentReport:
    """A report on its way to an endpoint: of a node, about a rollout of a channel. labels: of the node."""

    model: str
    channel: str
    rollout: str
    report: NodeReport
    labels: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """What is posted."""
        return canonical_json(encode(self))


@dataclass(frozen=True)
class Heard:
    """The reports of a rollout. nodes: how many have reported.  reports: those that were read.  damaged: how many could
    not be."""

    nodes: int = 0
    reports: tuple[NodeReport, ...] = ()
    damaged: int = 0


NOTHING_HEARD = Heard()


def report_key(model: str, channel: str, rollout: str, node: str) -> str:
    """Key of a node's report."""
    return f"{serving_prefix(model, channel, rollout)}{digest_of_bytes(node.encode())}.json"


def write_report(store: Store, key: str, report: NodeReport, before: bytes | None) -> bytes:
    """Write a node's report, and return its bytes, for the next one. before: what this process wrote last, or None.

    Raises ConflictError where another process reports under the same name.
    """
    data = report.to_bytes()
    try:
        is_written = store.replace(key, data, before) or (before is None and store.replace(key, data, store.read(key)))
    except UndecidedError:
        return store.read(key) or data
    if not is_written:
        raise ConflictError(
            f"another process reports as node {report.node!r}; give each its name (ENGINESMITH_NODE, --node)"
        )
    return data


def parse_report(data: bytes) -> NodeReport:
    """A report from its document's bytes. Raises IntegrityError."""
    return parse_as(data, MAX_BYTES, NodeReport)


def read_reports(store: Store, rollout: Rollout) -> Heard:
    """The reports of the nodes that are asked for them; at most MOST_REPORTERS are read, a random sample.

    A node that is asked no longer, as fewer shall report by now, has left its last report there.
    """
    prefix = serving_prefix(rollout.model, rollout.channel, rollout.id)
    write_times = dict(store.stamps(prefix))
    node_keys = ((key, key.removeprefix(prefix).removesuffix(".json")) for key in sorted(write_times))
    keys = [key for key, node in node_keys if is_digest(node) and reports(node, rollout.reporters_ppm)]
    documents = _each(store, store.read, keys[:MOST_REPORTERS])
    node_reports, damaged_count = list[NodeReport](), 0
    for key, data in zip(keys, documents, strict=False):
        try:
            if data is not None:
                node_reports.append(replace(parse_report(data), at=format_time(write_times[key])))
        except IntegrityError:
            damaged_count += 1
    return Heard(len(keys), tuple(node_reports), damaged_count)


def clear_reports(store: Store, running: Rollout) -> int:
    """Delete the reports of a channel's rollouts but the one that runs, at most 10 * MOST_REPORTERS, and return how
    many."""
    model, channel = running.model, running.channel
    running_prefix = serving_prefix(model, channel, running.id)
    keys = (key for key in store.list(serving_prefix(model, channel)) if not key.startswith(running_prefix))
    return len(_each(store, store.remove, list(islice(keys, 10 * MOST_REPORTERS))))


def _each(store: Store, work: Callable[[str], T], keys: Sequence[str]) -> list[T]:
    """What `work` gives for each key; side by side where each is a request."""
    if store.near:
        return [work(key) for key in keys]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(work, keys))
