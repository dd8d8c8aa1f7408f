"""A model with state as a session of whole sequences, which carries its own states from step to step.

Golden cases show each step with the states of the reference; what errors grow to when they are handed on, only a run
of many steps shows. As one call takes a whole sequence, such runs are compared as all others are, and the limits of
honest rounding are measured in the same way: with states that the rounded graph has handed on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginery.arrays import Array
from enginery.core.errors import DataError
from enginery.core.state import State, without_states
from enginery.core.types import Session, Tensors, TensorSpec
from enginery.streams import Streams
from validation.golden.golden_set import GoldenSequences

# The axis of steps, before all others.
STEP = "step"


@dataclass(frozen=True)
class Roller:
    """Runs a model through a sequence from its beginning.

    inputs: of the model.  ends: as in `Streams`.  steps: names of the inputs that each step gives; the others are the
    same in all of them.
    """

    inputs: tuple[TensorSpec, ...]
    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    steps: tuple[str, ...]

    def roll(self, run: Callable[[Tensors], Tensors], inputs: Tensors) -> dict[str, Array]:
        """The outputs of all steps, each stacked along a new axis 0, as the steps of `inputs` are; of one that is a
        state, beside others that are none, what the last step left, since it holds all steps or what became of them.
        run: the model.

        Raises DataError for inputs without a step, and what the model raises.
        """
        count = min((len(inputs[name]) for name in self.steps), default=0)
        if not count:
            raise DataError("a sequence without steps; give at least one")
        same = {name: array for name, array in inputs.items() if name not in self.steps}
        streams = Streams(run, self.inputs, self.states, self.ends)
        found: dict[str, list[Array]] = {}
        for at in range(count):
            answer = streams.run({**same, **{name: inputs[name][at] for name in self.steps}})
            left = {state.output for state in self.states} if len(answer) > len(self.states) else set()
            for name, array in answer.items():
                kept = found.setdefault(name, [])
                if name in left:
                    kept.clear()
                kept.append(array)
        return {name: stack_steps(arrays) for name, arrays in found.items()}


class FreeRunningSession(Session):
    """A session whose calls take all steps of a sequence, as the cases of `GoldenSequences` are; outputs as in
    `Roller`."""

    def __init__(self, session: Session, sequences: GoldenSequences) -> None:
        states, steps = sequences.states, tuple(next(iter(sequences.golden.cases)).inputs)
        self._halves = {spec.name for spec in session.inputs if spec.dtype == "float16"}
        self._session, self.outputs = session, [_stacked(spec) for spec in session.outputs]
        given = without_states(session.inputs, states)
        self.inputs: Sequence[TensorSpec] = [_stacked(spec) if spec.name in steps else spec for spec in given]
        self.roller = Roller(tuple(session.inputs), states, sequences.ends, steps)

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of all steps. Raises as `Roller.roll`."""
        return self.roller.roll(self._step, inputs)

    def _step(self, inputs: Tensors) -> Tensors:
        """One step; a graph that emulates float16 gives such states in float32, and takes them in float16."""
        narrowed = {name: inputs[name].astype(np.float16, copy=False) for name in self._halves & inputs.keys()}
        return self._session.run({**inputs, **narrowed})


def stack_steps(answers: Sequence[Array]) -> Array:
    """What each step gave, along a new axis 0. Where the steps have several sizes, as weights over a cache that grows,
    all are brought to the largest by their last element, which changes no argmax."""
    arrays = [np.asarray(answer) for answer in answers]
    most = np.max([array.shape for array in arrays], axis=0).astype(int)
    widths = [[(0, most - size) for most, size in zip(most, array.shape, strict=True)] for array in arrays]
    if not any(more for width in widths for _, more in width):
        return np.stack(arrays)
    pairs = zip(arrays, widths, strict=True)
    return np.stack([np.pad(array, width, mode="edge" if array.size else "constant") for array, width in pairs])


def _stacked(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(STEP, *spec.shape))
