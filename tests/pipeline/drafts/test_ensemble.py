import pytest

from enginesmith.core.state import State
from enginesmith.core.types import TensorSpec
from pipeline.drafts.facts import FoundModel, find_states
from pipeline.drafts.text import FoundGraph, connect_states, find_connections
from pipeline.sources.onnx_header import HeaderTensor

SHAPE = ("batch", 8)


def graph(key: str, takes: str, gives: str) -> FoundGraph:
    inputs = tuple(TensorSpec(name, "float32", SHAPE) for name in takes.split())
    outputs = [TensorSpec(name, "float32", SHAPE) for name in gives.split()]
    model = FoundModel(key, {}, inputs, tuple(gives.split()), states=find_states(inputs, outputs))
    return FoundGraph(key, model, tuple(HeaderTensor(name, "float32", SHAPE) for name in gives.split()))


def connect(*graphs: FoundGraph) -> tuple[dict[str, str | None], dict[str, tuple[State, ...]]]:
    """The connections, and the states that are left, by graph."""
    settled_graphs = connect_states(graphs)
    sources = {item.key: item.source for item in find_connections(settled_graphs)}
    return sources, {item.key: item.model.states for item in settled_graphs if item.model.states}


@pytest.mark.parametrize(
    ("out", "into"),
    [
        ("hidden", "hidden"),
        ("hidden_out", "hidden"),
        ("new_hidden", "hidden"),
        ("hidden_next", "hidden_in"),
        ("hiddenOut", "prevHidden"),
        ("present.0.key", "past_key_values.0.key"),
        ("last_hidden_state", "encoder_hidden_states"),
    ],
)
def test_a_name_with_another_prefix_or_suffix_connects(out, into):
    # The second input has the same type and shape, and another name.
    sources, states = connect(graph("encoder", "x", f"y {out}"), graph("decoder", f"token {into}", "logits"))
    assert sources[f"decoder.{into}"] == f"encoder.{out}"
    assert not states


def test_outputs_of_earlier_graphs_are_no_states():
    decoder = graph("decoder", "token hidden", "logits hidden_out")
    assert decoder.model.states, "alone it is one"
    sources, states = connect(graph("encoder", "x", "hidden_out"), decoder)
    assert (sources, states) == ({"decoder.hidden": "encoder.hidden_out"}, {})
    (connection,) = find_connections(connect_states([graph("encoder", "x", "hidden_out"), decoder]))
    assert "it could be a state that takes decoder.hidden_out" in connection.why


def test_ambiguous_pairs_of_two_graphs_are_no_states():
    pair = graph("encoder", "x hidden", "hidden_out"), graph("decoder", "token hidden", "logits hidden_out")
    assert connect(*pair) == ({"decoder.hidden": "encoder.hidden_out"}, {})


def test_graphs_connected_by_another_name_keep_their_states():
    pair = graph("first", "x hidden", "y hidden_out"), graph("second", "y hidden", "z hidden_out")
    sources, states = connect(*pair)
    assert sources == {"second.y": "first.y"}
    assert states == {key: (State("hidden", "hidden_out"),) for key in ("first", "second")}


def test_two_outputs_with_one_name_connect_nothing():
    first_graph, second_graph = graph("a", "x", "hidden_out"), graph("b", "x", "hidden_out")
    sources, _ = connect(first_graph, second_graph, graph("c", "hidden", "y"))
    assert sources["c.hidden"] is None


def test_a_mask_of_two_graphs_is_one_input_of_the_whole():
    sources, _ = connect(graph("a", "x input/mask", "h"), graph("b", "h mask", "y"))
    assert sources == {"a.input/mask": "input_mask", "b.h": "a.h", "b.mask": "input_mask"}
