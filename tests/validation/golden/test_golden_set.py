import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.types import Dim, TensorSpec
from validation.data.samples import Samples, sizes_of
from validation.golden.golden_set import MAX_EDGE_CASES, Case, GoldenSet, edge_sizes, freeze

SPECS = [TensorSpec("x", "float32", ("batch", "seq"))]
DIMS = [Dim("batch", 1, 4, 4), Dim("seq", 1, 8, 8, edges=(2, 8))]


def double(inputs):
    return {"y": inputs["x"] * 2}


def golden(count: int = 10) -> GoldenSet:
    x = np.random.default_rng(1).standard_normal((count, 5)).astype(np.float32)
    groups = [{"x": x[start : start + 4]} for start in range(0, count, 4)]
    return freeze(groups, SPECS, DIMS, double, np.arange(count))


def test_golden_cases_are_groups_of_samples(tmp_path):
    x = np.random.default_rng(1).standard_normal((10, 5)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    frozen_golden = freeze(Samples.open(tmp_path / "data.npz", SPECS, DIMS), SPECS, DIMS, double)
    cases = list(frozen_golden.of_kind("golden"))
    np.testing.assert_array_equal(np.concatenate([case.inputs["x"] for case in cases]), x)
    np.testing.assert_array_equal(np.concatenate([case.expected["y"] for case in cases]), x * 2)


def test_edges_are_every_combination_with_corners_first():
    sizes = [tuple(sizes_of(case.inputs, SPECS).values()) for case in golden().of_kind("edge")]
    assert sizes[:4] == [(1, 1), (1, 8), (4, 1), (4, 8)]
    assert set(sizes) == {(batch, seq) for batch in (1, 4) for seq in (1, 2, 3, 8)}
    assert len(sizes) == len(set(sizes))


def test_edges_are_capped_and_keep_the_corners():
    dims = [Dim(name, 1, 3, 9, edges=(2, 4, 6, 9)) for name in "abc"]
    sizes = edge_sizes([TensorSpec("x", "float32", ("a", "b", "c"))], dims)
    assert len(sizes) == MAX_EDGE_CASES
    assert [set(size.values()) <= {1, 9} for size in sizes[:8]] == [True] * 8


@pytest.mark.parametrize(("count", "sizes", "edges"), [(30, (1, 2, 3), MAX_EDGE_CASES), (60, (2, 2, 2), 1)])
def test_many_dims_are_quick_and_fixed_ones_have_one_edge(count, sizes, edges):
    dims = [Dim(f"d{index}", *sizes) for index in range(count)]
    assert len(edge_sizes([TensorSpec("x", "float32", tuple(dim.name for dim in dims))], dims)) == edges


def test_dims_that_no_input_has_make_no_edges():
    assert edge_sizes([TensorSpec("x", "float32", (2, 2))], DIMS) == []


def test_an_edge_uses_each_sample_once_before_repetition():
    """Tiled from one group of 4, places 0, 4 and 8 hold one sample, and answers that change places are not seen."""
    x = np.arange(20.0, dtype=np.float32).reshape(10, 2)
    groups = [{"x": x[start : start + 4]} for start in range(0, 10, 4)]
    frozen_golden = freeze(groups, [TensorSpec("x", "float32", ("batch", 2))], [Dim("batch", 1, 4, 13)], double)
    (largest_input,) = [case.inputs["x"] for case in frozen_golden.of_kind("edge") if case.name == "batch=13"]
    assert len(np.unique(largest_input[:10], axis=0)) == 10 and len(largest_input) == 13


def test_sizes_at_which_the_model_does_not_run_are_named():
    """As where an input holds the length of another."""

    def run(inputs):
        if inputs["x"].shape[1] == 2:
            raise ModelError("lengths reach beyond the sequence")
        return double(inputs)

    with pytest.raises(
        ModelError,
        match="beyond the sequence; it was run at batch=1 seq=2, which the spec's dims allow, on golden data cut",
    ):
        freeze([{"x": np.zeros((4, 5), np.float32)}], SPECS, DIMS, run)


def test_edges_hold_real_data():
    real_values = set(np.concatenate([case.inputs["x"] for case in golden().of_kind("golden")]).flat)
    assert all(value in real_values for case in golden().of_kind("edge") for value in case.inputs["x"].flat)


def test_save_and_load_give_the_same_set(tmp_path):
    frozen_golden = golden()
    digest = frozen_golden.save(tmp_path / "golden.safetensors")
    loaded = GoldenSet.load(tmp_path / "golden.safetensors")
    assert digest == frozen_golden.digest == loaded.digest
    np.testing.assert_array_equal(loaded.labels, frozen_golden.labels)
    assert [(case.name, case.kind) for case in loaded.cases] == [(case.name, case.kind) for case in frozen_golden.cases]
    for one_case, other_case in zip(loaded.cases, frozen_golden.cases, strict=True):
        np.testing.assert_array_equal(one_case.inputs["x"], other_case.inputs["x"])
        np.testing.assert_array_equal(one_case.expected["y"], other_case.expected["y"])


def test_bytes_are_deterministic_and_any_value_changes_them(tmp_path):
    assert golden().save(tmp_path / "a") == golden().save(tmp_path / "b")
    changed_golden = golden()
    changed_golden.cases[0].expected["y"][0, 0] += 1
    assert changed_golden.digest != golden().digest
    assert GoldenSet(golden().cases, np.arange(10)[::-1]).digest != golden().digest


def test_layouts_and_scalars_survive(tmp_path):
    tensors = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "s": np.float32(3), "b": np.array([True])}
    frozen_golden = freeze([tensors], [], [], lambda inputs: {"e": np.zeros((0, 3), np.int64)})
    frozen_golden.save(tmp_path / "g")
    case = GoldenSet.load(tmp_path / "g").cases[0]
    np.testing.assert_array_equal(case.inputs["f"], tensors["f"])
    assert case.inputs["s"].shape == () and case.inputs["b"].dtype == bool and case.expected["e"].shape == (0, 3)
    assert GoldenSet.load(tmp_path / "g").cases[-1:][0].name == case.name


