"""Runs a model with state call after call: outputs of one call become inputs of the next.

>>> import numpy as np
>>> from enginesmith import Streams
>>> from enginesmith.core.state import State
>>> from enginesmith.core.types import TensorSpec
>>> inputs = (TensorSpec("x", "float32", ("batch",)), TensorSpec("sum", "float32", ("batch",)))
>>> def add(given):
...     return {"next": given["x"] + given["sum"]}
>>> streams = Streams(add, inputs, [State("sum", "next")])
>>> [float(streams.run({"x": np.float32([value])})["next"][0]) for value in (1.0, 2.0, 3.0)]
[1.0, 3.0, 6.0]
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.errors import DataError
from enginesmith.core.state import Places, State, without_states
from enginesmith.core.types import Tensors, TensorSpec
from enginesmith.descriptions import DescribedStates, decode_description, read_description


class Streams:
    """One stream, or a batch of streams side by side, over a session. Not thread-safe.

    run: runs the model once on all of its inputs, by name: `Session.run`, or the call of a server's own runtime.
    inputs: of the model, including states.  states: those that are carried.
    ends: of dims that only states have, such as a growing cache: the size in the first call, and the largest in any.
    Without them, such dims begin at 0 and have no limit.

    The number of streams is the number of rows in the first call. The arrays of states are passed from call to call
    without a copy: do not write into those of an answer.
    """

    def __init__(
        self,
        run: Callable[[Tensors], Tensors],
        inputs: Sequence[TensorSpec],
        states: Sequence[State],
        ends: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._run, self._ends = run, ends or {}
        self.inputs = without_states(inputs, states)
        self._pairs = [(state.input, state.output) for state in states]
        self._initial = {state.input: state.initial for state in states}
        self._specs = [spec for spec in inputs if spec.name in self._initial]
        # (name of the first input, name of its first axis) if all inputs with axes have that one first; else None.
        leading_axes = [(spec.name, spec.shape[0]) for spec in self.inputs if spec.shape]
        axes = {axis for _, axis in leading_axes}
        axis = axes.pop() if len(axes) == 1 else None
        self._batch = (leading_axes[0][0], axis) if isinstance(axis, str) else None
        input_dims = {dim for spec in self.inputs for dim in spec.shape}
        # (state, axis, dim, greatest size)
        self._bounds: list[tuple[str, int, str, int]] = [
            (spec.name, axis, dim, self._ends[dim][1])
            for spec in self._specs
            for axis, dim in enumerate(spec.shape)
            if isinstance(dim, str) and dim in self._ends and dim not in input_dims
        ]
        shapes = {spec.name: spec.shape for spec in inputs}
        self._places = [(state, state.places, shapes[state.input]) for state in states if state.places]
        self._held: dict[str, Array] = {}

    @classmethod
    def described(cls, run: Callable[[Tensors], Tensors], description: Path | str) -> "Streams":
        """Streams over a pulled engine. description: the JSON beside it. Raises DataError for another file."""
        stream_spec = decode_description(read_description(description), DescribedStates, description)
        return cls(run, stream_spec.inputs, stream_spec.state, stream_spec.ends)

    def run(self, inputs: Tensors) -> Tensors:
        """All outputs of the next step of every stream. Raises as `complete`, and errors of the session; the states
        then stay as before."""
        answer = self._run(self.complete(inputs))
        self.take(answer)
        return answer

    def complete(self, inputs: Tensors) -> dict[str, Array]:
        """The inputs of the next step with the states. Raises DataError for a state among the inputs, another number of
        rows than streams, a state beyond its maximum size, and a step that would write outside the places of a state.
        """
        if not self._initial.keys().isdisjoint(inputs):
            name = next(name for name in inputs if name in self._initial)
            raise DataError(
                f"{name!r} is a state, which is passed from step to step automatically; leave it out of the inputs"
            )
        step_inputs = self._whole(inputs)
        for state, places, shape in self._places:
            self._check_places(step_inputs, state.input, places, shape)
        return step_inputs

    def _whole(self, inputs: Tensors) -> dict[str, Array]:
        if not self._held:
            return {**inputs, **self._first(inputs)}
        self._check_rows(inputs)
        for state, axis, dim, max_size in self._bounds:
            if (size := self._held[state].shape[axis]) > max_size:
                raise DataError(
                    f"state {state!r} has reached {dim}={size}, but the model accepts at most {max_size}: call reset() "
                    f"to start again, give shorter sequences, or build with a larger dims.{dim}.max"
                )
        return {**inputs, **self._held}

    def _check_rows(self, inputs: Tensors) -> None:
        name, axis = self._batch or ("", "")
        spec = next((spec for spec in self._specs if axis in spec.shape), None)
        if spec is None or name not in inputs:
            return
        stream_count, row_count = self._held[spec.name].shape[spec.shape.index(axis)], len(inputs[name])
        if stream_count != row_count:
            raise DataError(
                f"input {name!r} has {row_count} rows, and there are {stream_count} streams; give a row for each, or "
                "keep(rows) those that go on"
            )

    def _check_places(self, step_inputs: Tensors, state: str, places: Places, shape: Sequence[int | str]) -> None:
        """Raise DataError for a step that writes outside a state of fixed size."""
        written_places, size = step_inputs[places.at], int(shape[places.axis])
        if not np.size(written_places):
            return
        step_counts = (
            np.shape(step_inputs[spec.name])[spec.shape.index(places.count)]
            for spec in self.inputs
            if places.count in spec.shape
        )
        low, high = int(np.min(written_places)), int(np.max(written_places)) + next(step_counts, 1) - 1
        if low < 0 or high >= size:
            raise DataError(
                f"state {state!r} has places 0 to {size - 1}, but by {places.at!r} this step writes {low} to {high}: "
                "call reset() to start again, give shorter sequences, or export the model with a larger cache"
            )

    def take(self, answer: Tensors) -> None:
        """Store the states in a step's outputs for the next one. Raises DataError if the outputs lack a state."""
        try:
            self._held = {name: np.asarray(answer[output]) for name, output in self._pairs}
        except KeyError as error:
            raise DataError(f"the answer has no output {error}, which an input of the next call takes") from error

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Restart the streams of these rows; without rows, restart all, also with another number of streams. Raises
        DataError for an unknown row."""
        if rows is None:
            self._held = {}
        self._check_streams(() if rows is None else rows)
        for spec in self._specs if self._held else ():
            state_array = np.array(self._held[spec.name])
            state_array[(slice(None),) * self._axis(spec) + (list(rows or ()),)] = self._initial[spec.name]
            self._held[spec.name] = state_array

    def keep(self, rows: Sequence[int]) -> None:
        """Continue only with the streams of these rows, in this order; a row may occur twice. Raises DataError for an
        unknown row."""
        self._check_streams(rows)
        for spec in self._specs if self._held else ():
            self._held[spec.name] = np.take(self._held[spec.name], list(rows), self._axis(spec))

    def _check_streams(self, rows: Sequence[int]) -> None:
        for spec in self._specs if len(rows) and self._held else ():
            row_count = self._held[spec.name].shape[self._axis(spec)]
            if any(isinstance(row, bool | np.bool_) for row in rows):  # which numpy would take for the rows 0 and 1
                raise DataError("rows is a mask; give the numbers of rows")
            if unknown_rows := [
                row for row in rows if not (isinstance(row, int | np.integer) and 0 <= row < row_count)
            ]:
                raise DataError(
                    f"there is no stream in row {unknown_rows[0]}: there are {row_count}, in rows 0 to {row_count - 1}"
                )

    def _axis(self, spec: TensorSpec) -> int:
        """The axis along which a state has a row for each stream. Raises DataError for a state without such an axis."""
        axis = self._batch[1] if self._batch else None
        if axis not in spec.shape:
            raise DataError(
                f"state {spec.name!r} {list(spec.shape)} has no axis for streams; call reset() without rows"
            )
        return spec.shape.index(axis)

    def _first(self, inputs: Tensors) -> dict[str, Array]:
        sizes = {dim: min_size for dim, (min_size, _) in self._ends.items()}
        for spec in self.inputs:
            if spec.name in inputs:
                shape = np.shape(inputs[spec.name])
                sizes |= {dim: size for dim, size in zip(spec.shape, shape, strict=False) if isinstance(dim, str)}
        return {
            spec.name: np.full(
                [sizes.get(dim, 0) if isinstance(dim, str) else dim for dim in spec.shape],
                self._initial[spec.name],
                dtype_of(spec.dtype),
            )
            for spec in self._specs
        }
