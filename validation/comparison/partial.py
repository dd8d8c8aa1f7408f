"""Whether a few golden cases alone show that a candidate breaks the limits of all: most trials of a search do, by far.

Errors only add up. The error energy of some cases that exceeds what a limit allows for all of them is not made good by
the others, however exact these are, and neither is their greatest error.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Session
from validation.comparison.sessions import run
from validation.golden.golden_set import Case
from validation.limits.budget import within
from validation.metrics.drift import Drift, measure

# Metrics that further cases can only make worse, once the signal of all cases is known.
_ADDING_UP = ("sqnr_db", "centered_sqnr_db", "max_rel", "max_abs")

OutputLimit = tuple[str, str, float]


def list_limits(checks: Iterable[Check]) -> list[OutputLimit]:
    """(output, metric, limit) of the checks of golden cases by a metric that adds up over the cases."""
    golden = (check for check in checks if check.case == "golden" and check.name in _ADDING_UP)
    return [(check.output, check.name, check.limit) for check in golden if check.limit is not None]


def find_broken(
    candidate: Session, cases: Iterable[Case], whole: Mapping[str, Drift], limits: Sequence[OutputLimit]
) -> Check | None:
    """The failed check of a limit of all golden cases that some of them break; None where they break none.

    They are run in turn until one is broken. Its value is what all would have if the others were exact.
    cases: with the expected outputs.  whole: of all golden cases, the drift without an error (`golden_drifts`).
    None also where the candidate cannot be run or compared, which the checks of all cases explain.
    """
    found: dict[str, Drift] = defaultdict(Drift)
    try:
        for case in cases:
            actual = run(candidate, case.inputs)
            for name in {output for output, *_ in limits}:
                found[name] = found[name].merge(measure(case.expected[name], actual[name]))
            for name, metric, limit in limits:
                value = _value_at_best(metric, whole[name], found[name])
                if not within(metric, value, limit):
                    return Check("quantization", metric, name, "golden", value, limit, False, "of some cases")
    except (EnginesmithError, KeyError, ValueError):
        return None
    return None


def _value_at_best(metric: str, whole: Drift, part: Drift) -> float:
    part = part.scale_to(whole.exponent)
    value: float = getattr(replace(whole, error_sq=part.error_sq, max_abs=part.max_abs), metric)
    return value
