"""The step validate: limits of drift, its request, key, job and result."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from builders.backends import discovery, request_checks
from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.core.hardware.cpu_kinds import this_kind, why_no_proof
from enginesmith.core.hardware.cuda import gpus
from enginesmith.core.reports.proof import DECISIONS, Answers, Check
from enginesmith.core.state import Padding, padding_of
from enginesmith.core.text import now
from enginesmith.core.types import IN_BLOCKS, QUANTIZED, BuildRequest, Dim, Precision, Session, Tensors
from enginesmith.registry.store.base import open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import RunContext, Work, stops_run
from pipeline.compile.steps.blobs import (
    answers_here,
    fetch_graph,
    golden_set,
    open_reference,
    open_session,
    proof_of,
    runnable,
)
from pipeline.compile.steps.keys import code_key, engine_limits, metrics_of, model_shapes
from pipeline.outcome import JudgedUnit, judge_built
from pipeline.progress.events import VerdictReached
from pipeline.values import Built, EngineBlob, Exported, Json, ModelShapes, Proof
from validation.contracts.terms import Contract
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from builders.reference import ReferenceSession
    from pipeline.spec.model import ModelSpec
    from validation.calls.checks import Allowance
    from validation.comparison.sessions import Opener
    from validation.fuzz.run import FuzzSides
    from validation.golden.golden_set import Case, GoldenSet
    from validation.limits.budget import Budgets, OutputLimits, Stage, StagedLimits
    from validation.limits.rounding import Honest
    from validation.metrics.drift import Drift

WEAK = "a weak limit: it knows nothing of the task; give golden.metric, or limits of your own"
STRICTEST = "the strictest limit that honest rounding can give: it was not measured"


@dataclass(frozen=True)
class CompiledLimits:
    """The limits of an engine against its graph: the strictest, then those of honest rounding measured on the graph.

    graph: the runnable file (`blobs.runnable`).  limits: the spec's; with any, honest rounding is measured at once."""

    graph: Path
    request: BuildRequest
    limits: Mapping[str, float]
    workdir: Path

    def __call__(self, reference: Session, golden: "GoldenSet", opens: "Opener | None" = None) -> "StagedLimits":
        """Those on a golden set. reference: the graph, opened, for as long as limits are asked for.  opens: graphs with
        rounding in them, where sessions take whole sequences."""
        from validation.limits.budget import OutputLimits, StagedLimits, strictest
        from validation.perturbation.graph import perturb_graph
        from validation.perturbation.honest import measure_rounding

        precision = self.request.precision
        backend = discovery.configure(self.request.backend, dict(self.request.options))
        rounds_blocks = precision in IN_BLOCKS and backend.capabilities.rounds_activations
        opener, opens_whole = opens or partial(as_written, steps=golden.sequences is not None), opens is not None
        perturbed_graph = perturb_graph(self.graph, opener, self.workdir, activation_blocks=rounds_blocks)
        rounding = measure_rounding([self.graph], perturbed_graph, golden, reference, thorough=True, whole=opens_whole)
        scales = {state.output: state.scale for state in self.request.quantized_states}
        limit_stages = measured_limits("engine", precision, rounding, reference, golden, self.limits, scales)
        if self.limits:
            return StagedLimits(next(limit_stages), limit_stages)
        first_limits = strictest("engine", precision, golden.noise)
        return StagedLimits(OutputLimits(add_notes(first_limits, reference, STRICTEST)), limit_stages)

    def on_case(self, reference: Session, golden: "GoldenSet", inputs: Tensors) -> "OutputLimits":
        """The loosest limits that honest rounding gives on these inputs. golden: whose noise floor is taken."""
        from validation.golden.golden_set import Case, GoldenSet

        case, edge = Case("golden", "golden", inputs, {}), Case("edge", "edge", inputs, {})
        return self(reference, GoldenSet([case, edge], noise=golden.noise), as_written).loosest()


