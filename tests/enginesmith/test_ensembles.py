from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from enginesmith.core.errors import DataError
from enginesmith.core.types import ShapeProfile, Tensors, TensorSpec
from enginesmith.ensembles import Ensemble, EnsembleGraph, call_rows

X, Y = TensorSpec("x", "float32", ("n",)), TensorSpec("second.y", "float32", ("n",))

ROW = TensorSpec("row", "float32", (1, 4))


def ensemble(taken: str = "float32") -> Ensemble:
    first_graph = EnsembleGraph(lambda inputs: {"h": inputs["x"] + 1, "unused": inputs["x"]}, [X], {"x": "x"})
    inputs = [TensorSpec("h", taken, ("n",)), TensorSpec("x", "float32", ("n",))]
    second_graph = EnsembleGraph(
        lambda inputs: {"y": inputs["h"] * inputs["x"], "kind": np.array(inputs["h"].dtype.itemsize)},
        inputs,
        {"h": "first.h", "x": "x"},
    )
    kind = TensorSpec("second.kind", "int64", ())
    return Ensemble({"first": first_graph, "second": second_graph}, [X], [Y, kind])


def test_each_graph_gets_outputs_of_earlier_graphs() -> None:
    answer = ensemble().run({"x": np.array([1, 2], np.float32)})
    assert answer.keys() == {"second.y", "second.kind"}
    assert answer["second.y"].tolist() == [2, 6]


def test_floats_are_converted_to_the_engines_dtype() -> None:
    assert ensemble("float16").run({"x": np.ones(2, np.float32)})["second.kind"] == 2


def test_missing_or_unknown_inputs_are_refused() -> None:
    for inputs in ({}, {"x": np.ones(2), "z": np.ones(2)}):
        with pytest.raises(DataError, match="is missing or unknown; the ensemble's inputs are x"):
            ensemble().run(inputs)


def test_an_output_that_no_graph_gives_is_reported() -> None:
    graph = EnsembleGraph(lambda inputs: {"h": inputs["x"]}, [X], {"x": "x"})
    with pytest.raises(DataError, match=r"returned the ensemble's output 'first\.gone'"):
        Ensemble({"first": graph}, [X], [TensorSpec("first.gone", "float32", ())]).run({"x": np.ones(2)})
    chained_ensemble = Ensemble({"first": graph, "second": EnsembleGraph(dict, [X], {"x": "first.gone"})}, [X], [])
    with pytest.raises(DataError, match=r"there is no 'first\.gone', which input 'x' reads"):
        chained_ensemble.run({"x": np.ones(2)})


def test_a_file_that_describes_no_ensemble_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("{}")
    for name, label in (("engine.json", "ensemble"), ("gone.json", "engine")):
        with pytest.raises(DataError, match=f"describes no {label}"):
            Ensemble.described(lambda _: dict, tmp_path / name)


def taking(rows: range | None, calls: list[int], output: TensorSpec = Y) -> EnsembleGraph:
    """A graph that doubles its rows, and notes how many each call had."""

    def run(inputs: Tensors) -> Tensors:
        calls.append(len(inputs["x"]))
        return {output.name: inputs["x"] * 2}

    return EnsembleGraph(run, [X], {"x": "x"}, [output], rows)


