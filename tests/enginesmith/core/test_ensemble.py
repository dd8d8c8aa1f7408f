from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.state import list_inputs, order_nodes, split_source

GRAPHS = {"detector": {"image": "prepare.x"}, "recogniser": {"x": "crop.x"}}
FUNCTIONS = {
    "name": {"logits": "recogniser.logits"},
    "crop": {"image": "image", "spots": "detector.spots"},
    "prepare": {"image": "image"},
}


def test_a_function_runs_right_before_its_first_reader_or_last() -> None:
    assert list(order_nodes(GRAPHS, FUNCTIONS)) == ["prepare", "detector", "crop", "recogniser", "name"]


def test_mutually_dependent_functions_are_each_placed_once() -> None:
    circle = {"a": {"x": "b.y"}, "b": {"y": "a.x"}}
    assert sorted(order_nodes({"graph": {"x": "a.x"}}, circle)) == ["a", "b", "graph"]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=10))
def test_every_value_is_computed_before_its_use(drawn: list[tuple[bool, list[int]]]) -> None:
    """Nodes take from those drawn before them alone, whose names sort after theirs: an order exists."""
    graphs: dict[str, dict[str, str]] = {}
    functions: dict[str, dict[str, str]] = {}
    for index, (is_graph, takes) in enumerate(drawn):
        sources = {f"i{giver}": f"n{9 - giver}.o" for giver in takes if giver < index}
        (graphs if is_graph else functions)[f"n{9 - index}"] = sources
    order = list(order_nodes(graphs, functions))
    assert sorted(order) == sorted([*graphs, *functions])
    assert [name for name in order if name in graphs] == list(graphs)
    for name, sources in {**graphs, **functions}.items():
        assert all(order.index(source.partition(".")[0]) < order.index(name) for source in sources.values())


def test_a_source_is_an_earlier_graphs_output_or_an_ensemble_input() -> None:
    assert split_source("detector.spots", ["detector"]) == ("detector", "spots")
    assert split_source("detector.image", []) is None and split_source("image", ["image"]) is None


def test_an_ensemble_input_is_listed_once_with_all_its_readers() -> None:
    assert list_inputs(order_nodes(GRAPHS, FUNCTIONS)) == {"image": [("prepare", "image"), ("crop", "image")]}
