"""Runs in the registry: their names, reading them, and how many are kept."""

import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from enginery.core import parsing
from enginery.core.errors import EngineryError, IntegrityError, UnknownNameError
from enginery.core.names import is_name
from enginery.registry.runs.state import RunState, parse_run
from enginery.registry.store.base import Store
from enginery.registry.store.keys import RUNS, run_key, run_live_key

# The newest so many of each model, and of all, are kept.
MOST_OF_MODEL = 20
MOST = 2000
# A run that was begun so long ago is dead, whatever its document says; a newer one that runs is never pruned.
LONGEST_RUN_S = 48 * 3600
_ID = re.compile(r"([0-9]{8}T[0-9]{6}Z)\.(.+)\.([0-9a-f]{6})")
_LIVE_BYTES = 8 << 20


def new_id(model: str) -> str:
    """A name that sorts by time and says the model: '20261120T181105Z.digits.3fa9c1'."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.{model}.{secrets.token_hex(3)}"


def model_of(run: str) -> str:
    """The model in a run's name; '' for what is no name of a run."""
    found = _ID.fullmatch(run)
    return found[2] if found and is_name(found[2]) else ""


def run_ids(store: Store) -> list[str]:
    """Names of runs, newest first. One listing; reads nothing."""
    names = (name.removesuffix(".json") for name in store.children(RUNS) if name.endswith(".json"))
    return sorted((run for run in names if model_of(run)), reverse=True)


def read_run(store: Store, run: str) -> RunState | None:
    """A run; None when it is not there. Raises IntegrityError."""
    data = store.read(run_key(run))
    return None if data is None else parse_run(run_key(run), data)


def read_runs(store: Store, runs: list[str]) -> Iterator[RunState]:
    """These runs; those that went meanwhile, or cannot be read, are left out."""
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
    """The end of what each running job of a run printed, by its name."""
    data = store.read(run_live_key(run))
    try:
        return parsing.mapping_of(parsing.text)(parsing.parse_json(data, _LIVE_BYTES), "live") if data else {}
    except parsing.Malformed:
        return {}


def surplus(store: Store) -> list[str]:
    """Names of runs beyond what is kept, oldest first. One listing; reads nothing."""
    seen: dict[str, int] = {}
    gone = []
    for number, run in enumerate(run_ids(store)):
        seen[model_of(run)] = seen.get(model_of(run), 0) + 1
        if seen[model_of(run)] > MOST_OF_MODEL or number >= MOST:
            gone.append(run)
    return gone[::-1]


def prune(store: Store) -> list[str]:
    """Delete the surplus, but what may still run; return what went. Logs go with the next `enginery gc`."""
    gone = [run for run in surplus(store) if not _may_run(store, run)]
    for run in gone:
        for key in (run_live_key(run), run_key(run)):
            store.remove(key)
    return gone


def _may_run(store: Store, run: str) -> bool:
    begun = datetime.fromisoformat(run.partition(".")[0])
    if (datetime.now(UTC) - begun).total_seconds() > LONGEST_RUN_S:
        return False
    try:
        found = read_run(store, run)
    except EngineryError:
        return False
    return found is not None and found.state == "running"
