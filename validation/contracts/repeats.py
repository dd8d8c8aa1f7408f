"""Contracts over distributions of outputs, and over repeated runs and builds."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.codec import encode_document
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Dim, Session, Tensors, TensorSpec
from validation.comparison.sessions import case_checks, run
from validation.contracts.predicates import rows_of
from validation.contracts.terms import Bitwise, Rows
from validation.data.samples import resize
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import Budgets, within
from validation.metrics.drift import TOP_K, RowSums, is_exact, log_softmax, measure, measure_rows

# An output as a distribution: the engine's rows against the original model's.
#
# The promise is about the original model, because errors of quantization and of the engine add up. The note of each
# check has the graph's own value, which shows which of the two broke the promise. Beside divergences of rows
# (`metrics.drift`) these are measured:
#
# - ece    sum over bins of |share that is right - mean confidence| * share of rows, over 15 bins of equal width of the
#          greatest probability (Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian Binning", 2015;
#          Guo et al., "On Calibration of Modern Neural Networks", 2017, who use 15)
# - brier  mean over the rows of sum_i (p_i - [i is the answer])^2 (Brier, "Verification of Forecasts Expressed in Terms
#          of Probability", 1950); from 0 to 2

BINS = 15


class Forecasts:
    """Rows of probabilities (n, classes), with each row's greatest value (`confidence`) and its index (`decision`)."""

    def __init__(self, probabilities: Array) -> None:
        self.probabilities = probabilities
        self.confidence, self.decision = probabilities.max(axis=1), probabilities.argmax(axis=1)

    def losses(self, answers: Array) -> Array:
        """The Brier loss of each row. answers: (n,), the class of each row; a number that is no class matches none."""
        valid_mask = (answers >= 0) & (answers < self.probabilities.shape[1])
        label_columns = np.where(valid_mask, answers, 0).astype(np.int64)[:, None]
        answer_probabilities = np.take_along_axis(self.probabilities, label_columns, axis=1)[:, 0] * valid_mask
        return np.asarray(np.square(self.probabilities).sum(axis=1) - 2 * answer_probabilities + 1)


class CalibrationSums:
    """Running sums over rows. bins: number of rows, number of right rows, and sum of confidence, by confidence bin."""

    def __init__(self) -> None:
        self.bins = np.zeros((3, BINS))
        self.loss, self.broken = 0.0, 0

    def add(self, forecasts: Forecasts, answers: Array) -> None:
        """Add rows. answers: (n,), the right class of each row. A row with NaN makes both results NaN."""
        confidence = forecasts.confidence
        finite_mask = np.isfinite(confidence)
        self.broken += int((~finite_mask).sum())
        bins = np.minimum((confidence[finite_mask] * BINS).astype(np.int64), BINS - 1)
        is_right = (forecasts.decision == answers)[finite_mask].astype(np.float64)
        for index, weights in enumerate((np.ones(len(bins)), is_right, confidence[finite_mask])):
            self.bins[index] += np.bincount(bins, weights, BINS)
        self.loss += float(forecasts.losses(answers)[finite_mask].sum())

    @property
    def ece(self) -> float:
        """The expected calibration error; NaN if a row had NaN, 0 without rows."""
        rows, right_counts, confidence = self.bins
        return self._mean(float(np.abs(right_counts - confidence).sum()), float(rows.sum()))

    @property
    def brier(self) -> float:
        """The mean Brier score; NaN if a row had NaN, 0 without rows."""
        return self._mean(self.loss, float(self.bins[0].sum()))

    def _mean(self, total: float, count: float) -> float:
        return float("nan") if self.broken else total / count if count else 0.0


# A logit of -inf counts as this many nats below its row's greatest: e^-200 is far below float32's smallest number.
IMPOSSIBLE = 200.0
# The smallest positive float16: probabilities below it count as this one.
LEAST = 2.0**-24