@dataclass(frozen=True)
class WrittenLimits:
    """The limits of a graph in a lower precision against the fp32 one, which lies at `path`."""

    path: Path
    precision: Precision
    limits: Mapping[str, float]
    metrics: Sequence[TaskMetric]
    workdir: Path

    def __call__(self, reference: Session, golden: "GoldenSet", opens: "Opener | None" = None) -> "StagedLimits":
        """Those on a golden set. reference, opens: as of `CompiledLimits`, of the fp32 graph."""
        from validation.limits.budget import StagedLimits
        from validation.perturbation.graph import perturb_graph
        from validation.perturbation.honest import measure_rounding

        if self.precision in QUANTIZED:
            return quantized_limits(reference, self.precision, golden, self.limits, bool(self.metrics))
        half_type: Precision | None = None if self.precision == "fp32" else self.precision
        opener, opens_whole = opens or partial(as_written, steps=golden.sequences is not None), opens is not None
        perturbed_graph = perturb_graph(self.path, opener, self.workdir, half_type)
        rounding = measure_rounding([self.path], perturbed_graph, golden, reference, thorough=True, whole=opens_whole)
        limit_stages = measured_limits("quantization", self.precision, rounding, reference, golden, self.limits)
        return StagedLimits(next(limit_stages), limit_stages)


def measured_limits(
    stage: "Stage",
    precision: Precision,
    rounding: "Iterable[Honest]",
    reference: Session,
    golden: "GoldenSet",
    limits: Mapping[str, float],
    scales: Mapping[str, float] = MappingProxyType({}),
) -> "Iterator[OutputLimits]":
    """The limits that follow from each measurement of honest rounding, of a graph or of a chain of graphs. limits: what
    the spec says in their place.  scales: of an engine's states of int8, by output."""
    from validation.limits.budget import OutputLimits, allow_near_ties, budgets

    for measurement in rounding:
        stage_budgets = budgets(stage, precision, golden.noise, measurement)
        if stage == "engine":
            stage_budgets = allow_near_ties(stage_budgets, scales, measurement.drifts)
        note = f"honest rounding is not known: {measurement.reason}" if measurement.reason else ""
        yield OutputLimits(add_notes(stage_budgets.override(limits), reference, note), measurement.drifts)


def quantized_limits(
    reference: Session, precision: Precision, golden: "GoldenSet", limits: Mapping[str, float], judged_by_task: bool
) -> "StagedLimits":
    """Those of a graph, or of a chain of graphs, of integers or of floats in blocks. reference: the fp32 one."""
    from validation.limits.budget import OutputLimits, StagedLimits, budgets
    from validation.limits.rounding import NearTies

    exact_outputs = [spec.name for spec in reference.outputs if "float" not in spec.dtype]
    near_ties = replace(
        budgets("quantization", precision, golden.noise), decisions=dict.fromkeys(exact_outputs, NearTies())
    ).override(limits)
    weak_note = "" if judged_by_task or "sqnr_db" in limits else WEAK
    decision_text = "" if DECISIONS in limits else str(NearTies())
    return StagedLimits(OutputLimits(add_notes(near_ties, reference, weak_note, decision_text)))


def as_written(path: Path, steps: bool = False) -> "ReferenceSession":
    """A graph with rounding in it, opened for a few runs. steps: as in `threads_for`."""
    from builders.reference import ReferenceSession, threads_for

    return ReferenceSession(path, threads=threads_for(path, steps), plan_buffers=False)


def add_notes(limits: "Budgets", reference: Session, note: str, of_integers: str | None = None) -> "Budgets":
    """The limits with a note for each output that has none. of_integers: for those of integers and booleans."""
    limit_notes = {
        (spec.name, "golden"): note if of_integers is None or "float" in spec.dtype else of_integers
        for spec in reference.outputs
    }
    return replace(limits, notes={**{key: text for key, text in limit_notes.items() if text}, **limits.notes})


# The check of an engine that could not be opened or run.
CRASHED = Check("engine", "runs", "", "all", None, None, False)


