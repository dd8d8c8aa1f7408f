"""The same bits again: of the same inputs, and of the same sample elsewhere in a batch or in a larger one.

Sums in another order give other last bits (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 4),
and kernels are chosen by batch size; so position and size are held to the drift budget unless a spec asks for bits.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.reports.proof import Check
from enginery.core.types import Dim, Session, Tensors
from validation.comparison.sessions import run
from validation.data.samples import resize
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import Budget, Budgets, within
from validation.metrics.drift import is_exact, measure

# Of the golden set; each costs some runs, and shows the same kernels.
MOST_CASES = 4


@dataclass(frozen=True)
class BitwiseRepeats:
    """runs: of each case, whose outputs must be equal in every bit.

    position, size: whether a sample's outputs must be, too, wherever it lies in a batch, and however large that is.
    """

    runs: int = 3
    position: bool = False
    size: bool = False


def repeat_checks(
    wanted: BitwiseRepeats, session: Session, golden: GoldenSet, batch: Dim | None, budgets: Budgets
) -> Iterator[Check]:
    """Checks per output: digests over runs, then batch size and position. batch: the dim in front."""
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
    """One sample alone, then first and last in batches of `opt` and `max`."""
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
    """What the first golden sample gets at a place in a batch of a size: outputs that have the batch in front."""
    specs = [spec for spec in session.inputs if spec.name in inputs]
    named = [type(spec)(spec.name, spec.dtype, (batch.name, *spec.shape[1:])) for spec in specs]
    filled = resize(inputs, named, {batch.name: size})
    moved = {name: np.roll(array, place, axis=0) for name, array in filled.items()}
    outputs = run(session, moved)
    return {name: array[place] for name, array in outputs.items() if array.ndim and len(array) == size}


def _worst(
    name: str, output: str, expected: Array, found: Mapping[str, dict[str, Array]], bits: bool, budgets: Budgets
) -> Check:
    values = {place: answers[output] for place, answers in found.items() if output in answers}
    if not values:
        return Check("engine", name, output, "golden", None, None, not bits, "this output has no batch in front")
    if bits:
        differ = {place: float(np.sum(_bits(expected) != _bits(value))) for place, value in values.items()}
        place = max(differ, key=lambda item: differ[item])
        return Check("engine", name, output, place, differ[place], 0.0, differ[place] == 0, "elements with other bits")
    return _within(name, output, expected, values, budgets.of(output, "golden", expected.size))


def _within(name: str, output: str, expected: Array, values: Mapping[str, Array], budget: Budget) -> Check:
    drifts = {place: measure(expected, value) for place, value in values.items()}
    limit: float | None
    if is_exact(expected):
        metric, limit = "agreement", 1.0 if budget.argmax_agreement is None else budget.argmax_agreement
        figures = {place: drift.argmax_agreement for place, drift in drifts.items()}
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
