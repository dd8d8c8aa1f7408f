"""The state of a run as values: what its document in the registry says."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError
from enginery.registry.runs.history import Expectation

FORMAT = 1
MAX_BYTES = 32 << 20
# Of a run; what runs or failed comes before what is well.
MOST_ITEMS = 5000
RUN_STATES = ("running", "done", "failed", "interrupted")
ITEM_STATES = ("planned", "waiting", "running", "done", "built", "cached", "failed", "refused", "cancelled")
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
    state: str
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
    state: str
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

    @property
    def units(self) -> tuple[Item, ...]:
        """The engines of the plan."""
        return tuple(item for item in self.items if item.is_unit)

    def item(self, name: str) -> Item | None:
        """A unit or step by its name."""
        return next((item for item in self.items if item.name == name), None)

    def to_bytes(self) -> bytes:
        """The document as it is stored. Fields that say nothing are left out of items: a run may have thousands."""
        return canonical_json({**asdict(self), "format": FORMAT, "items": [_said(asdict(item)) for item in self.items]})


def told_of(items: Sequence[Item]) -> tuple[Item, ...]:
    """As many as a document tells of: in their order, but where there are too many."""
    if len(items) <= MOST_ITEMS:
        return tuple(items)
    return tuple(sorted(items, key=lambda item: item.state in OVER and item.state != "failed")[:MOST_ITEMS])


def parse_run(key: str, data: bytes) -> RunState:
    """Read a run's document. Raises IntegrityError that names the key."""
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
            raise parsing.Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
        words = ("id", "model", "spec", "started_at", "heard_at", "host", "namespace", "began", "user", "by", "reason")
        return RunState(
            **{name: parsing.field(document, name, parsing.text) for name in words},
            state=parsing.field(document, "state", parsing.one_of(*RUN_STATES)),
            beats_every_s=parsing.field(document, "beats_every_s", parsing.quantity),
            pid=parsing.field(document, "pid", parsing.count),
            ended_at=parsing.field(document, "ended_at", parsing.optional(parsing.text)),
            version=parsing.field(document, "version", parsing.optional(parsing.text)),
            items=parsing.field(document, "items", parsing.many(_item)),
            left_out=parsing.field(document, "left_out", parsing.count),
        )
    except parsing.Malformed as error:
        raise IntegrityError(f"{key}: {error}; it is only a memory: delete it") from error


def _said(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if value not in (None, "", (), [], 0)}


def _item(value: Any, path: str) -> Item:
    data = parsing.mapping(value, path)

    def given(name: str, read: Any, absent: Any) -> Any:
        return parsing.field(data, name, read, path) if name in data else absent

    words = ("target", "precision", "backend", "phase", "where", "why", "verdict")
    return Item(
        name=parsing.field(data, "name", parsing.text, path),
        state=parsing.field(data, "state", parsing.one_of(*ITEM_STATES), path),
        **{name: given(name, parsing.text, "") for name in words},
        **{name: given(name, parsing.text, None) for name in ("started_at", "ended_at")},
        **{name: given(name, parsing.quantity, None) for name in ("seconds", "peak_mib")},
        retries=given("retries", parsing.many(parsing.text), ()),
        predicted=given("predicted", _predicted, None),
        log=given("log", parsing.digest, None),
        log_bytes=given("log_bytes", parsing.count, 0),
    )


def _predicted(value: Any, path: str) -> Expectation:
    data = parsing.mapping(value, path)
    return Expectation(
        parsing.field(data, "seconds", parsing.optional(parsing.quantity), path),
        parsing.field(data, "peak_mib", parsing.quantity, path),
        parsing.field(data, "builds", parsing.count, path),
        parsing.field(data, "basis", parsing.text, path),
    )
