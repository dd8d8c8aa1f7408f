"""The drift of an ensemble by stages, as that of one graph: the graphs that its engines were built from against the
exported ones, then the engines against those."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from builders.backends import discovery
from enginery.core.reports.proof import Check
from enginery.core.types import QUANTIZED, Precision, Session
from enginery.registry.store.base import Store
from pipeline.compile.steps.blobs import fetch_graph, runnable
from pipeline.compile.steps.drift_limits import WEAK, add_notes, as_written
from pipeline.values import EngineBlob

if TYPE_CHECKING:
    from enginery.ensembles import Ensemble
    from validation.golden.golden_set import GoldenSet
    from validation.limits.budget import OutputLimits, Stage, StagedLimits
    from validation.metrics.tally import Spreads
    from validation.perturbation.sessions import Perturbed

# Sessions in the place of graphs, by name, each with the most rows that it takes at once.
Parts = Mapping[str, tuple[Session, int | None]]
# The case of what the engines are against graphs in fp32, which the stages before have judged.
END_TO_END = "end to end"
FIRST = "the limit of fp32: what honest rounding adds was not measured"
_HALVES: Mapping[Precision, Precision] = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class SourceGraph:
    """The graph that an engine was built from. exported: the fp32 one.  path: as it is run (`blobs.runnable`).
    blocks: as `activation_blocks` of `with_rounding`.  most: the most rows that the engine takes at once."""

    exported: Path
    path: Path
    precision: Precision
    changed: bool
    blocks: bool
    most: int | None


def fetch_sources(
    place: Store, engines: Mapping[str, EngineBlob], exported: Mapping[str, str], parts: Parts, workdir: Path
) -> dict[str, SourceGraph]:
    """The graphs that engines were built from, by name. exported: digests of the fp32 ones.  Raises as `fetch`."""
    found = dict[str, SourceGraph]()
    for name, blob in engines.items():
        folder, request = workdir / f"graph-{name}", blob.request
        (folder / "exported").mkdir(parents=True)
        original = fetch_graph(place, exported[name], folder / "exported" / "graph.onnx")
        path = runnable(fetch_graph(place, request.model, folder / "graph.onnx"), request.precision)
        backend = discovery.configure(request.backend, dict(request.options))
        blocks = request.precision == "int4" and backend.capabilities.rounds_activations
        changed = request.model != exported[name]
        found[name] = SourceGraph(original, path, request.precision, changed, blocks, parts[name][1])
    return found


@dataclass(frozen=True)
class Stages:
    """What the stages of a chain are judged with. opens: the chain with sessions in the place of graphs.
    limits: what the spec says, by stage.  judged_by_task: whether the whole has task metrics."""

    opens: Callable[[Parts], "AbstractContextManager[Ensemble]"]
    sources: Mapping[str, SourceGraph]
    precision: Precision
    limits: Mapping[str, Mapping[str, float]]
    judged_by_task: bool
    workdir: Path

    def checks(self, golden: "GoldenSet", engines: Parts, spreads: "Spreads") -> tuple[Check, ...]:
        """The checks of the graphs that the engines were built from, and of the engines. golden: with what the exported
        graphs give.  spreads: is filled with how the engines' errors spread."""
        from validation.comparison.sessions import drift_checks, expected_checks
        from validation.limits.budget import default_budget

        checks: tuple[Check, ...] = ()
        with self._open_sources() as graphs, self.opens(engines) as actual:
            if any(source.changed for source in self.sources.values()):
                with self.opens({}) as exported:
                    checks += drift_checks("quantization", None, graphs, golden, self._graph_limits(exported, golden))
                whole = expected_checks("engine", actual, golden, default_budget("engine", self.precision))
                checks += tuple(unjudged(END_TO_END, whole))
            held = self._engine_limits(graphs, golden)
            return checks + drift_checks("engine", graphs, actual, golden, held, spreads)

    def _graph_limits(self, exported: Session, golden: "GoldenSet") -> "StagedLimits":
        """The limits of the graphs that the engines were built from, as `graph_drift_limits` of one graph."""
        from validation.limits.budget import OutputLimits, StagedLimits, budgets

        limits = self.limits.get("quantization", {})
        if self.precision in QUANTIZED:
            found = budgets("quantization", self.precision, golden.noise).override(limits)
            weak = "" if self.judged_by_task or "sqnr_db" in limits else WEAK
            return StagedLimits(OutputLimits(add_notes(found, exported, weak)))
        looser = self._measure("quantization", exported, golden, limits)
        return StagedLimits(next(looser), looser)

    def _engine_limits(self, graphs: Session, golden: "GoldenSet") -> "StagedLimits":
        """The limits of the engines against those graphs: those of fp32, which most keep in any precision and no fault
        does; where they do not, what honest rounding of the chain adds."""
        from validation.limits.budget import Budgets, OutputLimits, StagedLimits, default_budget

        limits = self.limits.get("engine", {})
        looser = self._measure("engine", graphs, golden, limits)
        if limits:
            return StagedLimits(next(looser), looser)
        note = "" if self.precision == "fp32" else FIRST
        first = add_notes(Budgets(default_budget("engine", "fp32")), graphs, note)
        return StagedLimits(OutputLimits(first), looser)

    def _measure(
        self, stage: "Stage", reference: Session, golden: "GoldenSet", limits: Mapping[str, float]
    ) -> "Iterator[OutputLimits]":
        """The limits that follow from the honest rounding of the whole chain, measured."""
        from validation.limits.budget import OutputLimits, budgets
        from validation.perturbation.honest import measure_rounding

        graphs = [source.path if stage == "engine" else source.exported for source in self.sources.values()]
        perturbed = self._perturb(stage)
        for honest in measure_rounding(graphs, perturbed, golden, reference, thorough=True):
            found = budgets(stage, self.precision, golden.noise, honest).override(limits)
            unknown = f"honest rounding is not known: {honest.reason}" if honest.reason else ""
            yield OutputLimits(add_notes(found, reference, unknown), honest.drifts)

    @contextmanager
    def _open_sources(self) -> "Iterator[Ensemble]":
        with ExitStack() as stack:
            opened = {name: stack.enter_context(as_written(source.path)) for name, source in self.sources.items()}
            yield stack.enter_context(self._open(opened))

    @contextmanager
    def _perturb(self, stage: "Stage") -> "Iterator[Perturbed]":
        """The chain with graphs that round as other kernels would. At the stage of the graphs these are the exported
        ones, in the precision that each engine has."""
        from validation.perturbation.sessions import perturb_chain, perturb_graph

        with ExitStack() as stack:
            found: dict[str, Perturbed] = {}
            for name, source in self.sources.items():
                folder = Path(stack.enter_context(TemporaryDirectory(dir=self.workdir)))
                built = stage == "engine"
                path, half = (source.path, None) if built else (source.exported, _HALVES.get(source.precision))
                graph = perturb_graph(path, as_written, folder, half, source.blocks and built)
                found[name] = stack.enter_context(graph)
            yield stack.enter_context(perturb_chain(self._open, found))

    def _open(self, sessions: Mapping[str, Session]) -> "AbstractContextManager[Ensemble]":
        return self.opens({name: (session, self.sources[name].most) for name, session in sessions.items()})


def unjudged(case: str, checks: Sequence[Check]) -> Iterator[Check]:
    """The values of checks on the golden data, under the name of another case and without limits."""
    for check in checks:
        if check.case == "golden" and check.value is not None:
            yield replace(check, case=case, limit=None, passed=True)
