"""How good a quantized graph is, the limits that it is judged by, and the time that a search may take."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnx import ModelProto

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import CHANGED, DECISIONS
from enginesmith.core.types import Tensors
from pipeline.quantization.settings.groups import SmoothingGroup, find_waists
from pipeline.quantization.settings.runs import downstream
from validation.comparison.sessions import StageComparison, decision_checks
from validation.golden.golden_set import Case
from validation.limits.budget import Budget, Budgets, OutputLimits, default_budget
from validation.limits.rounding import MOST_CHANGED, NearTies
from validation.metrics.drift import Drift
from validation.metrics.tasks.terms import TaskMetric


class OutOfTimeError(EnginesmithError):
    """A search ended before it was done; says how far it got."""


@dataclass(frozen=True)
class SearchClock:
    """When a search ends. most_s: what it may take.  end: of `time.monotonic`."""

    most_s: float = math.inf
    end: float = math.inf

    @classmethod
    def start(cls, most_s: float) -> "SearchClock":
        """From now on."""
        return cls(most_s, time.monotonic() + most_s)

    def part(self, parts: int) -> "SearchClock":
        """A clock for one of so many parts of what is left, that all may take as much."""
        now = time.monotonic()
        return replace(self, end=now + (self.end - now) / parts)

    def check(self, during: str, done: int | None = None) -> None:
        """Raises OutOfTimeError when the time is over. during: what comes next.  done: how many of these there were."""
        if time.monotonic() > self.end:
            count = "" if done is None else f", {done} done"
            raise OutOfTimeError(f"ended after its {self.most_s:.0f} s, during {during}{count}")


@dataclass(frozen=True)
class Quality:
    """How close a quantized model's outputs come to the float model's; of several outputs, the worst.

    noise: energy of the difference over that of the signal.  argmax_agreement: share of the rows along the last axis
    whose decision stays.  accuracy: share of right answers, where there are labels.
    missed: how many of the graph's own checks fail, where a search asks for them.
    """

    noise: float
    cosine: float
    finite: bool = True
    argmax_agreement: float = 1.0
    accuracy: float | None = None
    missed: int = 0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; -inf where an output is not finite."""
        if not self.finite:
            return -math.inf
        return math.inf if self.noise == 0 else -10 * math.log10(self.noise)


@dataclass(frozen=True)
class GraphLimits:
    """The limits that an int8 graph is judged by (the quantization stage), for a search that shall hold them.

    given: what the spec says, by metric, in place of the documented ones.  metrics: the spec's task metrics.
    """

    given: Mapping[str, float | None] = field(default_factory=dict)
    metrics: tuple[TaskMetric, ...] = ()


@dataclass(frozen=True)
class SearchFloor:
    """The least quality that is good enough; None sets no limit. graph: the limits of the graph's own checks, too."""

    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None
    graph: GraphLimits | None = None

    def holds(self, found: Quality) -> bool:
        """Whether a measured quality is good enough. NaN and infinities never are."""
        if self.accuracy is not None and found.accuracy is None:
            return False  # it was not measured
        limits = {name: limit for name, limit in vars(self).items() if name != "graph" and limit is not None}
        within = all(getattr(found, name) >= limit for name, limit in limits.items())
        return found.finite and within and not (self.graph and found.missed)


# The limits that a graph is judged by (the quantization stage), asked of the graphs that a search tries.
#
# The golden set proves what was chosen and chooses nothing, so a trial is compared on calibration samples, in the way
# and with the metrics of the graph's own checks. Those are other samples than the golden ones, and a search picks what
# is good on them. So each limit has a margin, and must hold on each of a few parts of the samples: a golden set is no
# larger than such a part, and in a part the few samples that have most of the error, or the few that an element of an
# output is about, are not lost among the others.

# Decibels by which a trial must be better than the limits of its graph: its SQNR on 48 calibration samples and on 16
# golden ones were 2 to 8 dB apart on a classifier with saturated outputs, and 1 dB on a sentence encoder.
MARGIN_DB = 5.0
# Parts of the runs, every third one, that the limits must hold on.
PARTS = 3


