"""Runs and the records of their steps."""

import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Annotated, Literal

from enginesmith.core import parsing
from enginesmith.core.codec import Excerpt, decode, encode, explain_damage, parse_as
from enginesmith.core.errors import (
    Digest,
    EnginesmithError,
    IntegrityError,
    UnknownNameError,
    canonical_json,
    digest_of,
)
from enginesmith.core.names import is_name
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.requirements import Amount, Count, Format, JsonObject
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.store.base import Store, change
from enginesmith.registry.store.layout import RUNS, blob_key, record_key, run_key, run_live_key

# Records of steps: the result of a step, by the digest of all its inputs.
#
# Records are a cache: a lost record only causes a repeated step. So a record that is unreadable, or whose blobs are
# missing, counts as absent, and a new one replaces it.

MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Record(Excerpt):
    """A step's recorded result: its value, a JSON object, and the digests of the blobs that the value refers to."""

    value: JsonObject
    blobs: tuple[Digest, ...]


class StoredRecords:
    """The records of a store, read one by one."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def read_record(self, kind: str, key: str) -> Record | None:
        """The record of a step; None if there is no readable one."""
        return read_record(self.store.read(record_key(kind, key)))

    def stored_size(self, digest: str) -> int | None:
        """Size of a blob in bytes; None if it is missing."""
        return self.store.stored_size(digest)

    def recall(
        self, kind: str, key: str, sizes: Callable[[dict[str, object]], Mapping[str, int]] | None = None
    ) -> dict[str, object] | None:
        """The recorded value of a step; None without a record, or if a blob that it refers to is missing.

        Reads no blob. sizes: gives blobs' sizes in bytes by digest, from the value; truncated blobs count as missing.
        """
        record = self.read_record(kind, key)
        if record is None:
            return None
        expected_sizes = sizes(dict(record.value)) if sizes else {}
        stored_sizes = ((digest, self.stored_size(digest)) for digest in record.blobs)
        is_sound = all(size is not None and size == expected_sizes.get(digest, size) for digest, size in stored_sizes)
        return dict(record.value) if is_sound else None


def recall(store: Store, kind: str, key: str) -> dict[str, object] | None:
    """`StoredRecords.recall` of a store, without a check of the blobs' sizes."""
    return StoredRecords(store).recall(kind, key)


def remember(store: Store, kind: str, key: str, value: Mapping[str, object], blobs: Sequence[str] = ()) -> None:
    """Record a step's value (a JSON object) and the blobs that it refers to. The last of concurrent writers wins.

    Raises ValueError for NaN in the value, InputError for a bad kind, key or digest.
    """
    document_key = record_key(kind, key)
    record_bytes = canonical_json({"blobs": sorted(set(blobs)), "value": dict(value)})
    change(store, document_key, lambda _: record_bytes)


def read_record(data: bytes | None) -> Record | None:
    """Parse a record; None for None and for bytes that are no record."""
    with suppress(Malformed):
        return as_record(parse_json(data or b"", MAX_BYTES))
    return None


def as_record(document: object) -> Record | None:
    """The record in a JSON value; None if it is no record."""
    with suppress(Malformed):
        return decode(document, Record)
    return None


# Copies of the records that planning a model read, in one document; and listings of a store's keys.
#
# Without copies, a plan of many models would send one request per record and per blob. A copy has the same key as its
# record, the digest of all inputs of the step, and counts only if the store lists that record. A record that is not
# copied or not listed is read with its own request. So copies change the speed of a plan, never its result. Records
# whose key does not cover the inputs ('latest-...') are not copied.

KIND = "copies"
# The maximum size of the document: reading a larger one would take longer than the single requests.
MOST_BYTES = 8 << 20
_CHANGING = "latest-"