@dataclass(frozen=True)
class ExtraCalls:
    """Calls beside the golden set that a spec asks for. seconds: None for a share of the comparison's time.

    bitwise: whether the contract promises bits.
    """

    seconds: float | None
    bitwise: bool
    shapes: ModelShapes

    def check(
        self,
        request: BuildRequest,
        pair: "FuzzSides",
        golden: "GoldenSet",
        graph: Path,
        golden_passed: bool,
        allowance: "Allowance",
    ) -> tuple[Check, ...]:
        """Checks of calls at other magnitudes and sizes, and of repeated calls.

        golden_passed: whether the comparison on the golden set passed. Magnitudes, and sizes between those of the
        golden set, are tried only if it did.
        """
        from validation.calls.checks import call_checks, magnitude_checks

        shapes = self.shapes.inputs, self.shapes.dims
        others = magnitude_checks(pair, shapes, golden, allowance) if golden_passed else ()
        more = discovery.capabilities_of(request.backend).thread_safe, others
        calls = pair, shapes, golden, request.seed, allowance
        return tuple(call_checks(*calls, lambda: self.bitwise or repeats_bits(request, graph), golden_passed, *more))


@dataclass(frozen=True)
class ContractTerms:
    """The contract of a spec, and the model's shapes."""

    terms: Contract
    shapes: ModelShapes


@dataclass(frozen=True)
class CheckEngine:
    """Run an engine against the graph it was built from (the engine stage), with its contract and the task metrics.

    golden: digest of the golden set.  limits: the spec's.  contract, calls, padding: None if the spec has none.
    answers: the graph's, to the golden set (`blobs.open_reference`).
    recorded: the engine's answers from elsewhere, which are judged instead of running it; None to run it."""

    engine: EngineBlob
    golden: str
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...] = ()
    contract: ContractTerms | None = None
    calls: ExtraCalls | None = None
    answers: str | None = None
    padding: Padding | None = None
    recorded: Answers | None = None

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises EnginesmithError for an engine that cannot be opened, and IntegrityError for a recorded
        answer that is damaged or missing: that says nothing about the engine."""
        store = open_store(context.store)
        if self.recorded is not None:
            from validation.gpu.devices import replay_session

            actual_session = replay_session(self.engine.request, self.recorded)
            _ask_all(actual_session, golden_set(store, self.golden, context.workdir))
            return self.compare(actual_session, context)
        with open_session(store, self.engine, context.workdir) as actual_session:
            return self.compare(actual_session, context)

    def compare(self, actual: Session, context: WorkerContext) -> Proof:
        """The checks of a session in the engine's place."""
        from validation.calls.checks import Allowance, padding_checks
        from validation.comparison.sessions import drift_checks
        from validation.comparison.tasks import check_free_running, lift_limits, limits_at_other_sizes, step_spreads
        from validation.fuzz.run import FuzzSides, excuse_ties
        from validation.limits.budget import default_budget
        from validation.metrics.tally import Along

        request, workdir = self.engine.request, context.workdir
        clock = time.process_time if request.target.is_cpu else time.perf_counter
        store, course, started_s = open_store(context.store), Along(), clock()
        golden = golden_set(store, self.golden, workdir)
        spreads = step_spreads(golden, course)
        graph = runnable(fetch_graph(store, request.model, workdir / "graph.onnx"), request.precision)
        with open_reference(store, graph, golden, self.answers) as reference:
            limits = CompiledLimits(graph, request, self.limits, workdir)
            staged_limits = limits(reference, golden)
            usual: dict[str, Drift] = {}
            drift = drift_checks("engine", reference, actual, golden, staged_limits, spreads, usual)
            drift += check_free_running(
                "engine", (reference, actual), golden.sequences, partial(as_written, steps=True), limits, course
            )
            checks = tuple(lift_limits(drift, self.metrics))
            size_limits = limits_at_other_sizes(spreads.at("engine"), self.metrics)
            case_limits = partial((replace(limits, limits={}) if size_limits else limits).on_case, reference, golden)
            budget = default_budget("engine", request.precision)
            fuzz_sides = FuzzSides(
                reference, actual, request.precision, staged_limits, budget, None, usual, size_limits, reads_nan(graph),
                case_limits,
            )  # fmt: skip
            checks = tuple(excuse_ties(checks, golden, fuzz_sides))
            if self.calls:
                golden_passed = all(check.passed for check in checks)
                allowance = Allowance(self.calls.seconds, clock() - started_s, clock)
                checks += self.calls.check(request, fuzz_sides, golden, graph, golden_passed, allowance)
            if self.padding:
                checks += tuple(padding_checks(actual, request, self.padding, golden, staged_limits))
            if self.contract:
                checks += _check_contract(self.contract, reference, actual, golden, staged_limits)
            drifts = spreads.at("engine"), course.at("engine")
            return proof_of(checks, actual, golden, self.metrics, "engine", drifts)