class Likeness:
    """One output over the cases of a golden set. limits: on its rows.  labels: true classes of the golden rows."""

    def __init__(self, output: str, limits: Rows, labels: Array | None) -> None:
        self.output, self.limits = output, limits
        self.sides = {"engine": _Side(), "graph": _Side()}
        self.labels = None if labels is None else labels.reshape(-1)
        self.calibration = CalibrationSums(), CalibrationSums()
        self.rows = 0
        self.failure: Check | None = None

    def see(self, case: Case, graph: Tensors, engine: Tensors) -> None:
        """Add the outputs of the graph and of the engine in a case."""
        if self.failure is not None:
            return
        if fault_text := self._unfit(case, graph, engine):
            self.failure = Check("engine", "contract output", self.output, case.name, None, None, False, fault_text)
            return
        original_logits, *logit_pair = (
            as_logits(side[self.output], self.limits.values) for side in (case.expected, engine, graph)
        )
        forecasts = [Forecasts(np.exp(log_softmax(logits))) for logits in (original_logits, *logit_pair)]
        answers = forecasts[0].decision
        for side, logits in zip(self.sides.values(), logit_pair, strict=True):
            side.see(case, original_logits, logits)
        if case.kind != "golden":
            return
        start, self.rows = self.rows, self.rows + len(answers)
        labels = self.labels[start : self.rows] if self.labels is not None and self.rows <= self.labels.size else None
        calibration_sums = self.calibration, *(side.calibration for side in self.sides.values())
        for (decision_sums, label_sums), forecast in zip(calibration_sums, forecasts, strict=True):
            decision_sums.add(forecast, answers)
            if labels is not None:
                label_sums.add(forecast, labels)

    def checks(self) -> Iterator[Check]:
        """A check for each limit that is set; a single failed check if a case had no comparable distribution."""
        if self.failure is not None:
            yield self.failure
            return
        has_labels = self.labels is not None and self.rows == self.labels.size
        engine, graph = ({**side.values(), **self._calibration(side, has_labels)} for side in self.sides.values())
        for name, (value, case, figure_text) in engine.items():
            limit: float | None = getattr(self.limits, name)
            if limit is None:
                continue
            base = graph[name][0]
            remarks = (figure_text, f"the graph alone has {base:.3g}", "" if base <= limit else "so it is the graph's")
            note = ", ".join(remark for remark in remarks if remark)
            yield Check("engine", f"contract {name}", self.output, case, value, limit, value <= limit, note)

    def _unfit(self, case: Case, graph: Tensors, engine: Tensors) -> str:
        """The reason why the output has no comparable distributions; '' if it has."""
        outputs = [tensors.get(self.output) for tensors in (case.expected, graph, engine)]
        arrays = [array for array in outputs if array is not None]
        if len(arrays) < len(outputs):
            return "there is no such output"
        if len({array.shape for array in arrays}) > 1:
            return f"the original has the shape {arrays[0].shape}, the engine {arrays[2].shape}"
        if any(map(is_exact, arrays)):
            return "integers are decisions and have no distribution; use structured.sequence or agreement"
        if arrays[0].ndim == 0 or arrays[0].shape[-1] < 2:
            return f"the last axis of {arrays[0].shape} holds no distribution: it takes two entries or more"
        return ""

    def _calibration(self, side: "_Side", against_labels: bool) -> dict[str, tuple[float, str, str]]:
        """Differences of a side's ece and brier from the original's; with labels only a worse value counts."""
        base_sums, engine_sums = self.calibration[against_labels], side.calibration[against_labels]
        source = "labels" if against_labels else "the original's decisions"
        calibration = {}
        for name in ("ece", "brier"):
            base, value = getattr(base_sums, name), getattr(engine_sums, name)
            change = value - base if not against_labels or math.isnan(value - base) else max(0.0, value - base)
            calibration[name] = (abs(change), "golden", f"{value:.4f} against {base:.4f} by {source}")
        return calibration


class _Side:
    """The rows of the engine or of the graph, against the original's. calibration: by its decisions, and by labels."""

    def __init__(self) -> None:
        self.rows = RowSums()
        self.worst: tuple[float, str, str] = (0.0, "golden", "")
        self.calibration = CalibrationSums(), CalibrationSums()

    def see(self, case: Case, original: Array, logits: Array) -> None:
        """Add the logits (rows, classes) of a case."""
        k = min(TOP_K, logits.shape[1] - 1)  # with all classes, the sets would always be equal
        row_statistics = measure_rows(original, logits, k)
        js = row_statistics.js_max if row_statistics.finite == row_statistics.count else math.nan
        if not js <= self.worst[0] and not math.isnan(self.worst[0]):
            note = f"row {row_statistics.worst[0]}" if row_statistics.worst else "a row is not finite"
            self.worst = js, case.name, note
        if case.kind == "golden":
            self.rows = self.rows.merge(row_statistics)

    def values(self) -> Mapping[str, tuple[float, str, str]]:
        """(value, case, note) by the name of the limit."""
        rows = self.rows
        return {
            "kl": (rows.kl, "golden", f"mean of {rows.count} rows"),
            "js": self.worst,
            "flips": (rows.flips / max(rows.count, 1), "golden", f"{rows.flips} of {rows.count} rows"),
            "top_k": (round(1 - rows.top_k_agreement, 12), "golden", f"of the {rows.k} likeliest"),
        }