class StoreListing:
    """The keys in a store, with their sizes in bytes; each folder is listed once, on first use.

    Thread-safe. Keys that are stored after the listing of their folder are missing.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folders: dict[str, Mapping[str, int]] = {}
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)

    def size(self, key: str) -> int | None:
        """Size of a document or a blob in bytes; None if it is not listed."""
        folder = key[: key.rindex("/") + 1]
        if folder not in self._folders:
            with self._locks[folder]:
                if folder not in self._folders:
                    self._folders[folder] = dict(self.store.sizes(folder))
        return self._folders[folder].get(key)


class RecordCopies(StoredRecords):
    """The records of one model, read from its copies where possible. `save` updates the copies."""

    def __init__(self, listing: StoreListing, model: str) -> None:
        super().__init__(listing.store)
        self._listing, self._key = listing, digest_of({"model": model})
        record = super().read_record(KIND, self._key)
        copied_records = record.value.get("records") if record else None
        self._copies: Mapping[str, object] = copied_records if isinstance(copied_records, dict) else {}
        self._read: dict[str, Record] = {}

    def read_record(self, kind: str, key: str) -> Record | None:
        """See `StoredRecords.read_record`."""
        if kind.startswith(_CHANGING):
            return super().read_record(kind, key)
        document_key = record_key(kind, key)
        is_copied = document_key in self._copies and self._listing.size(document_key) is not None
        record = as_record(self._copies[document_key]) if is_copied else None
        if record := record or super().read_record(kind, key):
            self._read[document_key] = record
        return record

    def stored_size(self, digest: str) -> int | None:
        """See `StoredRecords.stored_size`."""
        listed_size = self._listing.size(blob_key(digest))
        return super().stored_size(digest) if listed_size is None else listed_size

    def save(self) -> None:
        """Write copies of the records that were read, unless the stored copies have all of them."""
        if self._read.keys() <= self._copies.keys():
            return
        copies = {key: {"blobs": list(record.blobs), "value": record.value} for key, record in self._read.items()}
        if len(canonical_json(copies)) <= MOST_BYTES:
            remember(self.store, KIND, self._key, {"records": copies})


FORMAT = 1
MAX_STATE_BYTES = 32 << 20
# The maximum number of a run's items that are stored; running and failed ones come first.
MOST_ITEMS = 5000
State = Literal["running", "done", "failed", "interrupted"]
ItemState = Literal["planned", "waiting", "running", "done", "built", "cached", "failed", "refused", "cancelled"]
# The final states of a unit.
OVER = ("done", "built", "cached", "failed", "refused", "cancelled")
# The number of newest runs that are kept, for each model and for all together.
MOST_OF_MODEL = 20
MOST = 2000
# A run whose document was not written for this long is dead, whatever its state; a running one is not deleted earlier.
LONGEST_RUN_S = 48 * 3600
_ID = re.compile(r"([0-9]{8}T[0-9]{6}Z)\.(.+)\.([0-9a-f]{6})")
_LIVE_BYTES = 8 << 20


@dataclass(frozen=True)
class RunItem:
    """One step or unit of a run. target, precision, backend: '' for a step.

    why: the reason why it waits or ended.  retries: the reason of each restart.
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
        """Whether this is a unit of the plan, not a step."""
        return bool(self.backend)