def _ask_all(recording: Session, golden: "GoldenSet") -> None:
    """Raise IntegrityError if the recorded answer of a golden case or of a sequence's step is missing or damaged."""
    from validation.comparison.sessions import run
    from validation.golden.free_running import FreeRunningSession

    questions: list[tuple[Session, str, Sequence[Case]]] = [(recording, "case", golden.cases)]
    if golden.sequences:
        rolled_session = FreeRunningSession(recording, golden.sequences)
        questions.append((rolled_session, "sequence", golden.sequences.golden.cases))
    for session, kind, cases in questions:
        for case in cases:
            try:
                run(session, case.inputs)
            except EnginesmithError as error:
                raise IntegrityError(f"{kind} {case.name!r}: {error}") from error


def cases_of(sizes: Sequence[str], golden: "GoldenSet", request: BuildRequest) -> "GoldenSet":
    """The cases of a failed check of sizes, as edges of a golden set without expected outputs."""
    from validation.calls.checks import VALUES_SEED
    from validation.fuzz.cases import Groups, make, parse_only
    from validation.golden.golden_set import Case, GoldenSet

    dims = [Dim(name, low, low, high) for name, (low, high) in request_checks.sizes(request).items()]
    groups = Groups(golden)
    inputs_by_size = {
        text: make(parse_only(text, dims), request.inputs, groups, VALUES_SEED, request.precision) for text in sizes
    }
    return GoldenSet([Case(text, "edge", inputs, {}) for text, inputs in inputs_by_size.items()], noise=golden.noise)


def repeats_bits(request: BuildRequest, graph: Path) -> bool:
    """Whether equal inputs must give equal bits: on a CPU, unless the graph draws random numbers or the backend's
    determinism is 'budget'. On a GPU, kernels may add in a different order in each call."""
    from builders.onnx_graphs.outline import load_outline
    from validation.limits.noise_floor import random_operator

    if discovery.capabilities_of(request.backend).determinism == "budget" or not request.target.is_cpu:
        return False
    return random_operator(load_outline(graph)) is None


def reads_nan(graph: Path) -> bool:
    """Whether a graph has an operator that detects NaN or infinities."""
    from builders.onnx_graphs.bodies import walk_nodes
    from builders.onnx_graphs.outline import load_outline

    return any(node.op_type in ("IsNaN", "IsInf") for node in walk_nodes(load_outline(graph).graph))


def _check_contract(
    contract: ContractTerms, reference: Session, actual: Session, golden: "GoldenSet", limits: "StagedLimits"
) -> tuple[Check, ...]:
    from validation.contracts.two_sample import contract_checks
    from validation.data.batches import leading_dim

    inputs = contract.shapes.inputs
    batch_dim = next((dim for dim in contract.shapes.dims if dim.name == leading_dim(inputs)), None)
    budgets = (limits.loosest() if contract.terms.bitwise else limits.current).budgets
    return contract_checks(contract.terms, reference, actual, golden, (inputs, batch_dim), budgets)


