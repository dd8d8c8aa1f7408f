"""Whether an engine gives the same bits again, and whether building it again gives the same engine.

Equal inputs in equal batches must have equal bits. The same sample at another place of a batch, or in a larger one, is
held to the drift budget unless a spec asks for bits: sums in another order give other last bits (Higham, "Accuracy and
Stability of Numerical Algorithms", 2002, chapter 4), and kernels are chosen by batch size.

Rebuilt engines need not have equal bytes, because compilers choose kernels by measuring and write times and paths; the
outputs of all rebuilds must stay within the limits of drift of each other.
"""

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
from validation.data.samples import resize
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budgets, within
from validation.metrics.drift import is_exact, measure

# Golden cases, and edge cases, that are repeated: each costs some runs and shows the same kernels.
MOST_CASES = 4


@dataclass(frozen=True)
class BitwiseRepeats:
    """Which outputs must be equal in every bit. runs: those of so many runs of a case.

    position, size: whether those of a sample must be, wherever it lies in a batch, and whatever the batch's size.
    """

    runs: int = 3
    position: bool = False
    size: bool = False


def repeat_checks(
    wanted: BitwiseRepeats, session: Session, golden: GoldenSet, batch: Dim | None, budgets: Budgets
) -> Iterator[Check]:
    """Checks of each output: equal digests over runs, then batch size and position. batch: the inputs' dim in front."""
    cases = [case for kind in ("golden", "edge") for case in islice(golden.of_kind(kind), MOST_CASES)]
    seen: dict[str, list[tuple[str, int, str]]] = {}
    for case in cases:
        found = [{name: digest(array) for name, array in run(session, case.inputs).items()} for _ in range(wanted.runs)]
        for output, first in found[0].items():
            seen.setdefault(output, []).append((case.name, len({item[output] for item in found}), first))
    for output, items in seen.items():
        name, count, first = max(items, key=lambda item: item[1])
        note = f"{wanted.runs} runs of {len(items)} cases; {first}" if count == 1 else f"answers of {wanted.runs} runs"
        yield Check("engine", "contract bitwise", output, name, float(count), 1.0, count == 1, note)
    yield from _in_batches(wanted, session, cases[0].inputs, batch, budgets)


