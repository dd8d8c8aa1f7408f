import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.state import Places, State, name_dims, name_states
from enginesmith.core.types import Tensors, TensorSpec
from enginesmith.ensembles import Ensemble, EnsembleGraph, EnsembleStreams

SOURCE, X = TensorSpec("source", "float32", ("batch", 2)), TensorSpec("x", "float32", ("batch",))


class Counted:
    """An encoder that sums its rows, and a decoder that adds these and what it is given to its state."""

    def __init__(self) -> None:
        self.runs = list[str]()

    def encode(self, inputs: Tensors) -> Tensors:
        self.runs.append("encoder")
        return {"hidden": inputs["source"].sum(1)}

    def decode(self, inputs: Tensors) -> Tensors:
        self.runs.append("decoder")
        total = inputs["total"] + inputs["x"] + inputs["hidden"]
        return {"y": total * 2, "next": total}

    def streams(self) -> EnsembleStreams:
        hidden_spec, total = (TensorSpec(name, "float32", ("batch",)) for name in ("hidden", "total"))
        sources = {"hidden": "encoder.hidden", "x": "decoder.x", "total": "decoder.total"}
        graphs = {
            "encoder": EnsembleGraph(self.encode, [SOURCE], {"source": "encoder.source"}),
            "decoder": EnsembleGraph(self.decode, [hidden_spec, X, total], sources),
        }
        named_texts = [("encoder.source", SOURCE), ("decoder.x", X), ("decoder.total", total)]
        inputs = [TensorSpec(name, spec.dtype, spec.shape) for name, spec in named_texts]
        outputs = [TensorSpec(f"decoder.{name}", "float32", ("batch",)) for name in ("y", "next")]
        return Ensemble(graphs, inputs, outputs, [State("decoder.total", "decoder.next")]).streams()


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def streams(counted: Counted) -> EnsembleStreams:
    return counted.streams()


def test_states_are_carried_and_a_graph_of_held_inputs_runs_once(counted: Counted, streams: EnsembleStreams) -> None:
    source = np.ones((2, 2), np.float32)
    streams.hold({"encoder.source": source})
    source[:] = 99  # what is held is a copy
    answers = [streams.run({"decoder.x": floats(step, 10)})["decoder.y"].tolist() for step in (1, 2)]
    assert answers == [[6, 24], [14, 48]]
    assert counted.runs == ["encoder", "decoder", "decoder"]
    streams.hold({"encoder.source": np.zeros((2, 2), np.float32)})
    assert streams.run({"decoder.x": floats(0, 0)})["decoder.y"].tolist() == [14, 48]
    assert counted.runs.count("encoder") == 2


def test_without_held_inputs_every_graph_runs_in_every_step(counted: Counted, streams: EnsembleStreams) -> None:
    for source in (1, 2):
        answer = streams.run({"encoder.source": np.full((1, 2), source, np.float32), "decoder.x": floats(0)})
    assert answer["decoder.next"].tolist() == [6]
    assert counted.runs.count("encoder") == 2


def test_streams_can_end_and_restart(counted: Counted, streams: EnsembleStreams) -> None:
    streams.hold({"encoder.source": np.array([[1, 0], [2, 0], [3, 0]], np.float32)})
    streams.run({"decoder.x": floats(0, 0, 0)})
    streams.keep([2, 0])
    assert streams.run({"decoder.x": floats(0, 0)})["decoder.next"].tolist() == [6, 2]
    streams.reset([0])
    with pytest.raises(
        DataError, match=r"input 'encoder\.source' is missing; a step needs each of encoder\.source, dec"
    ):
        streams.run({"decoder.x": floats(0, 0)})
    streams.hold({"encoder.source": np.array([[5, 0], [1, 0]], np.float32)})
    assert streams.run({"decoder.x": floats(0, 0)})["decoder.next"].tolist() == [5, 3]
    streams.reset()
    streams.hold({"encoder.source": np.ones((1, 2), np.float32)})
    assert streams.run({"decoder.x": floats(0)})["decoder.next"].tolist() == [2]


def test_inputs_that_do_not_suit_a_step_are_refused(streams: EnsembleStreams) -> None:
    with pytest.raises(DataError, match="input 'x' is unknown; the inputs of a step are encoder"):
        streams.hold({"x": floats(0)})
    streams.hold({"encoder.source": np.ones((2, 2), np.float32)})
    for inputs, message in (
        ({"decoder.x": floats(0, 0), "encoder.source": np.ones((2, 2))}, r"input 'encoder\.source' is held already"),
        ({"decoder.x": floats(0, 0), "z": floats(0)}, "input 'z' is unknown"),
        ({}, r"input 'decoder\.x' is missing"),
        ({"decoder.x": floats(0)}, r"different numbers of rows \(encoder\.source 2, decoder\.x 1\)"),
    ):
        with pytest.raises(DataError, match=message):
            streams.run(inputs)


def test_a_failed_step_leaves_the_states_unchanged(counted: Counted, streams: EnsembleStreams) -> None:
    streams.hold({"encoder.source": np.ones((1, 2), np.float32)})
    streams.run({"decoder.x": floats(1)})
    with pytest.raises(TypeError):
        streams.run({"decoder.x": np.array([None])})
    assert streams.run({"decoder.x": floats(1)})["decoder.next"].tolist() == [6]
    assert counted.runs.count("encoder") == 1


def test_states_and_places_have_the_ensembles_names() -> None:
    own_specs = [TensorSpec("ids", "int64", ("batch", "tokens")), TensorSpec("cache", "float32", ("batch", 8))]
    own_specs += [TensorSpec("at", "int64", ("batch",)), TensorSpec("mask", "int64", ("batch", "tokens + 1"))]
    sources = {"ids": "ids", "cache": "d.cache", "at": "d.at", "mask": "e.mask"}
    whole_specs = [TensorSpec("ids", "int64", ("batch", "d.tokens")), TensorSpec("d.cache", "float32", ("batch", 8))]
    whole_specs.append(TensorSpec("d.at", "int64", ("batch",)))
    dims = name_dims(own_specs, sources, whole_specs)
    assert dims == {"batch": "batch", "tokens": "d.tokens"}
    states = [State("cache", "cache_out", 0, Places(1, "at", "tokens")), State("at", "at_out")]
    named = name_states("d", states, sources, dims, [spec.name for spec in whole_specs])
    assert named == (State("d.cache", "d.cache_out", 0, Places(1, "d.at", "d.tokens")), State("d.at", "d.at_out"))
    actual = name_states("d", states[:1], {**sources, "at": "e.at"}, dims, [spec.name for spec in whole_specs])
    assert actual == (State("d.cache", "d.cache_out"),), "places that an earlier graph gives are not known before"
