"""Expected answers by free running of sequences, and recorded answers."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.state import State, step_inputs, without_states
from enginesmith.core.types import Session, Tensors, TensorSpec
from enginesmith.streams import Streams
from validation.data.joined import BEGINS, GrownInputs, join
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet, case_names

# A model with state as a session of whole sequences, which passes its own states from step to step.
#
# Golden cases have single steps with the states of the reference. Only a run of many steps shows the growth of errors
# in states. A call takes a whole sequence; therefore such runs are compared like all others, and the limits of honest
# rounding are measured in the same way: with states that the rounded graph itself has passed on.

# The axis of steps, before all others.
STEP = "step"


@dataclass(frozen=True)
class Roller:
    """Runs a model through a sequence from its beginning.

    ends: as in `Streams`.  steps: names of the inputs with one entry per step; other inputs are the same in all steps.
    dim: as in `GoldenSequences`.
    states: the inputs and outputs that are passed from step to step.
    """

    inputs: tuple[TensorSpec, ...]
    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    steps: tuple[str, ...]
    dim: str = ""

    def roll(self, run: Callable[[Tensors], Tensors], inputs: Tensors) -> dict[str, Array]:
        """The outputs of all steps, stacked along a new axis 0, as the steps of `inputs` are. If steps have several
        samples, an output of the step's size is cut into single places. If the model has other outputs, a state has
        only its value after the last step.

        Raises DataError for inputs without a step, and the model's own errors.
        """
        constant_inputs = {name: array for name, array in inputs.items() if name not in self.steps}
        streams = Streams(run, self.inputs, self.states, self.ends)
        step_outputs: dict[str, list[Array]] = {}
        steps, grown_inputs = list(self._steps(inputs)), GrownInputs(streams.inputs)
        for step in steps:
            answer = streams.run({**constant_inputs, **grown_inputs.take(step)})
            state_outputs = {state.output for state in self.states} if len(answer) > len(self.states) else set()
            for name, array in answer.items():
                output_steps = step_outputs.setdefault(name, [])
                if name in state_outputs:
                    output_steps.clear()
                output_steps.append(array)
        sizes = [self._size(step) for step in steps]
        return {name: stack_steps(cut_places(arrays, sizes)) for name, arrays in step_outputs.items()}

    def _steps(self, inputs: Tensors) -> Iterator[dict[str, Array]]:
        """The inputs of each step. Raises DataError if there are no steps."""
        names = [name for name in self.steps if name != BEGINS]
        count = min((len(inputs[name]) for name in names), default=0)
        if not count:
            raise DataError("a sequence without steps; give at least one")
        first_steps = np.flatnonzero(inputs[BEGINS][:count]) if BEGINS in inputs else np.arange(count)
        input_specs = [spec for spec in step_inputs(self.inputs, self.states) if spec.name in names]
        for begin, end in pairwise([*first_steps.tolist(), count]):
            yield join(
                [{name: inputs[name][step, ...] for name in names} for step in range(begin, end)], self.dim, input_specs
            )

    def _size(self, step: Tensors) -> int:
        """The size of a step along `dim`; 0 if no input has that dim."""
        axes = ((spec.name, spec.shape.index(self.dim)) for spec in self.inputs if self.dim in spec.shape)
        name, axis = next(axes, ("", 0))
        return step[name].shape[axis] if name else 0


class FreeRunningSession(Session):
    """A session whose calls take all steps of a sequence, as cases of `GoldenSequences`; outputs as in `Roller`."""

    def __init__(self, session: Session, sequences: GoldenSequences) -> None:
        states, steps = sequences.states, tuple(next(iter(sequences.golden.cases)).inputs)
        self._halves = {spec.name for spec in session.inputs if spec.dtype == "float16"}
        self._session, self.outputs = session, [_stacked(spec) for spec in session.outputs]
        stateless_inputs = without_states(session.inputs, states)
        self.inputs: Sequence[TensorSpec] = [
            _stacked(spec) if spec.name in steps else spec for spec in stateless_inputs
        ]
        self.roller = Roller(tuple(session.inputs), states, sequences.ends, steps, sequences.dim)

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of all steps. Raises as `Roller.roll`."""
        return self.roller.roll(self._step, inputs)

    def _step(self, inputs: Tensors) -> Tensors:
        """Run one step. A graph that emulates float16 returns states in float32, and takes them in float16."""
        half_inputs = {name: inputs[name].astype(np.float16, copy=False) for name in self._halves & inputs.keys()}
        return self._session.run({**inputs, **half_inputs})


