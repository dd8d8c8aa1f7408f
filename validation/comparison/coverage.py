"""What a golden set does not measure: outputs and right answers that are the same in all of its samples.

An engine that answers so whatever it is asked agrees with the model on them, in every bit. Such an output has the check
`UNMEASURED`, with which no engine is proven. Exempt are outputs that cannot vary with what is computed: those that no
input reaches, and inputs that are handed on (`builders.onnx_graphs.dependence`). They are compared as others are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from builders.onnx_graphs.dependence import Dependence
from enginesmith.arrays import Array
from enginesmith.core.reports.proof import Check, unmeasured
from validation.comparison.outputs import Constancy
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budget
from validation.limits.measured import MeasuredDrift, of_golden, still_share
from validation.metrics.drift import Drift, is_exact, measure
from validation.metrics.tally import samples_of
from validation.metrics.tasks.boxes import BoxSet
from validation.metrics.tasks.measures import score_of
from validation.metrics.tasks.terms import TaskMetric

STAGE = "export"
_REMEDY = "give golden data that varies it"


def unmeasured_checks(
    golden: GoldenSet, dependences: Mapping[str, Dependence], metrics: Sequence[TaskMetric] = ()
) -> Iterator[Check]:
    """A check for each output, and for each metric, that the golden cases do not measure.

    dependences: of the exported model's outputs; one that is not among them counts as computed. Raises DataError for
    outputs or labels of a shape that a metric does not take, InputError for an output that the model lacks.
    """
    outputs: dict[str, _Variation] = {}
    for case in golden.of_kind("golden"):
        for name, value in case.expected.items():
            if dependences.get(name, "computed") == "computed":
                samples = samples_of(case.inputs.values(), value)
                outputs.setdefault(name, _Variation(value.dtype)).add(value, samples)
    for name, found in outputs.items():
        if reason := found.why_unmeasured():
            yield unmeasured(STAGE, name, "golden", f"{reason}; {_REMEDY}")
    for metric in metrics:
        if reason := _why_no_answers(golden, metric):
            yield unmeasured(STAGE, metric.terms.output, "golden", f"{metric.terms.name}: {reason}")


@dataclass
class _Variation:
    """How one output varies over the golden cases. samples: how many there are.  number: that all elements of the last
    case are; None where they differ."""

    dtype: np.dtype
    samples: int = 0
    constancy: Constancy = field(default_factory=Constancy)
    drift: Drift | None = None
    number: float | None = None

    def add(self, value: Array, samples: int) -> None:
        """Take the output of a case."""
        self.samples += samples
        self.constancy.add(value, samples)
        same = value.size and (value == value.flat[0]).all()
        self.number = float(value.flat[0]) if same else None
        found = measure(value, value, samples=samples)
        self.drift = self.drift.merge(found) if self.drift else found

    def why_unmeasured(self) -> str:
        """Why the output is not measured; '' where it is. A single sample varies by its elements, and a single number
        is measured unless it is 0."""
        drift = self.drift or Drift()
        of = f"in all {self.samples} golden samples" if self.samples > 1 else "in the one golden sample"
        if not drift.count:
            return "" if drift.nonfinite else f"{'infinite' if drift.infinite else 'empty'} {of}"
        if drift.infinite:  # a mask of infinities says which elements count, and varies with them
            return f"the same {of}" if self.constancy.constant else ""
        if self.samples == 1:
            shows_nothing = self.number is not None and (drift.count > 1 or not self.number)
            return f"{self.number:g} throughout {of}" if shows_nothing else ""
        still = not is_exact(np.empty(0, self.dtype)) and not self._moves(drift)
        return f"the same {of}" if self.constancy.constant or still else ""

    def _moves(self, drift: Drift) -> bool:
        return MeasuredDrift(of_golden(drift), Budget(), still_share(self.dtype)).moves


def _why_no_answers(golden: GoldenSet, metric: TaskMetric) -> str:
    """Why a metric's right answers show nothing; '' where two of them differ, where there is one, or for a metric of
    likelihoods, which has no answers of its own."""
    score = score_of(metric.terms)
    labelled = metric.against == "labels" and golden.labels is not None
    if labelled:
        parts: Iterable[Any] = [score.read_labels(np.atleast_1d(np.asarray(golden.labels)))]
    else:
        parts = (score.read_wanted(case.expected) for case in golden.of_kind("golden"))
    skipped = [value for name in ("ignore", "pad") if (value := getattr(metric.terms, name, None)) is not None]
    distinct, count = set[object](), 0
    for part in parts:
        answers = part[~np.isin(part, skipped)] if isinstance(part, np.ndarray) else part
        if not isinstance(answers, np.ndarray | list):
            return ""
        count += np.size(answers) if isinstance(answers, np.ndarray) else len(answers)
        distinct |= {*_some_answers(answers)}
        if len(distinct) > 1:
            return ""
    whose = "labels" if labelled else "answers of the original model"
    return f"all {count} {whose} are equal; give golden data with several" if count > 1 else ""


def _some_answers(answers: Array | list[Any]) -> Iterator[object]:
    """Answers of a case, of which two differ where any two do: the ends of an array, texts, the boxes of each image."""
    if isinstance(answers, np.ndarray):
        yield from (answers.min().item(), answers.max().item()) if answers.size else ()
        return
    for item in answers:
        yield (item.classes.tobytes(), item.corners.tobytes()) if isinstance(item, BoxSet) else tuple(item)
