"""Runs in the registry: their state as values, and how they are named, read and deleted."""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode, parse_as
from enginesmith.core.constraints import Amount, Count, Format
from enginesmith.core.digest import Digest, canonical_json
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnknownNameError
from enginesmith.core.names import is_name
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import RUNS, run_key, run_live_key

FORMAT = 1
MAX_BYTES = 32 << 20
# The most items of a run that are stored; running and failed ones come first.
MOST_ITEMS = 5000
State = Literal["running", "done", "failed", "interrupted"]
ItemState = Literal["planned", "waiting", "running", "done", "built", "cached", "failed", "refused", "cancelled"]
# States that a unit does not leave.
OVER = ("done", "built", "cached", "failed", "refused", "cancelled")
# The number of newest runs that are kept, of each model and of all.
MOST_OF_MODEL = 20
MOST = 2000
# A run whose document was not written for so long is dead, whatever it says; one that runs is never deleted before.
LONGEST_RUN_S = 48 * 3600
_ID = re.compile(r"([0-9]{8}T[0-9]{6}Z)\.(.+)\.([0-9a-f]{6})")
_LIVE_BYTES = 8 << 20


@dataclass(frozen=True)
class RunItem:
    """One step or unit of a run. target, precision, backend: '' for a step.

    why: what it waits for, or the reason why it ended.  retries: the reason of each restart.
    verdict: 'proven', 'unproven' or 'failed', with the reason.  started_at, ended_at: ISO 8601, UTC.
    seconds, peak_mib, cpu_s: time, peak memory and CPU time of its process.  log: digest of its output without
    credentials; log_bytes: the output's size.
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
    seconds: Amount | None = None
    peak_mib: Amount | None = None
    cpu_s: Amount | None = None
    predicted: Expectation | None = None
    log: Digest | None = None
    log_bytes: Count = 0

    @property
    def is_unit(self) -> bool:
        """Whether this is a unit of the plan, and not a step."""
        return bool(self.backend)


@dataclass(frozen=True)
class RunState:
    """A run. id: its name in the registry.  spec: the spec's path or address.  host, pid, user: of its process;
    namespace, began: as in `Presence`.

    state: 'running', 'done', 'failed' (nothing published, a unit failed, or an error) or 'interrupted'.
    heard_at: when this was written; while it runs, at the latest every `beats_every_s`.
    version: the published version.  reason: why it failed.  left_out: number of items beyond `MOST_ITEMS`, not stored.
    """

    id: str
    model: str
    spec: str
    state: State
    started_at: str
    heard_at: str
    beats_every_s: Amount
    host: str
    pid: Count
    user: str
    by: str = ""
    ended_at: str | None = None
    version: str | None = None
    reason: str = ""
    items: tuple[RunItem, ...] = field(default=())
    left_out: Count = 0
    namespace: str = ""
    began: str = ""
    format: Annotated[int, Format(FORMAT)] = FORMAT

    @property
    def units(self) -> tuple[RunItem, ...]:
        """The units of the plan, without the steps."""
        return tuple(item for item in self.items if item.is_unit)

    def item(self, name: str) -> RunItem | None:
        """The unit or step of this name; None if there is none."""
        return next((item for item in self.items if item.name == name), None)

    def to_bytes(self) -> bytes:
        """The document as it is stored. Items leave out empty fields, since a run may have thousands of items."""
        empty: tuple[object, ...] = (None, "", (), [], 0)
        items = [{name: value for name, value in encode(item).items() if value not in empty} for item in self.items]
        return canonical_json({**encode(self), "items": items})


def limit_items(items: Sequence[RunItem]) -> tuple[RunItem, ...]:
    """The items that a run's document stores: all in their order; of more than MOST_ITEMS, running and failed ones
    first."""
    if len(items) <= MOST_ITEMS:
        return tuple(items)
    return tuple(sorted(items, key=lambda item: item.state in OVER and item.state != "failed")[:MOST_ITEMS])


def new_id(model: str) -> str:
    """A new run name, which sorts by time and contains the model: '20261120T181105Z.digits.3fa9c1'.

    Its end is the milliseconds of that second, and a random number, in three hexadecimal digits each.
    """
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}.{model}.{now.microsecond // 1000:03x}{secrets.randbelow(1 << 12):03x}"


def model_of(run: str) -> str:
    """The model in a run's name; '' if it is no run's name."""
    found = _ID.fullmatch(run)
    return found[2] if found and is_name(found[2]) else ""


def run_ids(store: Store) -> list[str]:
    """The names of all runs, newest first. Lists keys, and reads no document."""
    names = (name.removesuffix(".json") for name in store.children(RUNS) if name.endswith(".json"))
    return sorted((run for run in names if model_of(run)), reverse=True)


def read_run(store: Store, run: str) -> RunState | None:
    """Read a run; None if it does not exist. Raises IntegrityError if it cannot be read."""
    data = store.read(run_key(run))
    return None if data is None else parse_run(run_key(run), data)


def parse_run(key: str, data: bytes) -> RunState:
    """Read a run's document. Raises IntegrityError that names the key."""
    try:
        return parse_as(data, MAX_BYTES, RunState)
    except IntegrityError as error:
        raise IntegrityError(f"{key}: {error}; it is only a memory: delete it") from error


