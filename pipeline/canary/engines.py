"""The two engines of a canary: found in the registry by reference, fetched and verified, opened by their backends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from builders.backends import discovery
from builders.backends.compatibility import open_engine
from enginery.client.resolve import Policy, rank_engines
from enginery.core.errors import InputError
from enginery.core.hardware.cuda import DEFAULT_MODE, gpus
from enginery.core.hardware.machine import Machine
from enginery.core.hardware.targets import this_kind
from enginery.core.names import Reference
from enginery.core.types import Target
from enginery.registry.evidence.attestations import judge_entries
from enginery.registry.evidence.latencies import measured_speeds
from enginery.registry.manifest import EngineEntry, Manifest, request_of
from enginery.registry.store.base import Store
from enginery.registry.trust import require
from enginery.registry.versions.lookup import locate
from pipeline.canary.isolated import IsolatedSession, isolate
from pipeline.compile.steps.blobs import fetch_engine
from pipeline.values import EngineBlob
from validation.canary.observations import EngineIdentity


@dataclass(frozen=True)
class ChosenEngine:
    """One side: a version, and the engine of it that fits the target best."""

    manifest: Manifest
    entry: EngineEntry

    @property
    def identity(self) -> EngineIdentity:
        """What binds observations to exactly this engine."""
        entry, manifest = self.entry, self.manifest
        return EngineIdentity(
            manifest.model,
            manifest.version,
            manifest.digest,
            entry.digest,
            entry.target,
            entry.precision,
            entry.backend,
        )


def choose(store: Store, reference: Reference, target: Target, precision: str | None) -> ChosenEngine:
    """As `choose_unrun`, provided that the engine runs here. Raises InputError when its hardware is not here."""
    chosen = choose_unrun(store, reference, target, precision)
    # Not the engine's own hardware: one that is compatible with this kind of machine may be built for another.
    entry = chosen.entry
    if reason := discovery.configure(entry.backend, dict(entry.options)).runs(target):
        what = f"{chosen.manifest.model}@{chosen.manifest.version}"
        raise InputError(f"{what}: {entry.unit} does not run here: {reason}; run this on a node that has it")
    return chosen


def choose_unrun(store: Store, reference: Reference, target: Target, precision: str | None) -> ChosenEngine:
    """The engine that `enginery pull` would give on that kind of machine, wherever this is asked.

    Raises UnknownNameError when nothing fits, UntrustedError without the signatures that the trust policy asks for.
    """
    located = locate(store, reference)
    what = f"{located.manifest.model}@{located.manifest.version}"
    entries = judge_entries(store, located.manifest, require(store, located.manifest).counts)
    machine = replace(Machine.of(target), cpu=this_kind().name if target.is_cpu else None)
    policy = Policy(precision, proven_only=located.proven_only)
    timed = partial(measured_speeds, store, located.manifest, machine)
    return ChosenEngine(located.manifest, rank_engines(entries, machine, policy, what, timed).resolution().chosen)


@contextmanager
def open_isolated(store: Store, role: str, chosen: ChosenEngine, folder: Path) -> Iterator[IsolatedSession]:
    """The engine, fetched into `folder` and verified, ready to run in a process of its own. role: for messages."""
    entry = chosen.entry
    engine = fetch_engine(store, EngineBlob(request_of(entry), str(entry.digest), str(entry.suffix)), folder)
    thread_safe = discovery.capabilities_of(entry.backend).thread_safe
    with isolate(role, partial(open_engine, engine), thread_safe) as session:
        yield session


def check_shared_gpu(target: Target) -> None:
    """Raise InputError for a GPU that one process alone may use: a canary has both engines open, each in its own."""
    for gpu in gpus():
        if gpu.compute_capability == target.compute_capability and gpu.compute_mode != DEFAULT_MODE:
            raise InputError(
                f"{gpu.name} is in exclusive-process mode, and a canary opens both engines on it, each in a process of "
                "its own; set `nvidia-smi --compute-mode=DEFAULT`, or run this on a node without that mode"
            )


def check_alike(candidate: IsolatedSession, baseline: IsolatedSession) -> None:
    """Raise InputError unless both engines take the same requests."""
    takes = [{spec.name: spec.dtype for spec in session.inputs} for session in (candidate, baseline)]
    if takes[0] != takes[1]:
        raise InputError(f"the candidate takes {takes[0]} and the baseline {takes[1]}; no traffic fits both")
