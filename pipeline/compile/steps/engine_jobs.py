"""Sizes and repeated calls that an engine is proven with beside its golden set.

Compiling one engine, and running it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import compatibility, discovery, shape_profiles
from builders.backends.optional_methods import opening_parts
from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginery.core.codec import encode
from enginery.core.digest import digest_of
from enginery.core.errors import EngineryError, InputError
from enginery.core.types import BuildRequest, Dim, Engine, Session
from enginery.registry.records import remember
from enginery.registry.store.base import Store, open_store
from pipeline.compile.steps.blobs import fetch, fetch_engine, golden_set, proof_of, runnable
from pipeline.compile.steps.drift_limits import engine_drift_limits, threads_for
from pipeline.compile.steps.timing_caches import TimingCache
from pipeline.values import EngineBlob, EngineRecord, Json, ModelShapes, Proof, ReducedWorkspace
from validation.comparison.terms import TaskMetric

if TYPE_CHECKING:
    from enginery.core.reports.proof import Check
    from validation.fuzz.run import FuzzSides
    from validation.golden.golden_set import GoldenSet
if TYPE_CHECKING:
    from enginery.core.reports.proof import Check
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import StagedLimits
    from validation.metrics.drift import Drift


@dataclass(frozen=True)
class Calls:
    """Calls beside the golden set that a spec asks for. seconds: None for a share of the comparison's time.

    bitwise: whether the contract promises bits.  shapes: of the model.
    """

    seconds: float | None
    bitwise: bool
    shapes: ModelShapes


def tried_calls(
    calls: Calls | None,
    request: BuildRequest,
    pair: "FuzzSides",
    golden: "GoldenSet",
    graph: Path,
    compared: "tuple[Sequence[Check], float]",
) -> "tuple[Check, ...]":
    """Checks of the calls that a spec asks for; none where it asks for none.

    compared: checks of the comparison on the golden set, and the seconds it took. Sizes between those of
    the golden set are tried only where its own passed.
    """
    from validation.calls.checks import Allowance, call_checks

    if calls is None:
        return ()
    checks, took = compared
    allowance = Allowance.of(calls.seconds, took)
    shapes = calls.shapes.inputs, calls.shapes.dims
    passed = all(check.passed for check in checks)

    def bits() -> bool:
        return calls.bitwise or repeats_bits(request, graph)

    return tuple(call_checks(pair, shapes, golden, seed_of(request), allowance, bits, passed))


def cases_of(sizes: Sequence[str], golden: "GoldenSet", request: BuildRequest) -> "GoldenSet":
    """The cases of a failed check of sizes, as edges of a golden set without expected outputs."""
    from validation.calls.checks import VALUES_SEED
    from validation.fuzz.cases import Groups, make, parse_only
    from validation.golden.golden_set import Case, GoldenSet

    dims = [Dim(name, low, low, high) for name, (low, high) in shape_profiles.sizes(request).items()]
    groups = Groups(golden)
    made = {
        text: make(parse_only(text, dims), request.inputs, groups, VALUES_SEED, request.precision) for text in sizes
    }
    return GoldenSet([Case(text, "edge", inputs, {}) for text, inputs in made.items()], noise=golden.noise)


def seed_of(request: BuildRequest) -> int:
    """The seed of a build: the same for the same build, another for another one."""
    return int(request.key[:8], 16)


def repeats_bits(request: BuildRequest, graph: Path) -> bool:
    """Whether equal inputs must have equal bits: of a backend whose builds give the same answers, on a CPU, unless the
    graph draws numbers. On a GPU kernels may add up in another order each time."""
    import onnx

    from validation.limits.noise_floor import random_operator

    backend = discovery.configure(request.backend, dict(request.options))
    if backend.capabilities.determinism == "budget" or not request.target.is_cpu:
        return False
    return random_operator(onnx.load(graph, load_external_data=False)) is None


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
        from validation.fuzz.run import FuzzSides
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
            held = engine_drift_limits(graph, expected, wanted, frozen, self.limits, workdir)
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
