"""Rounding of activations and weights to int8; a weight's so that the errors of its rows cancel at the output.

GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023), which
goes back to Optimal Brain Surgeon: input channels are rounded one after the other, and the later ones make up for what
one rounding loses, as far as the activations are correlated (`moments`). It is written here as Chee et al. ("QuIP:
2-Bit Quantization of Large Language Models With Guarantees", 2023) show it to be: feedback through the triangular
factor of the moments, so that one Cholesky decomposition is enough and nothing is inverted.

Matrices are float32 [..., in, out] and moments float32 [..., in, in]: a grouped convolution is one matrix per group.
"""

import numpy as np
from numpy.typing import NDArray

from pipeline.quantization.settings.groups import Floats

Real = NDArray[np.floating]

DAMPING = 0.01
BLOCK = 64
LEVELS = 127  # the last one of int8, where a scheme does not ask for fewer
# Wider matrices are decomposed in float32, which halves time and memory; damping keeps that well conditioned.
WIDEST_IN_DOUBLE = 1024
# Columns that are decomposed at a time.
DECOMPOSED = 512


def rounded_activation(values: Floats, low: float, high: float, activation: str) -> Floats:
    """The values as int8 (symmetric) or uint8 (asymmetric) holds them in the range [low, high]; dequantized."""
    if activation == "int8":
        step = max(-low, high, 1e-30) / 127
        return np.asarray(np.clip(np.rint(values / step), -128, 127) * step, np.float32)
    low, high = min(low, 0.0), max(high, 0.0)
    step = max(high - low, 1e-30) / 255
    zero = round(-low / step)
    return np.asarray((np.clip(np.rint(values / step) + zero, 0, 255) - zero) * step, np.float32)


def steps_of(matrix: Floats, levels: int = LEVELS) -> Floats:
    """Step of each output channel, [..., out]: its largest magnitude is the last of `levels`."""
    reach = np.abs(matrix).max(axis=-2)
    return np.asarray(np.where(reach > 0, reach, 1) / levels, np.float32)


def nearest(matrix: Floats, levels: int = LEVELS) -> Floats:
    """Every value rounded to the nearest level of its output channel."""
    steps = steps_of(matrix, levels)[..., None, :]
    return np.asarray(np.clip(np.rint(matrix / steps), -levels, levels) * steps, np.float32)


def compensate(matrix: Floats, moments: Floats, levels: int = LEVELS) -> Floats:
    """The matrix rounded by GPTQ, for activations whose mean of x x' is `moments`. levels: the last one.

    Moments of more values than `WIDEST_IN_DOUBLE` are of no use afterwards: they are decomposed where they lie.

    Each output channel keeps a value at its last level, so that quantizing the result finds the same steps. Falls back
    to `nearest` when the moments are degenerate.
    """
    rows = matrix.reshape(-1, *matrix.shape[-2:])
    wide = rows.shape[1] > WIDEST_IN_DOUBLE
    kind = np.float32 if wide else np.float64
    turned: Real = np.array(moments.reshape(-1, *moments.shape[-2:]), kind, copy=None if wide else True)
    # Feedback runs upwards: the input channel with the largest second moment is the last row, and is rounded first.
    order = np.argsort(-np.diagonal(turned, axis1=1, axis2=2), axis=1, kind="stable")[:, ::-1]
    for part, at in zip(turned, order, strict=True):
        _reorder(part, at)
    factor = _factor(turned)
    if factor is None:
        return nearest(matrix, levels)
    sorted_rows: Real = np.take_along_axis(rows, order[..., None], 1).astype(kind)
    rounded = np.empty_like(rows)
    found = _round_rows(sorted_rows, factor, steps_of(rows, levels)[:, None].astype(kind), levels)
    np.put_along_axis(rounded, order[..., None], found.astype(np.float32), 1)
    return _with_last_level(rounded, rows, levels).reshape(matrix.shape)


def _factor(moments: Real) -> Real | None:
    """In place: L, unit lower triangular, with L D L' the damped moments; what lies above it means nothing. None where
    they are not positive definite."""
    size = moments.shape[-1]
    power = np.trace(moments, axis1=1, axis2=2) / size
    if not (power > 0).any():
        return None
    # How a group is rounded whose activations are always zero does not matter.
    damping = np.where(power > 0, DAMPING * power, 1)
    moments[:, np.arange(size), np.arange(size)] += damping[:, None]
    try:
        for part in moments:
            _decompose(part)
    except np.linalg.LinAlgError:
        return None
    moments /= np.diagonal(moments, axis1=1, axis2=2)[:, None].copy()
    return moments


def _reorder(matrix: Real, order: NDArray[np.intp]) -> None:
    """In place, without a second matrix: rows and columns of a square one in this order."""
    for start in range(0, len(matrix), BLOCK):
        columns = matrix[:, start : start + BLOCK]
        columns[:] = columns[order]
    for start in range(0, len(matrix), BLOCK):
        rows = matrix[start : start + BLOCK]
        rows[:] = rows[:, order]


def _decompose(matrix: Real) -> None:
    """In place, without a second matrix: the lower triangle becomes the Cholesky factor; the upper is left as it is."""
    for start in range(0, len(matrix), DECOMPOSED):
        stop = start + DECOMPOSED
        corner = np.linalg.cholesky(matrix[start:stop, start:stop])
        matrix[start:stop, start:stop] = corner
        if stop < len(matrix):
            below = matrix[stop:, start:stop] @ np.linalg.inv(corner).T
            matrix[stop:, start:stop] = below
            for at in range(0, len(below), DECOMPOSED):  # of the rest, the lower triangle
                part = below[at : at + DECOMPOSED]
                matrix[stop + at : stop + at + len(part), stop : stop + at + len(part)] -= (
                    part @ below[: at + len(part)].T
                )


def _round_rows(rows: Real, factor: Real, steps: Real, levels: int) -> Real:
    """The rows rounded from the last to the first, each with the errors of those behind it made up for."""
    rounded, errors = np.empty_like(rows), np.zeros_like(rows)
    for stop in range(rows.shape[1], 0, -BLOCK):
        start = max(0, stop - BLOCK)
        wanted = rows[:, start:stop] - factor[:, stop:, start:stop].swapaxes(1, 2) @ errors[:, stop:]
        for i in range(stop - 1, start - 1, -1):
            behind = factor[:, i + 1 : stop, i : i + 1].swapaxes(1, 2) @ errors[:, i + 1 : stop]
            aim = wanted[:, i - start : i - start + 1] - behind
            rounded[:, i : i + 1] = np.clip(np.rint(aim / steps), -levels, levels) * steps
            errors[:, i] = rounded[:, i] - rows[:, i]
    return rounded


def _with_last_level(rounded: Floats, matrix: Floats, levels: int) -> Floats:
    """In place: a channel without a value at its last level gets its largest value back unrounded."""
    top = np.argmax(np.abs(matrix), axis=1)[:, None]
    lost = np.abs(rounded).max(axis=1, keepdims=True) < (levels - 0.5) * steps_of(matrix, levels)[:, None]
    kept = np.where(lost, np.take_along_axis(matrix, top, 1), np.take_along_axis(rounded, top, 1))
    np.put_along_axis(rounded, top, kept, 1)
    return rounded
