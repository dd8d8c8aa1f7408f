"""Measures drift along sequences: of whole ones that each side runs with its own states, and of single steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.free_running import FreeRunning, SequenceDrift
from validation.metrics.drift import is_exact
from validation.metrics.tally import Spreads

# Parts of the sequences that drift is given for.
PARTS = 8


@dataclass
class _Energies:
    """Energy of the signal and of the error by step, in float64, and how many rows each step has."""

    signal: Array = field(default_factory=lambda: np.zeros(0))
    error: Array = field(default_factory=lambda: np.zeros(0))
    rows: Array = field(default_factory=lambda: np.zeros(0))

    def add(self, steps: Array, expected: Array, actual: Array) -> None:
        """Add rows [n, ...] of steps [n]."""
        e = expected.reshape(len(steps), -1).astype(np.float64)
        off = actual.reshape(len(steps), -1).astype(np.float64) - e
        more = int(steps.max(initial=-1)) + 1 - len(self.signal)
        if more > 0:
            self.signal, self.error, self.rows = (
                np.pad(each, (0, more)) for each in (self.signal, self.error, self.rows)
            )
        np.add.at(self.rows, steps, 1)
        np.add.at(self.signal, steps, (e * e).sum(1))
        np.add.at(self.error, steps, (off * off).sum(1))

    def levels(self, width: int, count: int) -> tuple[float, ...]:
        """The SQNR in dB of each of `count` parts of `width` steps; NaN of those without any."""
        parts = [slice(at * width, (at + 1) * width) for at in range(count)]
        return tuple(
            _level(self.signal[part], self.error[part]) if self.rows[part].any() else math.nan for part in parts
        )


def _level(signal: Array, error: Array) -> float:
    whole, off = float(signal.sum()), float(error.sum())
    if math.isnan(off):
        return math.nan
    return math.inf if off == 0 else 10 * math.log10(whole / off) if whole > 0 else -math.inf


@dataclass
class _Output:
    free: _Energies = field(default_factory=_Energies)
    single: _Energies = field(default_factory=_Energies)
    sequences: list[SequenceDrift] = field(default_factory=list)
    decides: bool = True


class Along:
    """The drift of outputs along sequences while it is measured. Takes whole sequences, as `Spreads` takes cases."""

    def __init__(self) -> None:
        self._outputs: dict[str, _Output] = {}

    def add(self, output: str, case: str, golden: bool, pair: tuple[Array, Array], samples: int) -> None:
        """Add what a sequence gave, (expected, actual) along axis 0 of steps; a single entry is what a state was left
        as, or a sequence of one step, which have no course."""
        expected, actual = pair
        if not golden or samples < 2:
            return
        found = self._outputs.setdefault(output, _Output())
        found.decides &= is_exact(expected) or (expected.ndim > 2 and expected.shape[-1] > 1)
        steps, energies = np.arange(len(expected)), _Energies()
        for each in (energies, found.free):
            each.add(steps, expected, actual)
        level = _level(energies.signal, energies.error)
        found.sequences.append(SequenceDrift(case, len(steps), level, _first_other(expected, actual, found.decides)))

    def add_steps(self, output: str, steps: Sequence[int], pair: tuple[Array, Array]) -> None:
        """Add rows of single steps, given their places in their sequences; nothing where rows are no steps."""
        expected, actual = pair
        rows, rest = divmod(len(expected) if expected.ndim else 0, max(len(steps), 1))
        if rows and not rest:
            self._outputs.setdefault(output, _Output()).single.add(np.repeat(steps, rows), expected, actual)

    def at(self, stage: str) -> tuple[FreeRunning, ...]:
        """The drift of each output that sequences gave, for a stage; numbers of four digits."""
        return tuple(_summarize(stage, name, found) for name, found in self._outputs.items() if found.sequences)


class StepSpreads(Spreads):
    """`Spreads` of golden cases whose rows are steps, which `along` takes too. places: for each case, by name, the
    places of its rows in their sequences."""

    def __init__(self, along: Along, places: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._along, self._places = along, places

    def add(self, output: str, case: str, golden: bool, pair: tuple[Array, Array], samples: int) -> None:
        """See `Spreads`."""
        super().add(output, case, golden, pair, samples)
        if golden and case in self._places:
            self._along.add_steps(output, self._places[case], pair)


def _summarize(stage: str, name: str, found: _Output) -> FreeRunning:
    longest = max(item.steps for item in found.sequences)
    width = -(-longest // PARTS)
    count = -(-longest // width)
    free, single = (
        tuple(float(f"{level:.4g}") for level in energies.levels(width, count))
        for energies in (found.free, found.single)
    )
    starts = tuple(range(0, longest, width))
    return FreeRunning(stage, name, found.decides, tuple(found.sequences), starts, free, single)


def _first_other(expected: Array, actual: Array, decides: bool) -> int | None:
    """The first step with another decision."""
    if not decides:
        return None
    sides = (expected, actual) if is_exact(expected) else (expected.argmax(-1), actual.argmax(-1))
    other = (sides[0] != sides[1]).reshape(len(expected), -1).any(1)
    return int(other.argmax()) if other.any() else None
