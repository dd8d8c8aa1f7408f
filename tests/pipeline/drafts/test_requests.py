"""Calibration and golden data out of saved requests."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginery.core.errors import DataError, InputError
from enginery.core.types import Dim, TensorSpec
from enginery.recording.traffic import encode_inputs
from pipeline.drafts.requests import read_requests, split_requests, write_samples
from validation.data.samples import Samples

INPUTS = (TensorSpec("x", "float32", ("batch", 4)),)
DIMS = (Dim("batch", 1, 1, 8),)


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 4)).astype("f4")


def test_no_request_is_in_both_and_the_order_of_the_file_changes_nothing(tmp_path: Path) -> None:
    data = rows(50)
    np.savez(tmp_path / "a.npz", x=np.concatenate([data, data[:10]]))
    np.savez(tmp_path / "b.npz", x=data[::-1])
    first, second = (split_requests(tmp_path / f"{name}.npz", INPUTS, DIMS, "unit") for name in "ab")
    golden, calibration = ([item["x"].tobytes() for item in part] for part in (first.golden, first.calibration))
    assert len(golden) == 10 and len(calibration) == 40 and not set(golden) & set(calibration)
    assert [item["x"].tobytes() for item in second.golden] == golden
    assert first.left_out == ("10 requests left out: equal to others",)


def test_what_is_written_is_read_as_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(6))
    split = split_requests(tmp_path / "a.npz", INPUTS, DIMS, "unit")
    write_samples(tmp_path / "golden.npz", split.golden)
    samples = Samples.open(tmp_path / "golden.npz", INPUTS, DIMS)
    assert samples.count == len(split.golden)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_recorded_and_handwritten_requests(tmp_path: Path, suffix: str) -> None:
    given_rows = rows(5)
    path = tmp_path / f"requests{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"inputs": encode_inputs({"x": row[None]})}) for row in given_rows))
    else:
        path.write_text(json.dumps([{"x": row.tolist()} for row in given_rows]))
    found = [request["x"] for request in read_requests(path, INPUTS, DIMS, "unit")]
    np.testing.assert_array_equal(np.concatenate(found), given_rows)


@pytest.mark.parametrize(
    ("shape", "first"), [((1, 3, 8, 8), (1, 3, 8, 8)), ((1, 8, 8, 3), (1, 8, 8, 3)), ((1, 1, 8, 8), (1, 1, 8, 8))]
)
def test_images_are_cut_and_scaled(tmp_path: Path, shape: tuple[int, ...], first: tuple[int, ...]) -> None:
    from PIL import Image

    for index in range(3):
        Image.fromarray(np.full((20, 30, 3), 100 + index, "u1")).save(tmp_path / f"{index}.png")
    spec = (TensorSpec("x", "float32", shape),)
    found = [request["x"] for request in read_requests(tmp_path, spec, (), "unit")]
    assert [array.shape for array in found] == [first] * 3
    np.testing.assert_allclose(found[0], 100 / 255, atol=1e-6)
    symmetric = next(iter(read_requests(tmp_path, spec, (), "symmetric")))["x"]
    np.testing.assert_allclose(symmetric, 200 / 255 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("a.json", "{", DataError, "is no JSON"),
        ("a.json", "[1]", DataError, "entry 0 is no object"),
        ("a.json", '[{"y": 1}]', DataError, "has no input 'x'"),
        ("a.json", '[{"x": ["a", "b"]}]', DataError, "is no array of float32"),
        ("a.json", "[]", DataError, "holds no requests"),
        ("a.json", '[{"x": [1, 2, 3, 4]}, {"x": [1, 2, 3, 4]}]', DataError, "two are the least"),
        ("a.json", '[{"x": [1, 2, 3]}]', DataError, "size 3"),
        ("b.json", None, InputError, "does not exist"),
        ("a.parquet", "PAR1", InputError, "pyarrow"),
    ],
)
def test_mistakes_name_the_file_and_what_is_wrong(
    tmp_path: Path, name: str, content: str | None, error: type[Exception], words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    if name.endswith("parquet") and find_spec("pyarrow"):
        pytest.skip("pyarrow is here")
    with pytest.raises(error, match=words):
        split_requests(path, INPUTS, DIMS, "unit")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_however_many_there_are_each_different_one_is_used_once(values: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        np.save(path, np.array(values, "f4")[:, None].repeat(4, 1))
        if len(set(values)) < 2:
            with pytest.raises(DataError):
                split_requests(path, INPUTS, DIMS, "unit")
            return
        split = split_requests(path, INPUTS, DIMS, "unit")
        used = sorted(float(item["x"][0, 0]) for item in (*split.golden, *split.calibration))
        assert used == sorted(set(values)) and split.golden and split.calibration
