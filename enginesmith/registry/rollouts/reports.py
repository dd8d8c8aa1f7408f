"""Reports of nodes about the version that they serve: one small document per node, in a rollout or outside of one.

A node writes when something changed, at most once a minute; without a change every two minutes in a rollout, every hour
outside. About `MOST_REPORTERS` nodes of a channel report, whatever the fleet's size: the controller lowers the share of
reporting nodes in a rollout (`Rollout.reporters_ppm`), a collection the share outside (`Channel.reporters_ppm`), and no
more reports are read. So neither writes nor reads grow with the fleet (docs/scale.md).

The reports have their own prefix, and nothing refers to them. The next rollout of the channel deletes those of earlier
rollouts; a collection deletes those of nodes that reported nothing for `GONE_S` outside of a rollout. A node's document
is named by the digest of its name, so that the first documents are a random sample.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Annotated, Literal

from enginesmith.core.codec import encode, parse_as
from enginesmith.core.errors import (
    ConflictError,
    Digest,
    IntegrityError,
    UndecidedError,
    canonical_json,
    digest_of_bytes,
    is_digest,
)
from enginesmith.core.parsing import Timestamp
from enginesmith.core.requirements import Count, Format
from enginesmith.registry.rollouts.rollout_state import WHOLE, Rollout, format_time, is_reporter, parse_time
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import SERVING, serving_prefix
from enginesmith.registry.store.parallel import side_by_side

FORMAT = 1
MAX_BYTES = 4 << 10
MOST_REPORTERS = 2_000
MOST_DETAIL = 200
# The variable with the token that nodes send to an endpoint; endpoints beyond loopback require it.
TOKEN = "ENGINESMITH_REPORT_TOKEN"  # noqa: S105 - the name of the variable
# The shortest and longest time between a node's writes; after the third time the controller counts it as silent.
LEAST_S, HEARTBEAT_S, SILENT_S = 60.0, 120.0, 600.0
# Reports outside of a rollout: OUTSIDE replaces the rollout's id (hexadecimal, so never equal) in a report's key, the
# next two are as above, and a collection deletes a report after GONE_S.
OUTSIDE = "nodes"
OUTSIDE_HEARTBEAT_S, OUTSIDE_SILENT_S, GONE_S = 3_600.0, 10_800.0, 7 * 86_400.0

Failure = Literal["", "pull", "hook", "unhealthy"]


@dataclass(frozen=True)
class NodeReport:
    """The state of a serving node. failure: '' if there is none.  detail: the failure as text, at most 200 characters.

    version: '' if it serves no known version.  since: the start of this state.  at: time of the report (ISO 8601, UTC),
    on the store's clock if the report was read from there, since nodes' clocks may be wrong.  requests, errors: counted
    by the server for this version, None if unknown.  engine: digest of the engine.  unit: of the engine, 'sm_89 fp16
    tensorrt-rtx'.  machine: what the engine was chosen for, as text; both of at most 200 characters.
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
    engine: Digest | None = None
    unit: str = ""
    machine: str = ""
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        return canonical_json(encode(self))

    def is_silent(self, now: datetime, after_s: float = SILENT_S) -> bool:
        """Whether the node's last report is too old. now: the time on the store's clock."""
        return (now - parse_time(self.at)).total_seconds() > after_s

    def has_same_state(self, other: "NodeReport") -> bool:
        """Whether another report has the same version, engine and failure."""
        return (self.version, self.engine, self.failure) == (other.version, other.engine, other.failure)


@dataclass(frozen=True)
class SentReport:
    """A report on its way to an endpoint: of a node, about a rollout of a channel, or OUTSIDE. labels: of the node."""

    model: str
    channel: str
    rollout: str
    report: NodeReport
    labels: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """The body of the POST request."""
        return canonical_json(encode(self))


@dataclass(frozen=True)
class Heard:
    """Reports of nodes. nodes: number of nodes with reports.  reports: those read.  damaged: unreadable ones."""

    nodes: int = 0
    reports: tuple[NodeReport, ...] = ()
    damaged: int = 0


def report_key(model: str, channel: str, rollout: str, node: str) -> str:
    """Key of a node's report about a rollout, or OUTSIDE."""
    return f"{serving_prefix(model, channel, rollout)}{digest_of_bytes(node.encode())}.json"


def write_report(store: Store, key: str, report: NodeReport, before: bytes | None) -> bytes:
    """Write a node's report, and return its bytes for the next call. before: what this process wrote last, or None.

    If the document was deleted meanwhile, it is written again. Raises ConflictError if another process reports under
    the same name.
    """
    report_bytes = report.to_bytes()
    try:
        is_written = store.replace(key, report_bytes, before)
        if not is_written and ((stored_bytes := store.read(key)) is None or before is None):
            is_written = store.replace(key, report_bytes, stored_bytes)
    except UndecidedError:
        return store.read(key) or report_bytes
    if not is_written:
        raise ConflictError(
            f"another process reports as node {report.node!r}; give each its own name (ENGINESMITH_NODE, --node)"
        )
    return report_bytes


