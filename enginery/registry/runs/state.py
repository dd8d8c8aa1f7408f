"""The state of a run as values: what its document in the registry says."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from enginery.core import parsing
from enginery.core.digest import canonical_json, is_digest
from enginery.core.errors import IntegrityError
from enginery.registry.runs.history import Expectation

FORMAT = 1
MAX_BYTES = 32 << 20
# Of a run; what runs or failed comes before what is well.
MOST_ITEMS = 5000
State = Literal["running", "done", "failed", "interrupted"]
ItemState = Literal["planned", "waiting", "running", "done", "built", "cached", "failed", "refused", "cancelled"]
# States that a unit does not leave.
OVER = ("done", "built", "cached", "failed", "refused", "cancelled")


@dataclass(frozen=True)
class Item:
    """One step or unit. target, precision, backend: '' for a step.

    why: what it waits for, or the reason of its end.  retries: why it was started again, each time.
    verdict: 'proven', 'unproven' or 'failed', with the reason.  started_at, ended_at: ISO 8601, UTC.
    seconds, peak_mib: what its process took.  log: digest of what it printed, scrubbed; log_bytes: how much that was.
    """

    name: str
    state: ItemState
    target: str = ""
    precision: str = ""
    backend: str = ""
    phase: str = ""
    where: str = ""
    why: str = ""
    retries: tuple[str, ...] = ()
    verdict: str = ""
    started_at: str | None = None
    ended_at: str | None = None
    seconds: float | None = None
    peak_mib: float | None = None
    predicted: Expectation | None = None
    log: str | None = None
    log_bytes: int = 0

    @property
    def is_unit(self) -> bool:
        """Whether this is an engine of the plan, and no step before or after."""
        return bool(self.backend)


@dataclass(frozen=True)
class RunState:
    """A run. id: its name in the registry.  spec: what it was started from, as `enginery build` takes it.  host, pid,
    user: where and whose; namespace, began: of the process, as a `Presence` has them.

    state: 'running', 'done', 'failed' (nothing published, a unit failed, or an error) or 'interrupted'.
    heard_at: when this was written; while it runs, at the latest every `beats_every_s`.
    version: what was published.  reason: why it failed.  left_out: how many items beyond `MOST_ITEMS` are not told of.
    """

    id: str
    model: str
    spec: str
    state: State
    started_at: str
    heard_at: str
    beats_every_s: float
    host: str
    pid: int
    user: str
    by: str = ""
    ended_at: str | None = None
    version: str | None = None
    reason: str = ""
    items: tuple[Item, ...] = field(default=())
    left_out: int = 0
    namespace: str = ""
    began: str = ""
    format: int = FORMAT

    @property
    def units(self) -> tuple[Item, ...]:
        """The engines of the plan."""
        return tuple(item for item in self.items if item.is_unit)

    def item(self, name: str) -> Item | None:
        """A unit or step by its name."""
        return next((item for item in self.items if item.name == name), None)

    def to_bytes(self) -> bytes:
        """The document as it is stored. Fields that say nothing are left out of items: a run may have thousands."""
        return canonical_json({**asdict(self), "items": [_said(asdict(item)) for item in self.items]})


def told_of(items: Sequence[Item]) -> tuple[Item, ...]:
    """As many as a document tells of: in their order, but where there are too many."""
    if len(items) <= MOST_ITEMS:
        return tuple(items)
    return tuple(sorted(items, key=lambda item: item.state in OVER and item.state != "failed")[:MOST_ITEMS])


def parse_run(key: str, data: bytes) -> RunState:
    """Read a run's document. Raises IntegrityError that names the key."""
    try:
        run = parsing.parse_as(data, MAX_BYTES, RunState)
        if run.format != FORMAT:
            raise IntegrityError(f"format is {run.format}; this enginery reads {FORMAT}: upgrade enginery")
        if strange := [item.log for item in run.items if item.log and not is_digest(item.log)]:
            raise IntegrityError(f"items.log is {strange[0][:80]!r}, which is no digest")
    except IntegrityError as error:
        raise IntegrityError(f"{key}: {error}; it is only a memory: delete it") from error
    return run


def _said(item: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in item.items() if value not in (None, "", (), [], 0)}
