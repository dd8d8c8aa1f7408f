"""int8 graphs that plain ranges gave and that miss their limits: what int8 takes, and how, is then searched.

The search is asked for the very limits that the graph was judged by, on calibration samples; its graph is judged by the
golden set like any other. A search that fails leaves the graph failed, and every other unit alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import OVERLAP, describe
from enginesmith.core.text import pluralize
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.graphs import quantize
from pipeline.compile.steps.search import search_for_limits
from pipeline.progress.events import Finished
from pipeline.spec.model import ModelSpec
from pipeline.values import BuildPlan, Exported, Graph, Observed, Searched, SearchResult

# Failed checks that no other choice of int8 nodes can mend.
_BEYOND = (OVERLAP, "repeats", "runs", "outputs", "shape", "measured")


@dataclass(frozen=True)
class MissedGraphs:
    """The graphs of one kind of int8 that missed their limits."""

    kind: Searched
    graphs: tuple[Graph, ...]

    @property
    def name(self) -> str:
        """'int8 (uint8 activations)'."""
        return self.kind.name

    @property
    def why(self) -> str:
        """'plain ranges missed quantization sqnr_db of logits at golden: 12.1, limit 15 (and 2 more)'."""
        first, *others = self.graphs[0].proof.failed
        more = f" (and {len(others)} more)" if others else ""
        return f"plain ranges missed {describe(replace(first, note=''))}{more}"


def search_follows(spec: ModelSpec) -> bool:
    """Whether int8 is searched where plain ranges miss the limits."""
    asked = spec.quantization
    return "int8" in spec.precisions and asked.search == "when-needed" and not asked.searches and bool(spec.calibration)


def find_missed(plan: BuildPlan, spec: ModelSpec, exported: Exported) -> tuple[MissedGraphs, ...]:
    """The graphs of a plan that a search may mend, by kind; none where the spec wants no search or has one already,
    where the weights lie in shards, which a search would hold in memory, and where the exported model has failed."""
    if not search_follows(spec) or exported.proof.failed or exported.model.shards:
        return ()
    failed = {unit.graph.variant: unit.graph for unit in plan.units if unit.action == "failed"}
    found: dict[Searched, list[Graph]] = {}
    for variant, graph in failed.items():
        if variant.searched and graph.recipe and not any(check.name in _BEYOND for check in graph.proof.failed):
            found.setdefault(variant.searched, []).append(graph)
    return tuple(MissedGraphs(kind, tuple(graphs)) for kind, graphs in found.items())


def search_missed(
    missed: Sequence[MissedGraphs], spec: ModelSpec, exported: Exported, ranges: Observed | None, context: RunContext
) -> tuple[Graph, ...]:
    """Graphs in the place of those that missed their limits, searched together and judged anew; where the search fails,
    the same ones. Each says why it was searched and what came of it.

    Raises what says nothing about the search: something out of reach, a damaged blob, a cancelled step.
    """
    for item in missed:
        context.progress.emit(Finished(f"plain {item.name}", words=f"{item.why}; it is searched what int8 takes"))
    try:
        choices = search_for_limits([item.kind for item in missed], spec, exported, ranges, context)
        pairs = [(item, graph) for item in missed for graph in item.graphs]
        made = [(item, quantize(graph.variant, spec, exported, ranges, choices, context)) for item, graph in pairs]
        beside = describe_deciding(spec)
        return tuple(_describe_search(graph, item.why, choices[item.kind], beside) for item, graph in made)
    except EnginesmithError as error:
        if stops_run(error):
            raise
        names = " and ".join(item.name for item in missed)
        context.progress.emit(Finished(f"search {names}", "failed", str(error)))
        told = f"the search that followed failed: {error}"
        return tuple(replace(graph, searched=told) for item in missed for graph in item.graphs)


def describe_deciding(spec: ModelSpec) -> str:
    """What a search does about a task metric that decides: nothing, which is said; '' where none does."""
    metrics = spec.golden.metrics if spec.golden else ()
    deciding = [item.name for item in metrics if item.decides_for("int8")]
    if not deciding:
        return ""
    return f"; its trials were held to decibels, not to {' and '.join(deciding)}, by which the graph is judged"


def _describe_search(graph: Graph, why: str, choice: SearchResult, beside: str = "") -> Graph:
    """The graph with what came of the search that made it. beside: what else is to be said of it."""
    share = f"{choice.share:.1%} of the weighted multiplications"
    left = f"{pluralize(len(choice.left), 'node')} left in float" if choice.left else "no node left in float by it"
    ended = f"; it {choice.ended}: timeouts.quantization_s gives it longer" if choice.ended else ""
    searched = f"searched, because {why}: {share} in int8, {left}{ended}{beside}"
    return replace(graph, searched=searched, notes=(searched, *graph.notes))