@dataclass(frozen=True)
class RunState:
    """A run. id: its name in the registry.  spec: the spec's path or address.  host, pid, user: of its process;
    namespace, began: as in `Presence`.

    state: 'running', 'done', 'failed' (nothing published, a unit failed, or an error) or 'interrupted'.
    heard_at: when this document was written; a running process writes it at least every `beats_every_s`.
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
        return tuple(run_item for run_item in self.items if run_item.is_unit)

    def item(self, name: str) -> RunItem | None:
        """The unit or step with this name; None if there is none."""
        return next((run_item for run_item in self.items if run_item.name == name), None)

    def to_bytes(self) -> bytes:
        """The document as it is stored. Items leave out empty fields, since a run may have thousands of items."""
        empty_values: tuple[object, ...] = (None, "", (), [], 0)
        items = [
            {name: value for name, value in encode(item).items() if value not in empty_values} for item in self.items
        ]
        return canonical_json({**encode(self), "items": items})


def limit_items(items: Sequence[RunItem]) -> tuple[RunItem, ...]:
    """The items that a run's document stores: all in their order; if there are more than MOST_ITEMS, running and failed
    ones first."""
    if len(items) <= MOST_ITEMS:
        return tuple(items)
    return tuple(sorted(items, key=lambda run_item: run_item.state in OVER and run_item.state != "failed")[:MOST_ITEMS])


def new_id(model: str) -> str:
    """A new run name, which sorts by time and contains the model: '20261120T181105Z.digits.3fa9c1'.

    It ends with the milliseconds of that second and a random number, in three hexadecimal digits each.
    """
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}.{model}.{now.microsecond // 1000:03x}{secrets.randbelow(1 << 12):03x}"


def model_of(run: str) -> str:
    """The model in a run's name; '' if the text is no run's name."""
    match = _ID.fullmatch(run)
    return match[2] if match and is_name(match[2]) else ""


def run_ids(store: Store) -> list[str]:
    """The names of all runs, newest first. Lists keys, and reads no document."""
    document_names = (name.removesuffix(".json") for name in store.children(RUNS) if name.endswith(".json"))
    return sorted((run for run in document_names if model_of(run)), reverse=True)


def read_run(store: Store, run: str) -> RunState | None:
    """Read a run; None if it does not exist. Raises IntegrityError if it cannot be read."""
    state_bytes = store.read(run_key(run))
    return None if state_bytes is None else parse_run(run_key(run), state_bytes)


def parse_run(key: str, data: bytes) -> RunState:
    """Parse a run's document. Raises IntegrityError with the key."""
    with explain_damage(key, "it only records a run: delete it"):
        return parse_as(data, MAX_STATE_BYTES, RunState)


def read_runs(store: Store, runs: list[str]) -> Iterator[RunState]:
    """Read these runs; runs that were deleted meanwhile or are unreadable are left out."""
    for run in runs:
        with suppress(IntegrityError):
            if (run_state := read_run(store, run)) is not None:
                yield run_state


def find_run(store: Store, name: str) -> RunState:
    """The run with this name, or the newest run of the model with this name. Raises UnknownNameError."""
    all_runs = run_ids(store)
    matching_runs = [run for run in all_runs if run == name] or [run for run in all_runs if model_of(run) == name]
    for run in matching_runs:
        if (run_state := read_run(store, run)) is not None:
            return run_state
    model_list = ", ".join(sorted({model_of(run) for run in all_runs})) or "none"
    raise UnknownNameError(f"no run or model {name!r} in {store.uri}; models with runs: {model_list}")


def read_live(store: Store, run: str) -> dict[str, str]:
    """Job's name -> the end of its output, for the running jobs of a run; empty if it is unreadable."""
    live_bytes = store.read(run_live_key(run))
    try:
        return decode(parsing.parse_json(live_bytes, _LIVE_BYTES), dict[str, str]) if live_bytes else {}
    except IntegrityError:
        return {}


def find_ages(store: Store) -> dict[str, timedelta]:
    """Run -> the age of its document on the store's clock, since the clock of the run's machine may be wrong."""
    write_times = dict(store.stamps(RUNS))
    now = store.now()
    return {key.removeprefix(RUNS).removesuffix(".json"): now - written_at for key, written_at in write_times.items()}


def surplus(store: Store) -> list[str]:
    """The names of runs beyond the number that is kept, oldest first. Lists keys, and reads no document."""
    model_counts: dict[str, int] = {}
    surplus_runs = []
    for index, run in enumerate(run_ids(store)):
        model_counts[model_of(run)] = model_counts.get(model_of(run), 0) + 1
        if model_counts[model_of(run)] > MOST_OF_MODEL or index >= MOST:
            surplus_runs.append(run)
    return surplus_runs[::-1]


def prune(store: Store) -> list[str]:
    """Delete surplus runs that cannot be running, and return their names. The next garbage collection deletes logs."""
    pruned_runs: list[str] = []
    runs = surplus(store)
    ages = find_ages(store) if runs else {}
    for run in runs:
        if (age := ages.get(run)) is not None and age.total_seconds() <= LONGEST_RUN_S:
            with suppress(EnginesmithError):  # an unreadable run does not run
                if (run_state := read_run(store, run)) is not None and run_state.state == "running":
                    continue
        for key in (run_live_key(run), run_key(run)):
            store.remove(key)
        pruned_runs.append(run)
    return pruned_runs
