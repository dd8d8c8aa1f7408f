"""The golden set of a model with state: steps, with the states that the model itself computes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from onnx import ModelProto

from builders.onnx_graphs.structure import find_source
from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.reports.proof import SIDE_BY_SIDE
from enginesmith.core.state import State, step_inputs
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.streams import Streams
from pipeline.sources.onnx_header import can_be_equal, format_shape
from pipeline.sources.onnx_model import specs_of
from validation.data.joined import BEGINS, SequenceSamples, Steps, number_steps, roll_out, split, stack
from validation.data.samples import Samples
from validation.golden.free_running import Roller
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet

# The most sequences, and the most steps of each, that are run with their own states. An error in states reaches its
# full size after a few times the length of the model's memory; 256 steps of speech in frames of 32 ms are 8 s.
MOST_SEQUENCES, MOST_STEPS = 4, 256


@dataclass(frozen=True)
class StateModel:
    """A model with state. run: the original model.  inputs: all, with states.  steps: the samples of each step; None:
    each sample is a step.  states: the inputs that take an output of the previous step."""

    run: Callable[[Tensors], Tensors]
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    states: tuple[State, ...]
    steps: Steps | None = None

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest size of each dim."""
        return {dim.name: (dim.min, dim.max) for dim in self.dims}

    @property
    def streams(self) -> Streams:
        """Streams over the model, before their first call."""
        return Streams(self.run, self.inputs, self.states, self.ends)

    def complete_random(self, groups: Sequence[Tensors]) -> list[dict[str, Array]]:
        """Groups of random inputs as the steps of one sequence, with the resulting states. Steps that a full cache does
        not take are omitted. Raises DataError if fewer than two remain."""
        step_specs = step_inputs(self.inputs, self.states)
        numbered_steps = (
            (group_number, {spec.name: group[spec.name] for spec in step_specs})
            for group_number, group in enumerate(groups, 1)
        )
        complete_inputs: list[dict[str, Array]] = []
        try:
            complete_inputs.extend(inputs for _, inputs in roll_out(numbered_steps, self.streams))
        except DataError:
            if len(complete_inputs) < 2:
                raise
        return complete_inputs

    def sequences(self, samples: Samples | None, order: Array | None, groups: Sequence[Tensors]) -> GoldenSequences:
        """The sequences that the model runs with its own states; a single one of random inputs (`groups`). Raises
        DataError for samples whose sequences all have one step: no state is then passed on."""
        steps = [spec.name for spec in step_inputs(self.inputs, self.states)]
        if samples is None:
            sequence_steps: list[list[Tensors]] = [[{name: group[name] for name in steps} for group in groups]]
        else:
            sequence_steps = [self._read(sequence) for sequence in islice(split(samples, order), MOST_SEQUENCES)]
        if samples and all(
            sum(bool(sample.get(BEGINS, True)) for sample in sequence) < 2 for sequence in sequence_steps
        ):
            raise DataError(
                f"{samples.name}: every sequence has one step, so no state is passed on; store sequences of several "
                "steps, which have the same number in the array that golden.sequence names"
            )
        cases = [self._case(f"sequence {index}", sequence) for index, sequence in enumerate(sequence_steps)]
        if samples and (streams := self._side_by_side(sequence_steps)):
            cases.append(self._case(SIDE_BY_SIDE, streams))
        return GoldenSequences(self.states, self.ends, GoldenSet(tuple(cases)), dim=self._dim)

    def freeze(
        self, samples: Samples, order: Array | None, labels: Array | None
    ) -> tuple[list[dict[str, Array]], GoldenSequences, Array | None]:
        """The golden inputs in groups, the sequences, and the labels in the order of the groups. order: as in
        `SequenceSamples`."""
        steps = SequenceSamples(samples, self.streams, order, self.steps).runs()
        groups, indices = stack((inputs for _, inputs in steps), self.inputs, self.dims)
        sequences = self.sequences(samples, order, ())
        starts = self.steps.firsts if self.steps else np.arange(samples.count)
        if labels is not None:
            label_runs = np.split(labels, starts[1:])
            labels = np.concatenate([label_runs[index] for group in indices for index in group])
        numbers = number_steps(samples.count, order)[starts].tolist()
        return (
            groups,
            replace(sequences, places=tuple(tuple(numbers[index] for index in group) for group in indices)),
            labels,
        )

    @property
    def _dim(self) -> str:
        return self.steps.dim if self.steps else ""

    def _read(self, sequence: Iterator[tuple[int, dict[str, Array]]]) -> list[Tensors]:
        """The samples of a sequence's first steps. If steps can have several samples, `BEGINS` marks their starts."""
        if self.steps is None:
            return [inputs for _, inputs in islice(sequence, MOST_STEPS)]
        samples = [{**inputs, BEGINS: self.steps.begins[end - 1]} for end, inputs in sequence]
        late_rows = [row for row, inputs in enumerate(samples) if inputs[BEGINS]][MOST_STEPS:]
        return list(samples[: late_rows[0] if late_rows else None])

    def _side_by_side(self, sequences: Sequence[Sequence[Tensors]]) -> list[Tensors]:
        """The steps of several streams in one batch, up to the end of the shortest: only this finds engines that pass a
        state to another row of the batch. A step begins where one of any stream begins. A single sequence is split into
        two halves. Empty if states and all inputs of a step have no common dim, or if that dim allows no two
        streams."""
        input_specs = step_inputs(self.inputs, self.states)
        state_axes = {axis for spec in self.inputs if spec not in input_specs for axis in spec.shape}
        shared_dims = [
            dim
            for dim in self.dims
            if dim.name in state_axes and all(s.shape.count(dim.name) == 1 for s in input_specs)
        ]
        if not shared_dims:
            return []
        axes = {spec.name: spec.shape.index(shared_dims[0].name) for spec in input_specs}
        midpoint = len(sequences[0]) // 2
        streams = sequences if len(sequences) > 1 else (sequences[0][:midpoint], sequences[0][midpoint:])
        name, axis = next(iter(axes.items()))
        streams = streams[: shared_dims[0].max // np.shape(sequences[0][0][name])[axis]]
        if len(streams) < 2:
            return []
        return [
            {key: np.concatenate([step[key] for step in steps], dim_axes) for key, dim_axes in axes.items()}
            | ({BEGINS: np.asarray(np.any([step[BEGINS] for step in steps]))} if self.steps else {})
            for steps in zip(*streams, strict=False)
        ]

    def _case(self, name: str, sequence: Sequence[Tensors]) -> Case:
        inputs = {input_name: np.stack([step[input_name] for step in sequence]) for input_name in sequence[0]}
        roller = Roller(self.inputs, self.states, self.ends, tuple(inputs), self._dim)
        return Case(name, "golden", inputs, roller.roll(self.run, inputs))


def check_states(states: Sequence[State], model: ModelProto) -> None:
    """Raise ModelError for a state whose output is missing, is the unchanged input, or has a dtype or shape that the
    input cannot take. model: its weights are not read."""
    inputs, outputs = specs_of(model)
    inputs_by_name, outputs_by_name = {spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs}
    for state in states:
        spec, output_spec = inputs_by_name[state.input], outputs_by_name.get(state.output)
        label = f"state.{state.input}"
        if output_spec is None:
            raise ModelError(
                f"{label}: the model has no output {state.output!r}; its outputs are {', '.join(outputs_by_name)}"
            )
        if output_spec.dtype != spec.dtype:
            raise ModelError(
                f"{label} is {spec.dtype}, and {state.output!r} is {output_spec.dtype}; they must be the same"
            )
        if find_source(model.graph, state.output) == state.input:
            raise ModelError(
                f"{label}: output {state.output!r} is the input itself, so the state would never change; remove it "
                "from state, and declare it as an input"
            )
        if not can_be_equal(spec.shape, output_spec.shape):
            shapes_text = f"{format_shape(spec.shape)}, and {state.output!r} is {format_shape(output_spec.shape)}"
            raise ModelError(f"{label} is {shapes_text}; a state's output must have the shape of its input")
