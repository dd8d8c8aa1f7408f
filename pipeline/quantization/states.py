"""Scales of the states that engines take and give as int8."""

from collections.abc import Sequence

import numpy as np

from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import QuantizedState
from pipeline.quantization.ranges import Ranges

_LEVELS = 127


def scale_states(states: Sequence[State], ranges: Ranges | None) -> tuple[QuantizedState, ...]:
    """The states with scales, by the largest magnitude that calibration saw going in or out. Raises DataError for a
    state that was not measured, or was zero throughout."""
    return tuple(QuantizedState(state.input, state.output, _scale(state, ranges)) for state in states)


def _scale(state: State, ranges: Ranges | None) -> float:
    seen = [ranges.reach(name) or 0.0 for name in (state.input, state.output)] if ranges else [0.0]
    if not 0.0 < max(seen) < np.inf:
        raise DataError(
            f"state.{state.input}.dtype: calibration samples do not show how large {state.input!r} becomes; give "
            "sequences of several steps, or remove dtype"
        )
    return float(np.float32(max(seen) / _LEVELS))