def validate(built_unit: Built, export: Exported, work: Work) -> JudgedUnit:
    """Judge the checks of a unit's three stages together; an engine that cannot run here stays unproven,
    and a unit whose graph failed has failed with it.

    Raises as `prove_engine`.
    """
    if built_unit.failure:
        return judge_built(built_unit)
    proofs = [export.proof, built_unit.unit.graph.proof]
    if built_unit.unit.action == "failed":
        return judge_built(built_unit, export.golden, proofs, "it was not built")
    request = built_unit.unit.request
    backend = discovery.configure(request.backend, dict(request.options))
    obstacle = backend.runs(request.target) or why_no_proof(request)
    if not obstacle:
        is_source = request.model == export.model.digest and request.precision == "fp32"
        check = engine_check(built_unit.blob, work.spec, export.golden)
        proofs.append(prove_engine(replace(check, answers=answers_here(export) if is_source else None), work))
    judged_unit = judge_built(built_unit, export.golden, proofs, obstacle)
    work.context.progress.emit(VerdictReached(built_unit.unit.name, judged_unit.entry.status, judged_unit.entry.reason))
    return judged_unit


def prove_engine(check: CheckEngine, work: Work, afresh: bool = False) -> Proof:
    """The proof of an engine: it is run against the graph it was built from; if it cannot be opened or run, a proof
    with the one failed check `CRASHED`.

    afresh: prove it even if the same proof is recorded. Raises UnavailableError and IntegrityError, whose cause is not
    the engine, and StepError when cancelled.
    """
    request = check.engine.request
    key = {
        **encode(replace(check, answers=None)),  # the proof is the same without them
        "engine": check.engine.digest,
        "request": request.key,
        # Properties of this machine that affect the proof.
        "machine": [this_kind().name] if request.target.is_cpu else sorted({gpu.name for gpu in gpus()}),
        **code_key(CheckEngine, backend_root(request.backend)),
        **({"at": now()} if afresh else {}),
    }
    job = Job(f"prove {request.unit}", check, work.context.store.uri, engine_limits(work.spec, "proof"))
    return prove_or_crash("check-engine", key, job, work.context)


def engine_check(engine: EngineBlob, spec: "ModelSpec", golden: str) -> CheckEngine:
    """The request that proves an engine by its spec. golden: digest of the golden set."""
    precision = engine.request.precision
    return CheckEngine(
        engine,
        golden,
        spec.validation.limits_for(precision, "engine"),
        metrics_of(spec, precision),
        contract_of(spec),
        calls_of(spec),
        padding=padding_rules(spec),
    )


def prove_or_crash(step: str, key: Json, job: Job[Proof], context: RunContext) -> Proof:
    """The proof of a job, or its recorded one; with the one failed check `CRASHED` if the engine cannot be opened or
    run. Raises errors that are not about the engine (`stops_run`).
    """
    try:
        return context.once(step, job.name, key, job)
    except EnginesmithError as error:
        if stops_run(error):
            raise
        return Proof((replace(CRASHED, note=str(error)),))


def contract_of(spec: "ModelSpec") -> ContractTerms | None:
    """The contract that the spec asks for, with the model's shapes; None if the spec asks for no contract."""
    contract = spec.validation.contract
    return ContractTerms(contract, model_shapes(spec)) if contract.asks else None


def calls_of(spec: "ModelSpec") -> ExtraCalls | None:
    """The calls beside the golden set that the spec asks for; None when it asks for none."""
    calls, is_bitwise = spec.validation.calls, spec.validation.contract.bitwise is not None
    return ExtraCalls(calls.seconds, is_bitwise, model_shapes(spec)) if calls else None


def padding_rules(spec: "ModelSpec") -> Padding | None:
    """The spec's rules for padding requests in a server; None if the spec allows no padding."""
    padding = padding_of(spec.model_dump(mode="json"))
    return padding if padding.inputs else None