def as_logits(array: Array, values: str) -> Array:
    """The rows of an output (..., classes) as float64 logits (n, classes), whose softmax is the distribution.

    values: 'logits' or 'probabilities'; a negative probability becomes NaN.
    """
    rows = rows_of(np.asarray(array, np.float64))
    if values == "probabilities":
        with np.errstate(invalid="ignore"):
            return np.where(rows >= 0, np.log(np.maximum(rows, LEAST)), np.nan)
    mask = np.isneginf(rows)
    if not mask.any():
        return rows
    row_max = np.where(mask, -np.inf, rows).max(axis=1, keepdims=True)
    return np.where(mask & np.isfinite(row_max), row_max - IMPOSSIBLE, rows)


# Whether an engine's outputs repeat bit for bit, and whether another build results in the same engine.
#
# Equal inputs in equal batches must have equal bits. The same sample at another position of a batch, or in a larger
# batch, must keep the drift budget unless a spec requires bits: sums in another order have other last bits (Higham,
# "Accuracy and Stability of Numerical Algorithms", 2002, chapter 4), and kernels are chosen by batch size.
#
# Rebuilt engines need not have equal bytes, because compilers choose kernels by measuring, and write times and paths;
# the outputs of each rebuild must stay within the limits of drift of the first build.

# The most golden cases, and edge cases, that are repeated: each costs some runs and uses the same kernels.
MOST_CASES = 4


def repeat_checks(
    bitwise: Bitwise, session: Session, golden: GoldenSet, batch: Dim | None, budgets: Budgets
) -> Iterator[Check]:
    """Checks of each output: equal digests over runs, then batch size and position. batch: the inputs' leading dim."""
    cases = [case for kind in ("golden", "edge") for case in islice(golden.of_kind(kind), MOST_CASES)]
    case_digests: dict[str, list[tuple[str, int, str]]] = {}
    for case in cases:
        runs = (run(session, case.inputs) for _ in range(bitwise.runs))
        run_digests = [{name: digest(array) for name, array in outputs.items()} for outputs in runs]
        for output, text in run_digests[0].items():
            case_digests.setdefault(output, []).append((case.name, len({row[output] for row in run_digests}), text))
    for output, digests in case_digests.items():
        name, count, text = max(digests, key=lambda entry: entry[1])
        note = (
            f"{bitwise.runs} runs of {len(digests)} cases; {text}" if count == 1 else f"answers of {bitwise.runs} runs"
        )
        yield Check("engine", "contract bitwise", output, name, float(count), 1.0, count == 1, note)
    yield from _in_batches(bitwise, session, cases[0].inputs, batch, budgets)


def digest(array: Array) -> str:
    """Digest of an output: its dtype, shape and bytes."""
    prefix = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(prefix + np.ascontiguousarray(array).tobytes()).hexdigest()


