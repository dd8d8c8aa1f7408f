"""Streams over several graphs with state: states are carried, and graphs that nothing new is given are not run."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from enginery.arrays import Array
from enginery.core.errors import DataError
from enginery.core.state import State, grown_axes
from enginery.core.types import Tensors, TensorSpec
from enginery.streams import Streams

# What each graph gave, by name.
Answers = dict[str, Tensors]


class EnsembleStreams(Streams):
    """`Streams` of an ensemble, whose inputs and states are called 'GRAPH.NAME'.

    An input that a step leaves out is what it was in the step before. A graph without state that takes nothing but such
    inputs is not run again: an encoder runs once for each sequence. The first step behind `reset` gives all inputs.

    step: runs the whole (`Ensemble.step`). The others are as in `Streams`.
    """

    def __init__(
        self,
        step: Callable[[Tensors, Collection[str], Answers], tuple[dict[str, Array], Answers]],
        inputs: Sequence[TensorSpec],
        states: Sequence[State],
        ends: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(lambda given: step(given, (), {})[0], inputs, states, ends)
        self._step, self._answers = step, Answers()
        self._before = dict[str, Array]()
        self._growing = {name for name, _ in grown_axes(self.inputs)}

    def run(self, inputs: Tensors) -> Tensors:
        """All outputs of the next step of every stream. Raises as `complete`, and what the graphs raise; then states
        and inputs are as before."""
        whole = self.complete(inputs)
        answer, answers = self._step(whole, self._before.keys() - inputs.keys(), self._answers)
        self.take(answer)
        self._answers = answers
        # Copies: a caller may write the next step into the same arrays.
        self._before |= {name: np.array(array) for name, array in inputs.items() if name not in self._growing}
        return answer

    def complete(self, inputs: Tensors) -> dict[str, Array]:
        """The inputs of the next step with the states, and with those of the step before that it leaves out. Raises
        DataError for one that no step gave since `reset`, for an unknown one, and as `Streams.complete`."""
        given = {**self._before, **inputs}
        known = [spec.name for spec in self.inputs]
        if wrong := sorted(given.keys() ^ set(known)):
            text = "is unknown" if wrong[0] in given else "is missing, and no step since reset() gave it"
            raise DataError(f"input {wrong[0]!r} {text}; the inputs of a step are {', '.join(known)}")
        self._check_alike(inputs)
        return super().complete(given)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """As `Streams.reset`; the next step gives all inputs."""
        super().reset(rows)
        self._before, self._answers = {}, {}

    def keep(self, rows: Sequence[int]) -> None:
        """As `Streams.keep`; graphs that rest are run once more, for these rows."""
        super().keep(rows)
        self._answers = {}
        self._before = {
            name: np.take(array, list(rows), 0) if array.ndim else array for name, array in self._before.items()
        }

    def _check_alike(self, inputs: Tensors) -> None:
        """Raise DataError for an input of another number of rows than the step before had."""
        for name in self._before.keys() & inputs.keys() if self._batch else ():
            rows, streams = np.shape(inputs[name])[:1], self._before[name].shape[:1]
            if rows != streams:
                raise DataError(
                    f"input {name!r} has {rows[0] if rows else 'no'} rows, and there are {streams[0]} streams; give a "
                    "row for each, or keep(rows) those that go on"
                )
