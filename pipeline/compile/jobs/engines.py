"""Compiling one engine, and running it."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import compatibility, discovery
from builders.backends.parts import opening_parts
from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginery.core.codec import encode
from enginery.core.digest import digest_of
from enginery.core.errors import EngineryError, InputError
from enginery.core.types import BuildRequest, Engine, Session
from enginery.registry.records import remember
from enginery.registry.store.base import Store, open_store
from pipeline.compile.jobs.blobs import fetch, fetch_engine, golden_set, proof_of, runnable
from pipeline.compile.jobs.calls import Calls, tried_calls
from pipeline.compile.jobs.limits import engine_limits, threads_for
from pipeline.compile.jobs.timing import TimingCache
from pipeline.values import EngineBlob, EngineRecord, Json, ModelShapes, Proof, ReducedWorkspace
from validation.comparison.task import TaskMetric

if TYPE_CHECKING:
    from enginery.core.reports.proof import Check
    from validation.golden.golden_set import GoldenSet
    from validation.limits.on_demand import StagedLimits
    from validation.metrics.drift import Drift


@dataclass(frozen=True)
class BuildEngine:
    """Compile one engine, upload it, and put it on record by its build key.

    instead_of: the request, with a larger workspace, whose build ran out of memory. It is then put on record that this
    one stands for it, and a note says so.
    """

    request: BuildRequest
    instead_of: BuildRequest | None = None

    def run(self, context: WorkerContext) -> EngineRecord:
        """The engine's record. Raises what the backend raises, and InputError for another toolchain's request."""
        place, wanted = open_store(context.store), self.request
        backend = discovery.configure(wanted.backend, dict(wanted.options))
        discovery.check_toolchain(backend, wanted)
        enter_phase("fetching")
        model = fetch(place, wanted.model, context.workdir / "model.onnx")
        timing = TimingCache(place, backend, context.workdir)
        timing.fetch()
        enter_phase("compiling")
        begun = time.monotonic()
        try:
            engine = backend.build(wanted, model, context.workdir)
        except EngineryError:
            timing.keep()  # what was measured until then makes the next try shorter
            raise
        seconds = round(time.monotonic() - begun, 3)
        enter_phase("storing")
        notes = (*engine.notes, *timing.notes, *_reduced_notes(wanted, self.instead_of))
        extras = {name: place.put_file(path) for name, path in engine.extras}
        record = record_engine(place, replace(engine, request=wanted, notes=notes), seconds, extras)
        timing.keep()
        if self.instead_of:
            asked = digest_of({"build": self.instead_of.key})
            remember(place, "reduced-workspace", asked, encode(ReducedWorkspace(wanted)))
        return record


def _reduced_notes(built: BuildRequest, asked: BuildRequest | None) -> list[str]:
    if asked is None:
        return []
    option = discovery.capabilities_of(built.backend).options.workspace_mib
    before, now = (dict(request.options)[option] for request in (asked, built))
    return [f"built with {option} {now} instead of {before}: a first build had run out of memory"]


def record_engine(
    store: Store, engine: Engine, seconds: float, extras: Mapping[str, str], refitted_from: str | None = None
) -> EngineRecord:
    """Upload an engine and put it on record by its build key. Arguments as in `EngineRecord`."""
    stored = store.put_and_digest_file(engine.path)
    told = (
        engine.size_bytes,
        engine.suffix,
        seconds,
        engine.requires,
        engine.notes,
        stored.blake3,
        extras,
        refitted_from,
    )
    record = EngineRecord(engine.request, stored.digest, *told)
    key = digest_of({"build": engine.request.key})
    remember(store, "build", key, encode(record), [record.digest, *extras.values()])
    return record


@dataclass(frozen=True)
class ContractTerms:
    """The contract of a spec, as it is written there, and the shapes that it speaks of."""

    terms: Json
    shapes: ModelShapes


@dataclass(frozen=True)
class CheckEngine:
    """Run an engine against the graph it was built from (the engine stage), with its contract and the task metric.

    golden: digest of the golden set.  limits: what the spec says.  contract, calls: None where the spec has none.
    """

    engine: EngineBlob
    golden: str
    limits: Mapping[str, float]
    metric: TaskMetric | None = None
    contract: ContractTerms | None = None
    calls: Calls | None = None

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises EngineryError for an engine that cannot be opened."""
        from builders.reference import ReferenceSession
        from validation.comparison.sessions import drift_checks
        from validation.fuzz.outcome import FuzzSides
        from validation.limits.budget import default_budget
        from validation.metrics.tally import Spreads

        place, spreads, started = open_store(context.store), Spreads(), time.perf_counter()
        wanted, workdir = self.engine.request, context.workdir
        frozen = golden_set(place, self.golden, workdir)
        graph = runnable(fetch(place, wanted.model, workdir / "graph.onnx"), wanted.precision)
        with (
            ReferenceSession(graph, threads=threads_for(graph)) as expected,
            open_session(place, self.engine, workdir) as actual,
        ):
            held = engine_limits(graph, expected, wanted, frozen, self.limits, workdir)
            usual: dict[str, Drift] = {}
            checks = drift_checks("engine", expected, actual, frozen, held, spreads, usual)
            documented = default_budget("engine", wanted.precision)
            pair = FuzzSides(expected, actual, wanted.precision, held, documented, usual=usual)
            checks += tried_calls(self.calls, wanted, pair, frozen, graph, (checks, time.perf_counter() - started))
            if self.contract:
                checks += _contract_checks(self.contract, expected, actual, frozen, held)
            return proof_of(checks, actual, frozen, self.metric, "engine", spreads.at("engine"))


def _contract_checks(
    contract: ContractTerms, expected: Session, actual: Session, golden: "GoldenSet", limits: "StagedLimits"
) -> "tuple[Check, ...]":
    from validation.contracts.contract import EngineContract, contract_checks
    from validation.data.batches import leading_dim

    inputs = contract.shapes.inputs
    batch = next((dim for dim in contract.shapes.dims if dim.name == leading_dim(inputs)), None)
    promised = EngineContract.from_json(contract.terms)
    budgets = (limits.loosest() if promised.bitwise else limits.current).budgets
    return contract_checks(promised, expected, actual, golden, (inputs, batch), budgets)


@dataclass(frozen=True)
class OpenEngine:
    """An engine whose file is an ONNX graph, and how to run it and parts of it."""

    request: BuildRequest
    path: Path
    open: Callable[[Path], AbstractContextManager[Session]]


def open_engine(place: Store, blob: EngineBlob, workdir: Path) -> OpenEngine:
    """Fetch an engine that can be taken apart. Raises InputError for another backend's."""
    wanted = blob.request
    backend = opening_parts(discovery.configure(wanted.backend, dict(wanted.options)))
    if backend is None:
        raise InputError(f"engines of {wanted.backend} cannot be tapped yet; attribute their graph")
    return OpenEngine(wanted, fetch(place, blob.digest, workdir / f"engine{blob.suffix}"), backend.open_part)


def open_session(place: Store, blob: EngineBlob, workdir: Path) -> AbstractContextManager[Session]:
    """The engine, fetched and verified, opened by its backend."""
    return compatibility.open_engine(fetch_engine(place, blob, workdir))
