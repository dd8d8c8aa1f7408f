"""Finds the groups to leave in float so that a graph keeps its limits: delta debugging over the quantized groups.

Each trial writes the whole graph anew, as the pipeline would with these overrides, and runs all its checks. A proposal
has passed them.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import ModelProto

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Precision, QuantizationScheme, QuantizedState
from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.ranges import QuantizationNotes, Ranges
from pipeline.quantization.schemes.overrides import Override, ProductPrecision
from pipeline.quantization.schemes.write import write
from pipeline.quantization.settings.groups import find_groups
from validation.attribution.cuts import reduce
from validation.attribution.result import Attribution, CheckChange, Proposal, ProposedOverride

# The most trials and the most seconds: each trial writes and checks a whole graph.
MOST_RUNS, MOST_S = 60, 900.0

Nodes = tuple[str, ...]
Judge = Callable[[ModelProto], Sequence[Check]]


@dataclass(frozen=True)
class QuantizationRecipe:
    """How a graph is written: the float model, and `write`'s arguments."""

    model: ModelProto
    precision: Precision
    scheme: QuantizationScheme | None
    ranges: Ranges | None
    rules: tuple[Override, ...]
    float_nodes: Mapping[str, str]
    keep_io: bool
    states: tuple[QuantizedState, ...] = ()
    formats: Mapping[str, Precision] = field(default_factory=dict)

    @property
    def float_precision(self) -> ProductPrecision:
        """The precision of an override that leaves a node in the float type of the rest of the graph."""
        return "fp16" if self.scheme and self.scheme.float_precision == "fp16" else "fp32"

    def rules_with(self, nodes: Sequence[str]) -> list[Override]:
        """The rules, followed by rules that leave `nodes` in float: the last rule for a node counts."""
        return [*self.rules, *(Override(name, self.float_precision) for name in nodes)]

    def write(self, nodes: Sequence[str] = ()) -> tuple[ModelProto, object]:
        """The graph with these nodes in float, and notes."""
        args, rest = (self.scheme, self.ranges, self.rules_with(nodes)), (self.float_nodes, self.states, self.formats)
        return write(self.model, self.precision, *args, *rest, keep_io=self.keep_io)


def propose(
    recipe: QuantizationRecipe, attribution: Attribution, before: Sequence[Check], judge: Judge, most_s: float = MOST_S
) -> Proposal:
    """The smallest set of groups found that, left in float, repairs the graph.

    attribution: its ranking gives the order of trials.  before: the checks of the present graph.  judge: runs all.
    most_s: seconds, after which the smallest set so far is proposed.
    """
    # Groups with the worst own error are first.
    node_ranks = {name: index for index, row in reversed([*enumerate(attribution.rows)]) for name in row.nodes}
    groups = sorted(
        narrow_groups(recipe, attribution),
        key=lambda nodes: min(node_ranks.get(name, len(node_ranks)) for name in nodes),
    )
    checks_by_names: dict[tuple[str, ...], Sequence[Check]] = {}

    def passes(chosen_groups: Sequence[Nodes]) -> bool:
        nodes = _flat(chosen_groups)
        try:
            checks_by_names[nodes] = judge(recipe.write(nodes)[0])
        except EnginesmithError:
            return False  # this combination cannot be written or read
        return all(check.passed for check in checks_by_names[nodes])

    deadline_s = time.monotonic() + min(most_s, MOST_S)
    result = reduce(groups, passes, MOST_RUNS, lambda: time.monotonic() > deadline_s)
    if result.items is None:
        return Proposal(len(groups), result.runs, result.minimal, None, ended_early=result.spent)
    rules = recipe.rules_with(_flat(result.items))
    return Proposal(
        groups=len(groups),
        runs=result.runs,
        minimal=result.minimal,
        leave=result.items,
        overrides=tuple(ProposedOverride(rule.match, rule.precision) for rule in rules),
        snippet=_yaml(rules),
        quality=tuple(_compare(before, checks_by_names[_flat(result.items)])),
        ended_early=result.spent,
    )


def narrow_groups(recipe: QuantizationRecipe, attribution: Attribution) -> list[Nodes]:
    """The groups in the graph's narrow precision, in the graph's order; for a cast, the nodes behind each row."""
    model = prepare_model(recipe.model)
    _, notes = recipe.write()
    if isinstance(notes, QuantizationNotes):
        quantized_nodes = {*notes.quantized}
        sites = [site for site in find_sites(model)[0] if site.node in quantized_nodes]
        return [group.nodes for group in find_groups(model, sites)]
    node_names = {node.name for node in model.graph.node}
    rows = [tuple(name for name in row.nodes if name in node_names) for row in attribution.rows]
    return list(dict.fromkeys(nodes for nodes in rows if nodes))


def _flat(groups: Sequence[Nodes]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for nodes in groups for name in nodes))


def _compare(before: Sequence[Check], after: Sequence[Check]) -> Iterator[CheckChange]:
    later_checks = {_place(check): check for check in after}
    for check in before:
        if not check.passed or (check.name == "sqnr_db" and check.case == "golden"):
            yield CheckChange(check, later_checks.get(_place(check)))


def _place(check: Check) -> tuple[str, ...]:
    """Key by which checks are compared. All edges have one key: the worst edge of a metric may change."""
    return check.stage, check.name, check.output, "golden" if check.case.startswith("golden") else "edges"


def _yaml(rules: Sequence[Override]) -> str:
    lines = [f"    - {{match: {json.dumps(rule.match)}, precision: {rule.precision}}}" for rule in rules]
    return "\n".join(["quantization:", "  overrides:", *lines])