def parse_report(data: bytes) -> NodeReport:
    """Parse a report. Raises IntegrityError."""
    return parse_as(data, MAX_BYTES, NodeReport)


def read_reports(store: Store, rollout: Rollout) -> Heard:
    """The reports of a rollout's nodes, from `read_newest` for this rollout."""
    return read_newest(store, rollout.model, rollout.channel, {rollout.id: rollout.reporters_ppm})


def read_newest(store: Store, model: str, channel: str, shares: Mapping[str, int]) -> Heard:
    """The newest report of each node that should report; at most MOST_REPORTERS are read, a random sample.

    store, model, channel: of the reports.
    shares: for each rollout, or OUTSIDE, the parts per million of the nodes that report.
    A node outside the share, which was lowered meanwhile, has left its last report there.
    """
    newest_entries: dict[str, tuple[datetime, str]] = {}
    for rollout, reporters_ppm in shares.items():
        prefix = serving_prefix(model, channel, rollout)
        for key, written_at in store.stamps(prefix):
            node = key.removeprefix(prefix).removesuffix(".json")
            if is_digest(node) and is_reporter(node, reporters_ppm):
                newest_entries[node] = max(newest_entries.get(node, (written_at, key)), (written_at, key))
    entries = [newest_entries[node] for node in sorted(newest_entries)]
    documents = side_by_side(store.read, [key for _, key in entries[:MOST_REPORTERS]])
    node_reports, damaged_count = list[NodeReport](), 0
    for (written_at, _), (_, report_bytes) in zip(entries, documents, strict=False):
        try:
            if report_bytes is not None:
                node_reports.append(replace(parse_report(report_bytes), at=format_time(written_at)))
        except IntegrityError:
            damaged_count += 1
    return Heard(len(entries), tuple(node_reports), damaged_count)


def reporting_channels(store: Store) -> Iterator[tuple[str, str]]:
    """Model and channel of all stored reports; sends one listing per model."""
    for model in store.children(SERVING):
        for channel in store.children(f"{SERVING}{model}"):
            yield model.removesuffix("/"), channel.removesuffix("/")


def clear_reports(store: Store, running: Rollout, read_rollout: Callable[[], Rollout | None]) -> int:
    """Delete the reports of a channel's earlier rollouts, at most 10 * MOST_REPORTERS; return how many.

    read_rollout: reads the channel's rollout after the reports are listed. If another rollout runs by then, its reports
    may be listed, and none is deleted.
    """
    model, channel = running.model, running.channel
    other_prefixes = tuple(serving_prefix(model, channel, rollout) for rollout in (running.id, OUTSIDE))
    listed_keys = (key for key in store.list(serving_prefix(model, channel)) if not key.startswith(other_prefixes))
    keys = list(islice(listed_keys, 10 * MOST_REPORTERS))
    rollout_now = read_rollout() if keys else None
    if rollout_now is None or rollout_now.id != running.id:
        return 0
    return len(list(side_by_side(store.remove, keys)))


def clear_gone(store: Store, now: datetime) -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """Delete reports outside of rollouts of nodes that are gone for `GONE_S`. Returns the deleted keys, and by model
    and channel the digests of the names of nodes heard of within `OUTSIDE_SILENT_S`. now: the store's time.

    A node that returns at the same moment may lose its first report; its next one writes it anew (`write_report`).
    """
    deleted_keys, reporting_nodes = list[str](), dict[tuple[str, str], list[str]]()
    for key, written_at in store.stamps(SERVING):
        match key.removeprefix(SERVING).removesuffix(".json").split("/"):
            case [model, channel, rollout, node] if rollout == OUTSIDE and is_digest(node):
                age_s = (now - written_at).total_seconds()
                reporting_nodes.setdefault((model, channel), []).extend([node] * (age_s <= OUTSIDE_SILENT_S))
                deleted_keys += [key] * (age_s > GONE_S)
    for _ in side_by_side(store.remove, deleted_keys):
        pass
    return deleted_keys, reporting_nodes


def next_share(share_ppm: int, count: int) -> int:
    """The new share of nodes, in parts per million, that report: less if too many do, and at most doubled if few do.
    count: of nodes that report."""
    if MOST_REPORTERS / 2.5 <= count <= 1.25 * MOST_REPORTERS:
        return share_ppm
    return max(1, min(WHOLE, 2 * share_ppm, share_ppm * MOST_REPORTERS // max(1, count)))
