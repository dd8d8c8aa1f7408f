"""Checks that a quantized graph decides as the model does, without labels.

A graph fails if a lower bound of the share of changed decisions exceeds `MOST_CHANGED`, if decisions change that were
not near ties, or if classes lose more than half of their rows.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from enginesmith.core.reports.proof import CHANGED, CLEAR_CHANGED, DECISIONS, LOST_CLASSES, UNSEEN_CLASSES, Check
from enginesmith.core.text import join_first
from validation.limits.rounding import LEVEL, MOST_CHANGED, lost_classes
from validation.metrics.drift import Drift, RowSums
from validation.metrics.tasks.terms import TaskMetric
from validation.statistics.rates import lower, upper

# A decision is no near tie if its lead is at least this many times the root mean square error: six standard deviations
# of the difference of two errors. One such change may be a sample outside the calibrated range.
CLEAR = 8.5
# Single values count as decisions if less than this share of them is within a quarter of their root mean square from
# the threshold. Of uniform numbers around 0, one in seven does; of normal ones, one in five.
MOST_BETWEEN = 1 / 7


def decision_checks(
    drifts: Mapping[str, Drift], metrics: Sequence[TaskMetric], limits: Mapping[str, object]
) -> list[Check]:
    """The checks that a graph changes few of the model's own decisions, and loses none of its classes.

    drifts: of the golden cases by output (`drift_checks`).  metrics: determine which outputs have classes; an output
    without a metric has classes if `decides` is true.  limits: the spec's; a limit on decisions replaces these checks.
    """
    if DECISIONS in limits:
        return []
    class_outputs = {metric.output: metric.name in ("accuracy", "top_k") for metric in metrics}
    golden_checks = list[Check]()
    for output, drift in drifts.items():
        drift = as_decided(drift)
        rows = drift.rows
        if rows is None or not class_outputs.get(output, True):
            continue
        if drift.mismatches is not None:  # the number of unequal integers has a limit of its own (`NearTies`)
            golden_checks += [classes_check(output, rows.named, rows.changed)] if len(rows.named) > 1 else []
        elif decides(drift) or (class_outputs.get(output) and rows.classes > 1):
            error = math.ldexp(math.sqrt(drift.error_sq / drift.count), drift.exponent) if drift.count else 0.0
            golden_checks += _check_decisions(output, rows, error, _rows_of_sample(drift))
        elif rows.classes > 1:
            note = "not judged: most rows name no class clearly; golden.metric accuracy says that they are classes"
            changed_share = 1 - rows.argmax_agreement
            golden_checks.append(Check("quantization", CHANGED, output, "golden", changed_share, None, True, note))
    return golden_checks


def decides(drift: Drift) -> bool:
    """Whether the golden cases show that an output is a classifier's: most of its rows have a clear greatest value.

    If a sample has several rows (tokens) of three classes or more, over half of the classes must occur: in boxes, and
    in features with a few large columns, few do. Single values, and two values per token, must be on two sides of a
    gap.
    """
    rows = drift.rows
    if rows is None or drift.mismatches is not None or drift.slices is None:
        return False
    is_single = _rows_of_sample(drift) == 1
    if rows.classes < 2 or (rows.classes == 2 and not is_single):
        class_counts = rows.looked_at.items()
        unclear_counts = Counter(rows.looked_at) - Counter(rows.clear)
        unclear_count, count = unclear_counts.total(), sum(rows.looked_at.values())
        is_clear = len(class_counts) > 1 and all(
            2 * rows.clear.get(label, 0) >= number for label, number in class_counts
        )
        return is_clear and upper(unclear_count, count, LEVEL) <= MOST_BETWEEN
    return rows.names_classes and (is_single or 2 * len(rows.named) > rows.classes)


def as_decided(drift: Drift) -> Drift:
    """The drift with decisions of elements as its rows, if it has these and the rows show no decisions."""
    return replace(drift, rows=drift.elements) if drift.elements and not decides(drift) else drift


def _rows_of_sample(drift: Drift) -> float:
    """The mean number of rows in a sample, 1 or more."""
    sample_count = drift.slices.samples if drift.slices else 0
    return max(1.0, drift.rows.count / sample_count) if sample_count and drift.rows else 1.0


def _check_decisions(output: str, rows: RowSums, error: float, together: float) -> Iterator[Check]:
    """Checks of changed decisions and lost classes. error: root mean square error of an element.  together: rows per
    sample, which count as one observation: a design effect (`rounding.Decisions`)."""
    yield classes_check(output, rows.named, rows.changed)
    least_share = lower(rows.flips / together, rows.count / together, LEVEL)
    note = f"{rows.flips} of {rows.count} decisions changed; the true share is at least this, with 99 % confidence"
    yield Check("quantization", CHANGED, output, "golden", least_share, MOST_CHANGED, least_share <= MOST_CHANGED, note)
    clear_count, allowance = sum(lead > CLEAR * error for lead in rows.ahead), float(math.ceil(together))
    note = f"changed decisions whose lead was more than {CLEAR:g} times the error"
    yield Check(
        "quantization", CLEAR_CHANGED, output, "golden", float(clear_count), allowance, clear_count <= allowance, note
    )
    if unseen_count := rows.classes - len(rows.named):
        note = f"classes that are the answer to no golden sample, of {rows.classes}"
        yield Check("quantization", UNSEEN_CLASSES, output, "golden", float(unseen_count), None, True, note)


def classes_check(
    output: str,
    class_counts: Mapping[int, int],
    change_counts: Mapping[int, int],
    case: str = "golden",
    subject: str = "their decisions",
) -> Check:
    """The check that no more classes lose over half of their rows than by chance. subject: the rows in the note."""
    names, chance_count = lost_classes(class_counts, change_counts)
    note = f"classes that keep less than half of {subject}: {join_first([*map(str, names)])}; " if names else ""
    note += f"of {len(class_counts)} classes, {chance_count} by chance"
    is_within = len(names) <= chance_count
    return Check("quantization", LOST_CLASSES, output, case, float(len(names)), float(chance_count), is_within, note)
