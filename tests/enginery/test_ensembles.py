"""Several graphs as one session."""

from pathlib import Path

import numpy as np
import pytest

from enginery.core.errors import DataError
from enginery.core.types import TensorSpec
from enginery.ensembles import Ensemble, EnsembleGraph

X, Y = TensorSpec("x", "float32", ("n",)), TensorSpec("second.y", "float32", ("n",))


def ensemble(taken: str = "float32") -> Ensemble:
    first = EnsembleGraph(lambda given: {"h": given["x"] + 1, "unused": given["x"]}, [X], {"x": "x"})
    inputs = [TensorSpec("h", taken, ("n",)), TensorSpec("x", "float32", ("n",))]
    second = EnsembleGraph(
        lambda given: {"y": given["h"] * given["x"], "kind": np.array(given["h"].dtype.itemsize)},
        inputs,
        {"h": "first.h", "x": "x"},
    )
    kind = TensorSpec("second.kind", "int64", ())
    return Ensemble({"first": first, "second": second}, [X], [Y, kind])


def test_each_graph_gets_what_those_before_it_gave() -> None:
    answer = ensemble().run({"x": np.array([1, 2], np.float32)})
    assert answer.keys() == {"second.y", "second.kind"}
    assert answer["second.y"].tolist() == [2, 6]


def test_floats_are_converted_to_what_an_engine_takes() -> None:
    assert ensemble("float16").run({"x": np.ones(2, np.float32)})["second.kind"] == 2


def test_inputs_that_are_missing_or_unknown_are_refused() -> None:
    for given in ({}, {"x": np.ones(2), "z": np.ones(2)}):
        with pytest.raises(DataError, match="is missing or unknown; the inputs of the whole are x"):
            ensemble().run(given)


def test_an_output_that_no_graph_gives_is_told() -> None:
    graph = EnsembleGraph(lambda given: {"h": given["x"]}, [X], {"x": "x"})
    with pytest.raises(DataError, match=r"the graphs gave no 'first\.gone'"):
        Ensemble({"first": graph}, [X], [TensorSpec("first.gone", "float32", ())]).run({"x": np.ones(2)})
    chained = Ensemble({"first": graph, "second": EnsembleGraph(dict, [X], {"x": "first.gone"})}, [X], [])
    with pytest.raises(DataError, match=r"nothing gives 'first\.gone', which input 'x' takes"):
        chained.run({"x": np.ones(2)})


def test_a_file_that_describes_no_ensemble_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("{}")
    for name in ("engine.json", "gone.json"):
        with pytest.raises(DataError, match="describes no ensemble"):
            Ensemble.described(lambda _: dict, tmp_path / name)
