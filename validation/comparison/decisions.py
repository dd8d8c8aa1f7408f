"""How many of a model's decisions a quantized graph changes: what its task sees of quantization.

A golden set is small, and one near tie of 48 is 2 %. So what is judged is the lower bound of Clopper and Pearson
(Biometrika 26, 1934): a graph fails when the data shows, at LEVEL, that more than MOST of all decisions are others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from enginery.core.proof.report import Check
from validation.comparison.task import TaskMetric
from validation.golden.golden_set import GoldenSet
from validation.statistics.rates import lower

MOST, LEVEL = 0.01, 0.01


def decision_checks(
    checks: Sequence[Check], golden: GoldenSet, metric: TaskMetric | None, limits: Mapping[str, Any]
) -> list[Check]:
    """Whether a graph decides as the model does on the metric's output; nothing without a metric and its labels.

    checks: of the graph's drift.  limits: of the spec; one on argmax_agreement takes this one's place.
    """
    if metric is None or golden.labels is None or "argmax_agreement" in limits:
        return []
    found = [check for check in checks if (check.output, check.case) == (metric.output, "golden")]
    agreement = next((check for check in found if check.name == "argmax_agreement"), None)
    if agreement is None or agreement.value is None:
        return []
    rows = int(golden.labels.size)
    changed = round((1 - agreement.value) * rows)
    bound = lower(changed, rows, LEVEL)
    note = f"{changed} of {rows} decisions are others; of all decisions at least this share, with 99 % confidence"
    return [Check("quantization", "max_decisions_changed", metric.output, "golden", bound, MOST, bound <= MOST, note)]