def read_runs(store: Store, runs: list[str]) -> Iterator[RunState]:
    """Read these runs; those that were deleted meanwhile or cannot be read are left out."""
    for run in runs:
        with suppress(IntegrityError):
            if (found := read_run(store, run)) is not None:
                yield found


def find_run(store: Store, name: str) -> RunState:
    """The run of this name, or the newest of the model of this name. Raises UnknownNameError."""
    known = run_ids(store)
    chosen = [run for run in known if run == name] or [run for run in known if model_of(run) == name]
    for run in chosen:
        if (found := read_run(store, run)) is not None:
            return found
    models = ", ".join(sorted({model_of(run) for run in known})) or "none"
    raise UnknownNameError(f"no run or model {name!r} in {store.uri}; models with runs: {models}")


def read_live(store: Store, run: str) -> dict[str, str]:
    """Job's name -> the end of its output, for the running jobs of a run; empty where it cannot be read."""
    data = store.read(run_live_key(run))
    try:
        return decode(parsing.parse_json(data, _LIVE_BYTES), dict[str, str]) if data else {}
    except IntegrityError:
        return {}


def find_ages(store: Store) -> dict[str, timedelta]:
    """Run -> how long ago its document was written, by the store's clock: that of its machine may be wrong."""
    written = dict(store.stamps(RUNS))
    now = store.now()
    return {key.removeprefix(RUNS).removesuffix(".json"): now - at for key, at in written.items()}


def surplus(store: Store) -> list[str]:
    """The names of runs beyond the number that is kept, oldest first. Lists keys, and reads no document."""
    seen: dict[str, int] = {}
    gone = []
    for number, run in enumerate(run_ids(store)):
        seen[model_of(run)] = seen.get(model_of(run), 0) + 1
        if seen[model_of(run)] > MOST_OF_MODEL or number >= MOST:
            gone.append(run)
    return gone[::-1]


def prune(store: Store) -> list[str]:
    """Delete surplus runs that cannot still be running, and return their names. The next `enginesmith registry gc`
    deletes their logs."""
    gone: list[str] = []
    runs = surplus(store)
    ages = find_ages(store) if runs else {}
    for run in runs:
        if (age := ages.get(run)) is not None and age.total_seconds() <= LONGEST_RUN_S:
            with suppress(EnginesmithError):  # a run that cannot be read is not running
                if (found := read_run(store, run)) is not None and found.state == "running":
                    continue
        for key in (run_live_key(run), run_key(run)):
            store.remove(key)
        gone.append(run)
    return gone