@drawn(rows=st.integers(1, 40), most=st.integers(1, 12))
def test_rows_beyond_a_call_are_run_in_several(rows: int, most: int) -> None:
    calls: list[int] = []
    answer = taking(range(1, most + 1), calls).answer({"x": np.arange(rows)})["second.y"]
    assert answer.tolist() == [2 * row for row in range(rows)]
    assert len(calls) == -(-rows // most) and sum(calls) == rows and max(calls) <= most


@drawn(rows=st.integers(1, 40), least=st.integers(1, 5), steps=st.integers(0, 4), multiple=st.integers(1, 4))
def test_no_call_has_fewer_rows_than_the_graph_takes(rows: int, least: int, steps: int, multiple: int) -> None:
    sizes = range(least * multiple, (least + steps) * multiple + 1, multiple)
    calls: list[int] = []
    answer = taking(sizes, calls).answer({"x": np.arange(rows)})["second.y"]
    assert answer.tolist() == [2 * row for row in range(rows)]
    assert len(calls) == -(-rows // sizes[-1])
    assert rows <= sizes[-1] or set(calls) <= set(sizes)


def test_remaining_rows_run_together_with_earlier_ones() -> None:
    calls: list[int] = []
    assert taking(range(4, 9), calls).answer({"x": np.arange(9)})["second.y"].tolist() == list(range(0, 18, 2))
    assert calls == [8, 4]


def test_without_rows_a_graph_is_not_run() -> None:
    calls: list[int] = []
    output = TensorSpec("y", "float16", ("n", "m", 3))
    answer = taking(range(1, 5), calls, output).answer({"x": np.zeros((0, 2))})["y"]
    assert (calls, answer.shape, answer.dtype) == ([], (0, 0, 3), np.float16)


def test_a_graph_without_a_row_limit_runs_once() -> None:
    calls: list[int] = []
    assert len(taking(None, calls).answer({"x": np.arange(50)})["second.y"]) == 50
    assert calls == [50]


def test_an_output_without_one_row_per_input_row_is_reported() -> None:
    graph = EnsembleGraph(lambda inputs: {"sum": inputs["x"].sum(keepdims=True)}, [X], {"x": "x"}, [Y], range(1, 3))
    with pytest.raises(DataError, match=r"takes 2 rows per call and gets 5, but its output 'sum' does not have one"):
        graph.answer({"x": np.arange(5)})


def test_the_rows_of_a_call_cover_all_profiles() -> None:
    profiles = [ShapeProfile((("x", (low,), (high,), (high,)),), (("x", (2,)),)) for low, high in ((2, 4), (6, 16))]
    assert call_rows([X], [Y], profiles) == range(2, 17, 2)
    assert call_rows([X], [Y], [ShapeProfile((("x", (3,), (4,), (8,)),))]) == range(3, 9)
    assert call_rows([X], [Y]) == range(1, 33)
    for inputs, outputs in (
        ([X, TensorSpec("z", "float32", ("m",))], [Y]),
        ([TensorSpec("x", "float32", (4,))], [Y]),
        ([ROW, X], [ROW]),
        ([ROW], [ROW, TensorSpec("y", "float32", ())]),
        ([ROW, TensorSpec("scale", "float32", ())], [ROW]),
        ([X], [TensorSpec("y", "float32", ())]),
        ([X], [TensorSpec("y", "float32", (1,))]),
        ([X], []),
    ):
        assert call_rows(inputs, outputs, profiles) is None


def test_a_graph_of_one_row_runs_once_per_row() -> None:
    assert call_rows([ROW], [ROW]) == range(1, 2)
    calls: list[int] = []
    assert taking(call_rows([ROW], [ROW]), calls, ROW).answer({"x": np.arange(3)})["row"].tolist() == [0, 2, 4]
    assert calls == [1, 1, 1]


def test_errors_of_a_graph_have_its_name() -> None:
    def refuse(inputs: Tensors) -> Tensors:
        raise DataError("input 'x' has size 3 on axis 0; the model needs (4,)")

    whole_ensemble = Ensemble({"first": EnsembleGraph(refuse, [X], {"x": "x"})}, [X], [Y])
    with pytest.raises(DataError, match=r"'first': input 'x' has size 3"):
        whole_ensemble.run({"x": np.ones(3)})


def test_graphs_can_be_run_one_by_one() -> None:
    graphs = ensemble().graphs
    assert list(graphs) == ["first", "second"]
    assert graphs["first"].run({"x": np.ones(1)})["h"].tolist() == [2]
