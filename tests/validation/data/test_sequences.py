from dataclasses import dataclass

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.streams import Streams
from validation.data.joined import SequenceSamples, number_steps, split, stack, window_digests

SPECS = [TensorSpec("x", "float32", ("batch", 1)), TensorSpec("h", "float32", (1, "batch", 1))]
DIMS = [Dim("batch", 1, 4, 8)]


@dataclass(frozen=True)
class Steps:
    """Numbers as steps. width: samples of a run."""

    values: tuple[float, ...]
    width: int = 1
    name: str = "steps"
    digest: str = ""

    def runs(self, start=0, stop=None):
        for end in range(start + self.width, len(self.values if stop is None else self.values[:stop]) + 1, self.width):
            yield end, {"x": np.array([[value] for value in self.values[end - self.width : end]], np.float32)}


def streams():
    return Streams(lambda inputs: {"hn": inputs["h"] + inputs["x"][None]}, SPECS, [State("h", "hn")])


def held(runs):
    return [float(inputs["h"].item()) for _, inputs in runs]


VALUES, ORDER = (1.0, 2.0, 3.0, 10.0, 20.0, 5.0), np.array([0, 0, 0, 1, 1, 2])


def test_a_step_has_the_states_of_its_sequences_earlier_steps():
    samples = SequenceSamples(Steps(VALUES), streams(), ORDER)
    assert held(samples.runs()) == [0, 1, 3, 0, 10, 0]
    assert held(samples.runs()) == [0, 1, 3, 0, 10, 0], "each pass begins anew"
    assert held(samples.runs(2, 5)) == [3, 0, 10], "a part has the states of the whole"
    assert held(SequenceSamples(Steps(VALUES), streams()).runs()) == [0, 1, 3, 6, 16, 36], "all are of one"


def test_a_run_of_several_samples_is_no_step():
    with pytest.raises(DataError, match="a step has 2 samples"):
        list(SequenceSamples(Steps(VALUES, width=2), streams()).runs())


def test_sequences_are_split_where_the_number_changes():
    read_ends = [[end for end, _ in sequence] for sequence in split(Steps(VALUES), ORDER)]
    assert read_ends == [[1, 2, 3], [4, 5], [6]]
    assert [[end for end, _ in sequence] for sequence in split(Steps(()), None)] == []


def test_steps_are_stacked_as_rows_with_their_states():
    runs = [inputs for _, inputs in SequenceSamples(Steps(VALUES), streams(), ORDER).runs()]
    groups, places = stack(runs, SPECS, DIMS)
    assert places == [[0, 1, 2, 3], [4, 5]]
    assert [group["x"].shape for group in groups] == [(4, 1), (2, 1)]
    assert [group["h"].shape for group in groups] == [(1, 4, 1), (1, 2, 1)]
    np.testing.assert_array_equal(np.concatenate([group["h"].ravel() for group in groups]), [0, 1, 3, 0, 10, 0])
    assert len(stack(runs, SPECS, [Dim("batch", 2, 4, 8)])[0]) == len(runs), "a step is no batch there"
    assert len(stack(runs, [SPECS[0], TensorSpec("h", "float32", (1, 1, 1))], DIMS)[0]) == len(runs)
    assert stack(runs, SPECS, [Dim("batch", 1, 1, 1)])[1] == [[at] for at in range(6)], "one shape keeps its order"
    assert [group["x"].shape for group in stack(runs, SPECS, [Dim("batch", 1, 1, 3)])[0]] == [(3, 1), (3, 1)]
    arrays = [{name: np.concatenate([array] * 2, at) for at, (name, array) in enumerate(run.items())} for run in runs]
    assert [len(group["x"]) for group in stack(arrays, SPECS, [Dim("batch", 1, 4, 5)])[0]] == [4] * 3, "two rows a step"


def test_equal_steps_of_several_sequences_form_one_group():
    cache = TensorSpec("h", "float32", ("batch", "past"))
    runs = [{"x": np.full((1, 1), index, np.float32), "h": np.ones((1, index % 8), np.float32)} for index in range(24)]
    groups, places = stack(runs, [SPECS[0], cache], [Dim("batch", 1, 1, 4)])
    assert [group["h"].shape for group in groups] == [(3, length) for length in (0, 4, 2, 6, 1, 5, 3, 7)]
    assert [float(x) for group in groups for x in group["x"].ravel()] == [index for group in places for index in group]


def test_a_step_counts_as_seen_only_after_earlier_steps():
    def digests(*sequences):
        runs = [[{"x": np.array([value])} for value in sequence] for sequence in sequences]
        joined_data = window_digests(runs)
        return [joined_data[index : index + 16] for index in range(0, len(joined_data), 16)]

    digest, other_digest = digests([1, 2, 3]), digests([9, 2, 3])
    assert set(digest) & set(other_digest) == set(), "the same steps behind another one"
    assert digests([1, 2, 3], [1, 2, 3])[3:] == digest
    assert digests([*range(20)])[-1] == digests([*range(5, 20)])[-1], "of long sequences the last steps decide"


def test_steps_are_numbered_from_the_beginning_of_their_sequence():
    assert number_steps(6, ORDER).tolist() == [0, 1, 2, 0, 1, 0]
    assert number_steps(3, None).tolist() == [0, 1, 2]
