"""Streams over several graphs with state: states are carried, and inputs that all steps have are given once."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import Tensors, TensorSpec
from enginesmith.streams import Streams

# What each graph gave, by name.
Answers = dict[str, Tensors]


class EnsembleStreams(Streams):
    """`Streams` of an ensemble, whose inputs and states are called 'GRAPH.NAME'.

    Inputs that are the same in all steps of a sequence, such as what an encoder reads, are given once (`hold`). A graph
    without state that takes nothing but these is then run in the first step alone.

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
        self._same = dict[str, Array]()

    def hold(self, inputs: Tensors) -> None:
        """Take these inputs in every step from now on, until `reset` or another `hold`; steps give the others. Raises
        DataError for an unknown input."""
        known = [spec.name for spec in self.inputs]
        if wrong := sorted(inputs.keys() - set(known)):
            raise DataError(f"input {wrong[0]!r} is unknown; the inputs of a step are {', '.join(known)}")
        # Copies: a caller may write the next sequence into the same arrays.
        self._same, self._answers = {name: np.array(array) for name, array in inputs.items()}, {}

    def run(self, inputs: Tensors) -> Tensors:
        """All outputs of the next step of every stream. Raises as `complete`, and what the graphs raise; then the
        states are as before."""
        answer, answers = self._step(self.complete(inputs), self._same.keys(), self._answers)
        self.take(answer)
        self._answers = answers
        return answer

    def complete(self, inputs: Tensors) -> dict[str, Array]:
        """The inputs of the next step with those that are held, and with the states. Raises DataError for one that is
        missing, unknown or held, for another number of rows than the others have, and as `Streams.complete`."""
        given, known = {**self._same, **inputs}, [spec.name for spec in self.inputs]
        if wrong := sorted(given.keys() ^ set(known)) or sorted(self._same.keys() & inputs.keys()):
            name = wrong[0]
            text = "is held already" if name in self._same else "is unknown" if name in given else "is missing"
            raise DataError(
                f"input {name!r} {text}; a step gives each of {', '.join(known)} that hold() did not give for all steps"
            )
        self._check_alike(given)
        return super().complete(given)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """As `Streams.reset`; nothing is held any more, of other rows neither."""
        super().reset(rows)
        self._same, self._answers = {}, {}

    def keep(self, rows: Sequence[int]) -> None:
        """As `Streams.keep`, of inputs that are held too; graphs that take these alone are run once more."""
        super().keep(rows)
        self._answers = {}
        self._same = {
            name: np.take(array, list(rows), 0) if array.ndim else array for name, array in self._same.items()
        }

    def _check_alike(self, given: Tensors) -> None:
        """Raise DataError for inputs of several numbers of rows, where all have a row for each stream."""
        if not self._batch:
            return
        rows = {name: len(array) for name, array in given.items() if np.ndim(array)}
        if len(set(rows.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise DataError(f"the inputs of a step have several numbers of rows ({told}); give a row for each stream")