def cut_places(answers: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """The steps' answers cut into single places, in order, along the first axis whose length is the step's size in
    every answer; uncut without such an axis, or if all steps have the same size. sizes: the size of each step."""
    arrays = [np.asarray(answer) for answer in answers]
    if len(arrays) != len(sizes) or len(set(sizes)) == 1:
        return arrays
    axes = range(min(array.ndim for array in arrays))
    step_axes = [
        axis for axis in axes if all(item.shape[axis] == size for item, size in zip(arrays, sizes, strict=True))
    ]
    if not step_axes:
        return arrays
    return [np.take(array, [i], step_axes[0]) for array, size in zip(arrays, sizes, strict=True) for i in range(size)]


def stack_steps(answers: Sequence[Array]) -> Array:
    """The results of all steps, along a new axis 0. If the steps have several sizes, such as weights over a growing
    cache, all are padded to the largest with their last element, which changes no argmax."""
    arrays = [np.asarray(answer) for answer in answers]
    max_shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    widths = [[(0, max_size - size) for max_size, size in zip(max_shape, array.shape, strict=True)] for array in arrays]
    if not any(growth for width in widths for _, growth in width):
        return np.stack(arrays)
    pairs = zip(arrays, widths, strict=True)
    return np.stack([np.pad(array, width, mode="edge" if array.size else "constant") for array, width in pairs])


def _stacked(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(STEP, *spec.shape))


# A reference's answers to the cases of a golden set, recorded to save a later process from running the reference.

# Answers of more bytes are not saved: reading and writing them takes as long as computing them.
MOST_BYTES = 64 << 20


class RecordedSession(Session):
    """A session that returns the recorded answer for the first call with known inputs, and runs for every later call:
    two calls with equal inputs then compare the record with the session.

    cases: the most answers to record.  golden: answers as `save` wrote them; None for none.
    """

    def __init__(self, session: Session, cases: int, golden: GoldenSet | None = None) -> None:
        self.inputs, self.outputs = session.inputs, session.outputs
        self._session, self._cases = session, cases
        self._known = golden or GoldenSet(())
        self._places = {name: index for index, name in enumerate(case_names(self._known))}
        self._fresh, self._bytes = dict[str, Tensors](), 0

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The recorded answer to these inputs, else the session's. Raises as the session does."""
        if not self._places and len(self._fresh) >= self._cases:
            return self._session.run(inputs)
        name = _digest_inputs(inputs)
        case_index = self._places.pop(name, None)
        stored_outputs = {} if case_index is None else dict(self._known.cases[case_index].expected)
        if stored_outputs and stored_outputs.keys() == {spec.name for spec in self.outputs}:
            return stored_outputs
        answer = self._session.run(inputs)
        if name not in self._fresh and len(self._fresh) < self._cases and self._bytes <= MOST_BYTES:
            self._fresh[name] = answer
            self._bytes += sum(array.nbytes for array in answer.values())
        return answer

    def free_running(self, sequences: GoldenSequences) -> "RecordedSession":
        """A session of whole sequences (`FreeRunningSession`) with recorded answers, if there are any."""
        session = FreeRunningSession(self._session, sequences)
        return RecordedSession(session, len(sequences.golden.cases), self._known)

    def save(self, path: Path, roll_session: "RecordedSession | None" = None) -> Path | None:
        """Write the session's own answers, by the digest of their inputs; None, and no file, if they have more than
        MOST_BYTES. roll_session: the session of `free_running`, whose answers are written too."""
        if self._bytes + (roll_session._bytes if roll_session else 0) > MOST_BYTES:
            return None
        answers = {**self._fresh, **(roll_session._fresh if roll_session else {})}
        GoldenSet(tuple(Case(name, "golden", {}, answer) for name, answer in answers.items())).save(path)
        return path


def _digest_inputs(inputs: Tensors) -> str:
    hasher = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        hasher.update(repr((name, str(array.dtype), array.shape)).encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()