def _in_batches(
    bitwise: Bitwise, session: Session, inputs: Tensors, batch: Dim | None, budgets: Budgets
) -> Iterator[Check]:
    """Checks of one sample in a batch of the least size, and at places of batches of `opt` and `max`."""
    if batch is None or batch.max < 2 or batch.static:
        if bitwise.position or bitwise.size:
            note = "the inputs have no dynamic dim in front that they share; leave position and size out"
            yield Check("engine", "contract batch", "", "golden", None, None, False, note)
        return
    single_answers = _answers(session, inputs, batch.min, 0, batch)
    sizes = sorted({size for size in (batch.opt, batch.max) if size > max(batch.min, 1)})
    first_answers = {f"first of {size}": _answers(session, inputs, size, 0, batch) for size in sizes}
    for output, expected in single_answers.items():
        yield _worst("contract batch size", output, expected, first_answers, bitwise.size, budgets)
    size = sizes[-1]
    answers = {f"{row + 1} of {size}": _answers(session, inputs, size, row, batch) for row in (size // 2, size - 1)}
    for output, expected in first_answers[f"first of {size}"].items():
        yield _worst("contract batch position", output, expected, answers, bitwise.position, budgets)


def _answers(session: Session, inputs: Tensors, size: int, place: int, batch: Dim) -> dict[str, Array]:
    """The outputs with a batch axis 0, for the first sample of `inputs` at index `place` of a batch of `size`."""
    specs = [spec for spec in session.inputs if spec.name in inputs]
    batch_specs = [TensorSpec(spec.name, spec.dtype, (batch.name, *spec.shape[1:])) for spec in specs]
    batch_inputs = resize(inputs, batch_specs, {batch.name: size})
    outputs = run(session, {name: np.roll(array, place, axis=0) for name, array in batch_inputs.items()})
    return {name: array[place] for name, array in outputs.items() if array.ndim and len(array) == size}


def _worst(
    name: str, output: str, expected: Array, place_answers: Mapping[str, dict[str, Array]], bits: bool, budgets: Budgets
) -> Check:
    """The check of the place whose output is furthest from `expected`. place_answers: outputs by place and name."""
    values = {label: answers[output] for label, answers in place_answers.items() if output in answers}
    if not values:
        return Check("engine", name, output, "golden", None, None, not bits, "this output has no batch in front")
    if bits:
        counts = {label: float(np.sum(_bits(expected) != _bits(value))) for label, value in values.items()}
        label = max(counts, key=lambda place: counts[place])
        return Check("engine", name, output, label, counts[label], 0.0, counts[label] == 0, "elements with other bits")
    budget, limit = budgets.of(output, "golden", expected.size), None
    drifts = {label: measure(expected, value) for label, value in values.items()}
    if is_exact(expected):
        metric, limit = "agreement", budget.agreement
        scores = {label: drift.agreement for label, drift in drifts.items()}
    else:
        metric, limit = "sqnr_db", budget.sqnr_db
        scores = {label: -np.inf if drift.nonfinite else drift.sqnr_db for label, drift in drifts.items()}
    label = min(scores, key=lambda place: scores[place])
    is_bitwise = all(np.array_equal(_bits(expected), _bits(value)) for value in values.values())
    note = f"{metric}; {'the same bits' if is_bitwise else 'other bits'}"
    is_within = limit is None or within(metric, scores[label], limit)
    return Check("engine", name, output, label, float(scores[label]), limit, is_within, note)


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


@dataclass(frozen=True)
class EngineRebuild:
    """One build: the digest of its engine, and its outputs as the expected ones of a golden set."""

    engine: str
    answers: GoldenSet


@dataclass(frozen=True)
class OutputSpread:
    """The differences of one output between builds. distinct: the number of different outputs, all cases together.

    sqnr_db, max_abs: the least SQNR in decibels and the greatest absolute difference; None if no value is finite.
    bit_equal: whether all bits were the same.
    """

    distinct: int
    bit_equal: bool
    sqnr_db: float | None
    max_abs: float | None


@dataclass(frozen=True)
class Reproducibility:
    """The agreement of several builds of one engine. engines: the number of builds by digest.

    passed: whether the outputs of each build are within the limits of drift of the first build's.
    byte_equal: whether the engines' files were the same.
    """

    times: int
    byte_equal: bool
    engines: Mapping[str, int]
    outputs: Mapping[str, OutputSpread]
    passed: bool
    failed: tuple[Check, ...]

    def to_json(self) -> dict[str, object]:
        """The fields that `enginesmith debug reproduce --json` prints."""
        return encode_document(self)


def reproducibility(rebuilds: Sequence[EngineRebuild], budgets: Budgets) -> Reproducibility:
    """Compare the first build with the others, case by case."""
    engines = [rebuild.engine for rebuild in rebuilds]
    distinct_digests: dict[str, set[str]] = {}
    for rebuild in rebuilds:
        differences: dict[str, list[str]] = {}
        for case in rebuild.answers.cases:
            for output, array in case.expected.items():
                differences.setdefault(output, []).append(digest(array))
        for output, digests in differences.items():
            distinct_digests.setdefault(output, set()).add(" ".join(digests))
    checks = [check for other in rebuilds[1:] for check in _against(rebuilds[0].answers, other.answers, budgets)]
    failures = [check for check in checks if not check.passed]
    outputs = {
        output: OutputSpread(
            distinct=len(output_digests),
            bit_equal=len(output_digests) == 1,
            sqnr_db=min(_finite(checks, output, "sqnr_db"), default=None),
            max_abs=max(_finite(checks, output, "max_abs"), default=None),
        )
        for output, output_digests in distinct_digests.items()
    }
    counts = {name: engines.count(name) for name in dict.fromkeys(engines)}
    return Reproducibility(len(rebuilds), len(set(engines)) == 1, counts, outputs, not failures, tuple(failures))


def _against(reference: GoldenSet, candidate: GoldenSet, budgets: Budgets) -> list[Check]:
    checks: list[Check] = []
    for case, other_case in zip(reference.cases, candidate.cases, strict=True):
        for output, expected in case.expected.items():
            budget = budgets.of(output, case.kind, expected.size)
            try:
                checks += case_checks("engine", case.name, output, expected, other_case.expected[output], budget)
            except (KeyError, ValueError) as error:
                checks.append(Check("engine", "outputs", output, case.name, None, None, False, str(error)))
    return checks


def _finite(checks: Sequence[Check], output: str, name: str) -> list[float]:
    values = [check.value for check in checks if (check.output, check.name) == (output, name)]
    return [float(value) for value in values if value is not None and math.isfinite(value)]