def test_a_bfloat16_output_is_refused():
    with pytest.raises(DataError, match="'y' is bfloat16"):
        freeze([{"x": np.ones(2)}], [], [], lambda _: {"y": np.ones(2, ml_dtypes.bfloat16)})


def test_no_groups_is_an_error():
    with pytest.raises(DataError, match="the golden data has no samples"):
        freeze([], SPECS, DIMS, double)


@pytest.mark.parametrize("data", [b"", b"garbage" * 20], ids=["empty", "garbage"])
def test_other_files_are_refused(tmp_path, data):
    (tmp_path / "g").write_bytes(data)
    with pytest.raises(DataError, match="is not a golden set"):
        GoldenSet.load(tmp_path / "g")


def test_plain_safetensors_and_other_formats_are_refused(tmp_path):
    save_file({"x": np.ones(2)}, tmp_path / "g")
    with pytest.raises(DataError, match="is not a golden set"):
        GoldenSet.load(tmp_path / "g")
    save_file({"x": np.ones(2)}, tmp_path / "g", {"golden": '{"format": 2, "cases": []}'})
    with pytest.raises(DataError, match="format 2; this version reads 1"):
        GoldenSet.load(tmp_path / "g")


def test_a_loaded_set_reads_cases_one_at_a_time(tmp_path):
    big_array = np.ones((1, 1 << 20), np.float32)
    GoldenSet(tuple(Case(str(i), "golden", {"x": big_array}, {}) for i in range(16))).save(tmp_path / "g")
    tracemalloc.start()
    assert sum(case.inputs["x"].size for case in GoldenSet.load(tmp_path / "g").cases) == 16 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20
