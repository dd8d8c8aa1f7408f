"""The two engines of a canary: found in the registry by reference, fetched and verified, opened by their backends."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from builders.backends import discovery
from builders.backends.compatibility import open_engine
from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.errors import InputError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.cuda import DEFAULT_MODE, gpus
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.latencies import measured_speeds
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions.lookup import locate
from pipeline.canary.ensembles import fetch_ensemble, why_graph_not_here
from pipeline.canary.isolated import IsolatedSession, isolate
from pipeline.compile.steps.blobs import fetch_engine
from pipeline.values import EngineBlob
from validation.canary.observations import EngineIdentity


@dataclass(frozen=True)
class ChosenEngine:
    """A version, and the engine of it that fits a target best."""

    manifest: Manifest
    entry: EngineEntry

    @property
    def identity(self) -> EngineIdentity:
        """What observations of this engine name it by."""
        entry, manifest = self.entry, self.manifest
        unit = (entry.target, entry.precision, entry.backend)
        return EngineIdentity(manifest.model, manifest.version, manifest.digest, entry.digest, *unit)


def choose(store: Store, reference: Reference, target: Target, precision: str | None) -> ChosenEngine:
    """As `choose_unrun`, for running it here. Raises InputError when its hardware or runtime is not here."""
    chosen = choose_unrun(store, reference, target, precision)
    entry = chosen.entry
    # `target` and not the engine's own: one that is compatible with this kind of machine may be built for another.
    manifest = chosen.manifest
    if manifest.graphs:
        reason = why_graph_not_here(store, manifest, entry, target)
    else:
        reason = discovery.configure(entry.backend, dict(entry.options)).runs(target)
    if reason:
        what = f"{manifest.model}@{manifest.version}"
        raise InputError(f"{what}: {entry.unit} does not run here: {reason}; run this on a node that has it")
    return chosen


def choose_unrun(store: Store, reference: Reference, target: Target, precision: str | None) -> ChosenEngine:
    """The engine of a version that `enginesmith pull` would give on a machine of this target; it need not be this one.

    precision: None for the one that fits best.
    Raises UnknownNameError when nothing fits, UntrustedError without the signatures that the trust policy asks for.
    """
    located = locate(store, reference)
    what = f"{located.manifest.model}@{located.manifest.version}"
    entries = judge_entries(store, located.manifest, require(store, located.manifest).counts)
    machine = replace(Machine.of(target), cpu=this_kind().name if target.is_cpu else None)
    policy = Policy(precision, proven_only=located.proven_only)
    timed = partial(measured_speeds, store, located.manifest, machine)
    return ChosenEngine(located.manifest, rank_engines(entries, machine, policy, what, timed).resolution().chosen)


def open_isolated(
    store: Store, role: str, chosen: ChosenEngine, folder: Path
) -> AbstractContextManager[IsolatedSession]:
    """Fetch an engine into `folder`, verify it, and open it in a process of its own. role: as for `isolate`."""
    entry = chosen.entry
    if chosen.manifest.graphs:
        whole = fetch_ensemble(store, chosen.manifest, entry, folder)
        return isolate(role, whole.open, whole.thread_safe)
    engine = fetch_engine(store, EngineBlob(request_of(entry), str(entry.digest), str(entry.suffix)), folder)
    return isolate(role, partial(open_engine, engine), discovery.capabilities_of(entry.backend).thread_safe)


def check_shared_gpu(target: Target) -> None:
    """Raise InputError where a GPU of this target is in exclusive-process mode: a canary runs a process per engine."""
    for gpu in gpus():
        if gpu.compute_capability == target.compute_capability and gpu.compute_mode != DEFAULT_MODE:
            raise InputError(
                f"{gpu.name} is in exclusive-process mode, and a canary opens both engines on it, each in a process of "
                "its own; set `nvidia-smi --compute-mode=DEFAULT`, or run this on a node without that mode"
            )


def check_alike(candidate: IsolatedSession, baseline: IsolatedSession) -> None:
    """Raise InputError unless both engines take inputs of the same names and dtypes."""
    takes = [{spec.name: spec.dtype for spec in session.inputs} for session in (candidate, baseline)]
    if takes[0] != takes[1]:
        raise InputError(f"the candidate takes {takes[0]} and the baseline {takes[1]}; no traffic fits both")
