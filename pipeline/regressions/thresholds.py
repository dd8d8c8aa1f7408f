"""What a change may be worse by, and how long it is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from enginesmith.core.errors import InputError
from enginesmith.core.types import PRECISIONS, Precision
from pipeline.spec.metrics import Metric
from validation.limits.budget import Budget, default_budget
from validation.metrics.tasks.terms import VALUES

# The greatest loss of a task metric that passes: of shares and errors, of values in dB, and of a perplexity as a share.
LOSS, LOSS_DB, LOSS_PERPLEXITY = 0.005, 0.5, 0.01
SLOWER = 0.03

DriftRule = Literal["auto", "fail", "note"]


@dataclass(frozen=True)
class CheckOptions:
    """slower: the slowdown of the median that a new engine must be shown to exceed, as a share.

    worse: by task metric the greatest loss that passes, '' for all others; defaults as in `allowed_loss`.
    drift: whether other answers than the served ones are a regression; 'auto': where no task metric has a limit.
    seconds: of timing for each pair and bucket.  buckets: 'few', 'all', or texts as 'batch=8,length=64'.
    seed: of the order of runs.
    """

    slower: float = SLOWER
    worse: Mapping[str, float] = field(default_factory=dict)
    drift: DriftRule = "auto"
    seconds: float = 2.0
    buckets: Literal["few", "all"] | tuple[str, ...] = "few"
    seed: int = 0

    def allowed_loss(self, name: str, served: float) -> float:
        """The greatest loss of a task metric that passes. name: 'accuracy', or 'accuracy of logits'."""
        value = name.partition(" of ")[0]
        for known in (name, value, ""):
            if known in self.worse:
                return self.worse[known]
        if value.endswith("_db"):
            return LOSS_DB
        return LOSS_PERPLEXITY * abs(served) if value == "perplexity" else LOSS


def check_losses(worse: Mapping[str, float], metrics: Sequence[Metric]) -> None:
    """Raise InputError where a loss is stated for a task metric that the spec does not have."""
    values = {(value, item.output) for item in metrics for value in VALUES[item.name]}
    known = {name for value, output in values for name in (value, f"{value} of {output}")}
    if unknown := sorted(name for name in worse if name and name not in known):
        have = ", ".join(sorted({value for value, _ in values})) or "none"
        raise InputError(f"--worse {unknown[0]}: the spec has no such task metric; it has {have}")


def drift_budget(precisions: tuple[Precision, Precision], limits: Mapping[str, float]) -> Budget:
    """How far the answers of two engines may be apart: the documented limits of the precision that rounds more, with
    those that the spec sets for engines. Raises InputError as `Budget.override`."""
    documented = [default_budget("engine", precision) for precision in sorted(precisions, key=PRECISIONS.index)]
    return min(documented, key=lambda budget: budget.sqnr_db or 0.0).override(limits)
