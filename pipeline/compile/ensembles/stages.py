"""The drift of an ensemble by stages, as that of one graph: the graphs that its engines were built from against the
exported ones, then the engines against those."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING

from builders.backends import discovery
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import IN_BLOCKS, QUANTIZED, Precision, Session
from enginesmith.registry.store.base import Store
from pipeline.compile.steps.blobs import fetch_graph, runnable
from pipeline.compile.steps.proofs import add_notes, as_written, measured_limits, quantized_limits
from pipeline.values import EngineBlob, Proof
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from enginesmith.ensembles import Ensemble
    from validation.golden.golden_set import GoldenSequences, GoldenSet
    from validation.limits.budget import OutputLimits, Stage, StagedLimits
    from validation.metrics.drift import Drift
    from validation.perturbation.graph import Perturbed

# Sessions that replace graphs, by graph name, each with the numbers of rows that it accepts in a call.
Parts = Mapping[str, tuple[Session, range | None]]
# Suffix, after the graph's name, of the case of one engine among the graphs that the other engines were built from.
AMONG_SOURCES = " alone among sources"
# The case of engines compared with graphs in fp32, without limits: each stage is judged by itself.
END_TO_END = "end to end"
FIRST = "the limit of fp32: what honest rounding adds was not measured"
_HALVES: Mapping[Precision, Precision] = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class SourceGraph:
    """The graph that an engine was built from. exported: the fp32 graph.  path: the runnable file (`blobs.runnable`).
    blocks: `activation_blocks` of `with_rounding`.  rows: the numbers of rows that the engine accepts in a call;
    None: see `call_rows`.  scales: output of the ensemble that is an int8 state -> its scale."""

    exported: Path
    path: Path
    precision: Precision
    changed: bool
    blocks: bool
    rows: range | None
    scales: Mapping[str, float] = field(default_factory=dict)


def fetch_sources(
    store: Store, engines: Mapping[str, EngineBlob], exported_digests: Mapping[str, str], parts: Parts, workdir: Path
) -> dict[str, SourceGraph]:
    """The graphs that engines were built from, by name. exported_digests: digests of the fp32 ones.
    parts: sessions in the place of graphs. Raises as `fetch`."""
    source_graphs = dict[str, SourceGraph]()
    for name, blob in engines.items():
        folder, request = workdir / f"graph-{name}", blob.request
        (folder / "exported").mkdir(parents=True)
        exported_path = fetch_graph(store, exported_digests[name], folder / "exported" / "graph.onnx")
        path = runnable(fetch_graph(store, request.model, folder / "graph.onnx"), request.precision)
        backend = discovery.configure(request.backend, dict(request.options))
        rounds_blocks = request.precision in IN_BLOCKS and backend.capabilities.rounds_activations
        has_changed = request.model != exported_digests[name]
        scales = {f"{name}.{state.output}": state.scale for state in request.quantized_states}
        source_graphs[name] = SourceGraph(
            exported_path, path, request.precision, has_changed, rounds_blocks, parts[name][1], scales
        )
    return source_graphs


@dataclass(frozen=True)
class Stages:
    """What the stages of a chain are judged with. opens: the chain with sessions in the place of graphs. limits: what
    the spec says, by stage.  metrics: of the whole.  sources: the graphs of engines, by name."""

    opens: Callable[[Parts], "AbstractContextManager[Ensemble]"]
    sources: Mapping[str, SourceGraph]
    precision: Precision
    limits: Mapping[str, Mapping[str, float]]
    metrics: Sequence[TaskMetric]
    workdir: Path

    def checks(self, golden: "GoldenSet", engines: Parts, alone: bool) -> Proof:
        """The checks of the graphs that the engines were built from, and of the engines; how the engines' errors
        spread, and the drift of both along sequences. golden: with the exported graphs' outputs.  alone: whether
        engines may also be run one at a time, on inputs other than the ensemble's."""
        from validation.comparison.sessions import expected_checks
        from validation.limits.budget import default_budget

        graph_proof = Proof()
        with self._open_sources() as graphs, self.opens(engines) as session:
            if self._changed:
                with self.opens({}) as exported_chain:
                    graph_proof = self._compare("quantization", exported_chain, graphs, golden)
                whole_checks = expected_checks("engine", session, golden, default_budget("engine", self.precision))
                graph_proof = replace(graph_proof, checks=(*graph_proof.checks, *unjudged(END_TO_END, whole_checks)))
            engine_proof = self._compare("engine", graphs, session, golden)
            has_failed = alone and self._changed and any(not check.passed for check in engine_proof.checks)
            part_checks = tuple(self._each_alone(graphs, golden, engines)) if has_failed else ()
        rolled_drifts = *graph_proof.free_running, *engine_proof.free_running
        return replace(
            engine_proof, checks=graph_proof.checks + engine_proof.checks + part_checks, free_running=rolled_drifts
        )

    @property
    def _changed(self) -> bool:
        return any(source.changed for source in self.sources.values())

    def _each_alone(self, graphs: Session, golden: "GoldenSet", engines: Parts) -> Iterator[Check]:
        """The drift that each engine alone adds among the graphs that the engines were built from, without limits.
        Among the graphs in fp32, the drift of quantization would hide it."""
        from validation.comparison.sessions import drift_checks
        from validation.limits.budget import default_budget

        for name, engine in engines.items():
            with self._open_sources({name: engine}) as mixed_chain:
                engine_checks = drift_checks(
                    "engine", graphs, mixed_chain, golden, default_budget("engine", self.precision)
                )
            yield from unjudged(f"{name}{AMONG_SOURCES}", engine_checks)

    def _compare(self, stage: "Stage", reference: Session, candidate: Session, golden: "GoldenSet") -> Proof:
        """The checks of a stage: step by step with the states of the exported graphs, and of sequences, which each side
        runs with its own states. At the stage of the graphs the golden set has the reference's answers, and graphs
        below fp32 must make the same decisions."""
        from validation.comparison.decisions import decision_checks
        from validation.comparison.sessions import drift_checks
        from validation.comparison.tasks import free_running_checks, step_spreads
        from validation.golden.free_running import FreeRunningSession
        from validation.metrics.tally import Along

        limits_of = self._graph_limits if stage == "quantization" else self._engine_limits
        expected_session = None if stage == "quantization" else reference
        course = Along()
        spreads = step_spreads(golden, course)
        usual_drifts: dict[str, Drift] = {}
        checks = drift_checks(
            stage, expected_session, candidate, golden, limits_of(reference, golden), spreads, usual_drifts
        )
        if stage == "quantization" and self.precision != "fp32":
            checks += tuple(decision_checks(usual_drifts, self.metrics, self.limits.get(stage, {})))
        if sequences := golden.sequences:
            pair = FreeRunningSession(reference, sequences), FreeRunningSession(candidate, sequences)
            rolled_limits = limits_of(pair[0], sequences.golden, sequences)
            expected_session = None if expected_session is None else pair[0]
            checks += free_running_checks(stage, expected_session, pair[1], sequences.golden, rolled_limits, course)
        return Proof(checks, spreads=spreads.at(stage), free_running=course.at(stage))

    def _graph_limits(
        self, exported_chain: Session, golden: "GoldenSet", sequences: "GoldenSequences | None" = None
    ) -> "StagedLimits":
        """The limits of the graphs that the engines were built from, as `WrittenLimits` of one graph. sequences: the
        sequences that `golden` has, where sessions take whole ones."""
        from validation.limits.budget import StagedLimits

        limits = self.limits.get("quantization", {})
        if self.precision in QUANTIZED:
            return quantized_limits(exported_chain, self.precision, golden, limits, bool(self.metrics))
        limit_stages = self._measure("quantization", exported_chain, golden, limits, sequences)
        return StagedLimits(next(limit_stages), limit_stages)

    def _engine_limits(
        self, graphs: Session, golden: "GoldenSet", sequences: "GoldenSequences | None" = None
    ) -> "StagedLimits":
        """The limits of the engines against those graphs: the spec's, else those of fp32, which valid engines mostly
        meet in any precision and faulty ones do not; if missed, the limits of honest rounding of the chain."""
        from validation.limits.budget import Budgets, OutputLimits, StagedLimits, default_budget

        limits = self.limits.get("engine", {})
        limit_stages = self._measure("engine", graphs, golden, limits, sequences)
        if limits:
            return StagedLimits(next(limit_stages), limit_stages)
        note = "" if self.precision == "fp32" else FIRST
        first_limits = add_notes(Budgets(default_budget("engine", "fp32")), graphs, note)
        return StagedLimits(OutputLimits(first_limits), limit_stages)

    def _measure(
        self,
        stage: "Stage",
        reference: Session,
        golden: "GoldenSet",
        limits: Mapping[str, float],
        sequences: "GoldenSequences | None",
    ) -> "Iterator[OutputLimits]":
        """The limits that follow from the honest rounding of the whole chain, measured."""
        from validation.perturbation.honest import measure_rounding

        graphs = [source.path if stage == "engine" else source.exported for source in self.sources.values()]
        scales = {name: scale for source in self.sources.values() for name, scale in source.scales.items()}
        perturbed_chain, has_sequences = self._perturb(stage, sequences), sequences is not None
        rounding = measure_rounding(graphs, perturbed_chain, golden, reference, thorough=True, whole=has_sequences)
        return measured_limits(stage, self.precision, rounding, reference, golden, limits, scales)

    @contextmanager
    def _open_sources(self, engines: Parts = MappingProxyType({})) -> "Iterator[Ensemble]":
        """The graphs that the engines were built from, and engines in the place of some."""
        with ExitStack() as resources:
            source_graphs = {name: source for name, source in self.sources.items() if name not in engines}
            sessions = {
                name: resources.enter_context(as_written(source.path)) for name, source in source_graphs.items()
            }
            session_rows = {name: (session, source_graphs[name].rows) for name, session in sessions.items()}
            yield resources.enter_context(self.opens({**session_rows, **engines}))

    @contextmanager
    def _perturb(self, stage: "Stage", sequences: "GoldenSequences | None") -> "Iterator[Perturbed]":
        """The chain with graphs that round as other kernels would. At the stage of the graphs these are the exported
        ones, in the precision that each engine has. sequences: those that it takes whole, with its own states."""
        from validation.golden.free_running import FreeRunningSession
        from validation.perturbation.graph import perturb_chain, perturb_graph

        with ExitStack() as resources:
            perturbations: dict[str, Perturbed] = {}
            for name, source in self.sources.items():
                folder = Path(resources.enter_context(TemporaryDirectory(dir=self.workdir)))
                is_engine = stage == "engine"
                path, half_type = (source.path, None) if is_engine else (source.exported, _HALVES.get(source.precision))
                graph = perturb_graph(path, as_written, folder, half_type, source.blocks and is_engine)
                perturbations[name] = resources.enter_context(graph)
            chain = resources.enter_context(perturb_chain(self._open, perturbations))
            yield replace(chain, session=FreeRunningSession(chain.session, sequences)) if sequences else chain

    def _open(self, sessions: Mapping[str, Session]) -> "AbstractContextManager[Ensemble]":
        return self.opens({name: (session, self.sources[name].rows) for name, session in sessions.items()})


def unjudged(case: str, checks: Sequence[Check]) -> Iterator[Check]:
    """The values of checks on the golden data, under the name of another case and without limits."""
    for check in checks:
        if check.case == "golden" and check.value is not None:
            yield replace(check, case=case, limit=None, passed=True)