def with_margin(floor: SearchFloor) -> SearchFloor:
    """The floor, with the SQNR of its graph's limits, which says where to search; one without such limits as it is."""
    return replace(floor, sqnr_db=budget_of(floor.graph).sqnr_db) if floor.graph else floor


def budget_of(limits: GraphLimits) -> Budget:
    """The documented limits of an int8 graph or the spec's, with the margin; shares of decisions have none."""
    held = Budgets(default_budget("quantization", "int8")).override(limits.given).default
    given, factor = {name: limit for name, limit in held.items() if limit is not None}, 10 ** (MARGIN_DB / 20)
    changed = {name: limit + MARGIN_DB for name, limit in given.items() if name.endswith("_db")}
    changed |= {name: limit / factor for name, limit in given.items() if name.startswith("max_")}
    changed |= {name: 1 - (1 - limit) / factor**2 for name, limit in given.items() if name == "cosine"}
    return held.override(changed)


@dataclass
class GraphJudge:
    """Takes what a trial answers, run after run, and counts the checks that it fails. runs: inputs."""

    limits: GraphLimits
    runs: Sequence[Tensors]
    _parts: list[StageComparison] = field(init=False)

    def __post_init__(self) -> None:
        self._parts = [StageComparison("quantization", None, {}) for _ in self.runs[:PARTS]]

    def add(self, index: int, expected: Tensors, actual: Tensors) -> None:
        """Take the outputs of the float model and of the trial for a run."""
        case = Case(str(index), "golden", self.runs[index], {})
        self._parts[index % PARTS].add(case, expected, actual)

    def missed(self) -> int:
        """How many checks fail. The share of changed decisions may be `MOST_CHANGED`, and one decision may change."""
        exact = {name for part in self._parts for name, found in part.outputs.items() if found.dtype.kind in "biu"}
        near = {} if DECISIONS in self.limits.given else dict.fromkeys(exact, NearTies())
        held = OutputLimits(Budgets(budget_of(self.limits), decisions=near))
        checks = [check for part in self._parts for check in part.checks(held)]
        whole: dict[str, Drift] = {}
        for part in self._parts:
            for output, drift in part.usual().items():
                whole[output] = whole[output].merge(drift) if output in whole else drift
        decided = decision_checks(whole, self.limits.metrics, self.limits.given)
        judged = {check.output for check in decided if check.name == CHANGED and check.limit is not None}
        flipped = [
            rows for output in judged if (rows := whole[output].rows) and rows.flips > max(1, MOST_CHANGED * rows.count)
        ]
        return sum(not check.passed for check in [*checks, *decided]) + len(flipped)


# Cuts a model into sections, so that what a group costs is measured a few groups on, and not at the model's end.
#
# A waist is a tensor through which everything passes that groups before it change: the residual stream between two
# layers. Where groups have one, their errors are known when they are known there, and what the rest of the model does
# to errors of that place is measured once, for all of them. So the cost of judging every group grows as their number
# does, where whole tails would cost its square. Models without waists, as a U-Net between its skips, are one section.

# Groups of a section, at least. A group is judged at the end of the section after its own.
HORIZON = 12


@dataclass(frozen=True)
class Section:
    """Groups between two waists. end: the tensor that ends it; None for the model's outputs."""

    groups: tuple[SmoothingGroup, ...]
    end: str | None


def divide_sections(
    model: ModelProto, groups: Sequence[SmoothingGroup], types: Mapping[str, int], least: int = HORIZON
) -> list[Section]:
    """The sections of a prepared model, in order; each but the last has at least so many groups.

    types: element types of the model's tensors.
    """
    places = {node.name: index for index, node in enumerate(model.graph.node)}
    # A group that is read in many places ends with the last of them.
    waiting = sorted(groups, key=lambda group: max(places[node] for node in group.nodes))
    sections, held = list[Section](), list[SmoothingGroup]()
    changed = downstream(model, {node for group in groups for node in group.nodes})
    for index, tensor in find_waists(model, changed, types):
        while waiting and max(places[node] for node in waiting[0].nodes) <= index:
            held.append(waiting.pop(0))
        if len(held) >= least and waiting:
            sections.append(Section(tuple(held), tensor))
            held = []
    return [*sections, Section((*held, *waiting), None)]