def digest(array: Array) -> str:
    """Digest of an output: its dtype, shape and bytes."""
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def _in_batches(
    wanted: BitwiseRepeats, session: Session, inputs: Tensors, batch: Dim | None, budgets: Budgets
) -> Iterator[Check]:
    """Checks of one sample in a batch of the least size, and at places of batches of `opt` and `max`."""
    if batch is None or batch.max < 2 or batch.static:
        if wanted.position or wanted.size:
            note = "the inputs have no dynamic dim in front that they share; leave position and size out"
            yield Check("engine", "contract batch", "", "golden", None, None, False, note)
        return
    alone = _answers(session, inputs, batch.min, 0, batch)
    sizes = sorted({size for size in (batch.opt, batch.max) if size > max(batch.min, 1)})
    first = {f"first of {size}": _answers(session, inputs, size, 0, batch) for size in sizes}
    for output, expected in alone.items():
        yield _worst("contract batch size", output, expected, first, wanted.size, budgets)
    size = sizes[-1]
    last = {f"{place + 1} of {size}": _answers(session, inputs, size, place, batch) for place in (size // 2, size - 1)}
    for output, expected in first[f"first of {size}"].items():
        yield _worst("contract batch position", output, expected, last, wanted.position, budgets)


def _answers(session: Session, inputs: Tensors, size: int, place: int, batch: Dim) -> dict[str, Array]:
    """The outputs of the first sample of `inputs` at `place` in a batch of `size`; those with the batch in front."""
    specs = [spec for spec in session.inputs if spec.name in inputs]
    named = [TensorSpec(spec.name, spec.dtype, (batch.name, *spec.shape[1:])) for spec in specs]
    filled = resize(inputs, named, {batch.name: size})
    outputs = run(session, {name: np.roll(array, place, axis=0) for name, array in filled.items()})
    return {name: array[place] for name, array in outputs.items() if array.ndim and len(array) == size}


def _worst(
    name: str, output: str, expected: Array, found: Mapping[str, dict[str, Array]], bits: bool, budgets: Budgets
) -> Check:
    """The check of the place whose output is furthest from `expected`. found: outputs by place and name."""
    values = {place: answers[output] for place, answers in found.items() if output in answers}
    if not values:
        return Check("engine", name, output, "golden", None, None, not bits, "this output has no batch in front")
    if bits:
        differ = {place: float(np.sum(_bits(expected) != _bits(value))) for place, value in values.items()}
        place = max(differ, key=lambda item: differ[item])
        return Check("engine", name, output, place, differ[place], 0.0, differ[place] == 0, "elements with other bits")
    budget, limit = budgets.of(output, "golden", expected.size), None
    drifts = {place: measure(expected, value) for place, value in values.items()}
    if is_exact(expected):
        metric, limit = "agreement", budget.agreement
        figures = {place: drift.agreement for place, drift in drifts.items()}
    else:
        metric, limit = "sqnr_db", budget.sqnr_db
        figures = {place: -np.inf if drift.nonfinite else drift.sqnr_db for place, drift in drifts.items()}
    place = min(figures, key=lambda item: figures[item])
    same = all(np.array_equal(_bits(expected), _bits(value)) for value in values.values())
    note = f"{metric}; {'the same bits' if same else 'other bits'}"
    passed = limit is None or within(metric, figures[place], limit)
    return Check("engine", name, output, place, float(figures[place]), limit, passed, note)


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


@dataclass(frozen=True)
class EngineRebuild:
    """One build: the digest of its engine, and its outputs as the expected ones of a golden set."""

    engine: str
    answers: GoldenSet


@dataclass(frozen=True)
class OutputSpread:
    """How one output differs between builds. distinct: the number of different outputs, all cases together.

    sqnr_db, max_abs: the least SQNR in decibels and the greatest absolute difference; None where none is finite.
    """

    distinct: int
    bit_equal: bool
    sqnr_db: float | None
    max_abs: float | None


@dataclass(frozen=True)
class Reproducibility:
    """How several builds of one engine agree. times: their number.  engines: the number of builds by digest.

    outputs: by name.  passed: whether the outputs stay within the limits of drift of each other.  failed: the failed
    checks.
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


def reproducibility(built: Sequence[EngineRebuild], budgets: Budgets) -> Reproducibility:
    """Compare the first build with the others, case by case."""
    engines = [item.engine for item in built]
    distinct: dict[str, set[str]] = {}
    for item in built:
        said: dict[str, list[str]] = {}
        for case in item.answers.cases:
            for output, array in case.expected.items():
                said.setdefault(output, []).append(digest(array))
        for output, digests in said.items():
            distinct.setdefault(output, set()).add(" ".join(digests))
    checks = [check for other in built[1:] for check in _against(built[0].answers, other.answers, budgets)]
    failed = [check for check in checks if not check.passed]
    outputs = {
        output: OutputSpread(
            distinct=len(found),
            bit_equal=len(found) == 1,
            sqnr_db=min(_finite(checks, output, "sqnr_db"), default=None),
            max_abs=max(_finite(checks, output, "max_abs"), default=None),
        )
        for output, found in distinct.items()
    }
    counts = {name: engines.count(name) for name in dict.fromkeys(engines)}
    return Reproducibility(len(built), len(set(engines)) == 1, counts, outputs, not failed, tuple(failed))


def _against(first: GoldenSet, other: GoldenSet, budgets: Budgets) -> list[Check]:
    checks: list[Check] = []
    for left, right in zip(first.cases, other.cases, strict=True):
        for output, expected in left.expected.items():
            budget = budgets.of(output, left.kind, expected.size)
            try:
                checks += case_checks("engine", left.name, output, expected, right.expected[output], budget)
            except (KeyError, ValueError) as error:
                checks.append(Check("engine", "outputs", output, left.name, None, None, False, str(error)))
    return checks


def _finite(checks: Sequence[Check], output: str, name: str) -> list[float]:
    values = [check.value for check in checks if (check.output, check.name) == (output, name)]
    return [float(value) for value in values if value is not None and math.isfinite(value)]
