from pathlib import Path

import numpy as np
import pytest

import enginesmith
from enginesmith.core.errors import DataError, SpecError
from enginesmith.core.state import State
from enginesmith.core.types import Dim, Session, Tensors, TensorSpec
from pipeline.compile.ensembles.assembly import check_connections, whole_inputs
from pipeline.compile.ensembles.whole import (
    SEQUENCE,
    STEP,
    GraphSteps,
    WholeData,
    find_graph_steps,
    list_rows,
    roll_steps,
)
from pipeline.orchestration import catalog
from pipeline.spec.ensembles.model import load_ensemble
from tests.ensembles import DECODER, ENCODER, write_ensemble
from tests.pipeline.projects import raising


def test_unsuitable_data_names_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "compile_locked", raising(DataError("state 'past' has reached length=5")))
    with pytest.raises(DataError, match=r"^graph 'encoder': state 'past' has reached length=5$"):
        enginesmith.build(write_ensemble(tmp_path / "project"), registry=tmp_path / "registry")


@pytest.mark.parametrize(("most", "expected"), [(12, (6, 12)), (9, (6, 6)), (5, None)])
def test_a_dim_of_several_graphs_has_sizes_that_all_accept(most, expected, tmp_path):
    """The encoder takes even batches, the decoder multiples of 3."""
    encoder = {**ENCODER, "dims": {"batch": {"multiple": 2, "opt": 8, "max": 12}}}
    decoder = {**DECODER, "dims": {"batch": {"multiple": 3, "opt": 3, "max": most // 3 * 3}}}
    ensemble = load_ensemble(write_ensemble(tmp_path / "project", encoder=encoder, decoder=decoder))
    if expected is None:
        with pytest.raises(SpecError, match="no size of batch suits all graphs that have it"):
            check_connections(ensemble)
        return
    check_connections(ensemble)
    _, (batch,) = whole_inputs(ensemble)
    assert batch == Dim("batch", expected[0], 6, expected[1], multiple=6)


INPUTS = (
    TensorSpec("source", "float32", ("batch",)),
    TensorSpec("d.x", "float32", ("batch", "d.tokens")),
    TensorSpec("sum.total", "float32", ("batch",)),
)
DIMS = (Dim("batch", 1, 1, 4), Dim("d.tokens", 1, 1, 4))
STATES = (State("sum.total", "sum.next"),)


class Summing(Session):
    """Graphs before the last one: a state that adds up the source, and twice what the last graph is to read."""

    inputs = INPUTS
    outputs = (TensorSpec("sum.next", "float32", ("batch",)), TensorSpec("two.x", "float32", ("batch", "tokens")))

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        return {"sum.next": inputs["sum.total"] + inputs["source"], "two.x": inputs["d.x"] * 2}


def whole(folder: Path) -> WholeData:
    path = folder / "golden.npz"
    source = np.repeat(np.array([1, 10], np.float32), 4)
    x = np.arange(8, dtype=np.float32)[:, None]
    np.savez(path, **{"source": source, "d.x": x, "text": np.repeat([7, 3], 4), "step": [0, 0, 0, 1, 0, 1, 2, 2]})
    return WholeData(path, "0" * 64, INPUTS, DIMS, "", STATES, "text", ("d.tokens", "step"))


def rows(folder: Path, steps: GraphSteps, *inputs: TensorSpec, **sources: str) -> list[dict[str, list[float]]]:
    actual = list_rows(roll_steps(Summing(), whole(folder), STATES), steps, inputs, sources, complete=False)
    return [{name: np.ravel(array).tolist() for name, array in row.items()} for row in actual]


def test_a_stateless_graph_gets_the_changing_inputs(tmp_path: Path) -> None:
    steps = GraphSteps(state=False, dim="")
    assert rows(tmp_path, steps, INPUTS[0], s="source") == [{"s": [1]}, {"s": [10]}]
    sums = [row["s"] for row in rows(tmp_path, steps, INPUTS[0], s="sum.next")]
    assert sums == [[1], [2], [10], [20], [30]], "a sequence begins anew"


def test_a_stateful_graph_gets_all_steps_numbered_by_sequence(tmp_path: Path) -> None:
    result = rows(tmp_path, GraphSteps(state=True, dim=""), INPUTS[0], s="source")
    assert [(row["s"], row[SEQUENCE]) for row in result] == [([1], [0])] * 2 + [([10], [1])] * 3


def test_samples_of_a_step_are_cut_along_the_graphs_dim(tmp_path: Path) -> None:
    taken_spec = TensorSpec("x", "float32", ("batch", "tokens"))
    result = rows(tmp_path, GraphSteps(state=True, dim="tokens"), taken_spec, x="two.x", s="sum.next")
    assert [row["x"] for row in result] == [[2 * index] for index in range(8)]
    assert [row[STEP] for row in result] == [[0], [0], [0], [1], [2], [3], [4], [4]]
    assert [row["s"] for row in result] == [[1], [1], [1], [2], [10], [20], [30], [30]]


def test_uncuttable_samples_are_refused(tmp_path: Path) -> None:
    taken_spec = TensorSpec("s", "float32", ("tokens",))
    with pytest.raises(DataError, match="input 's' gets 1 along 'tokens' in a step of 3 samples"):
        rows(tmp_path, GraphSteps(state=True, dim="tokens"), taken_spec, s="sum.next")


def test_the_step_dim_belongs_to_the_graphs_own_inputs(tmp_path: Path) -> None:
    own_spec = TensorSpec("x", "float32", ("batch", "tokens"))
    assert find_graph_steps(whole(tmp_path), True, [own_spec], {"x": "d.x"}) == GraphSteps(True, "tokens")
    assert find_graph_steps(whole(tmp_path), True, [own_spec], {"x": "two.x"}) == GraphSteps(True, "")
    assert GraphSteps(True, "tokens").arrays == (SEQUENCE, {"tokens": STEP})
    assert GraphSteps(False, "").arrays == (None, None)


def test_a_mask_grows_with_the_states_that_it_covers(tmp_path: Path) -> None:
    seen_items = list[int]()

    class Masked(Session):
        inputs = (
            TensorSpec("d.x", "float32", ("batch", "d.tokens")),
            TensorSpec("d.mask", "int64", ("batch", "d.past + d.tokens")),
            TensorSpec("d.cache", "float32", ("batch", "d.past")),
        )
        outputs = (TensorSpec("d.next", "float32", ("batch", "all")),)

        def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
            seen_items.append(inputs["d.mask"].shape[1])
            return {"d.next": np.concatenate([inputs["d.cache"], inputs["d.x"]], 1)}

    path, dims = tmp_path / "golden.npz", (*DIMS, Dim("d.past", 0, 1, 4))
    np.savez(path, **{"d.x": np.ones((4, 1), np.float32), "d.mask": np.ones((4, 1), np.int64), "text": [0, 0, 0, 1]})
    states = (State("d.cache", "d.next"),)
    data = WholeData(path, "0" * 64, Masked.inputs, dims, "", states, "text")
    steps = list(roll_steps(Masked(), data, states))
    assert seen_items == [1, 2, 3, 1]
    assert [step.tensors["d.mask"].shape for step in steps] == [(1, 1)] * 4, "data has what each step adds"
