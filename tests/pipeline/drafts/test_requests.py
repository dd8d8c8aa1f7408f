import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from enginesmith.core.errors import DataError, InputError
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.recording.traffic import encode_inputs
from pipeline.drafts import probing
from pipeline.drafts.facts import FoundDim, FoundModel
from pipeline.drafts.requests import list_readings, observe_requests, read_requests, split_requests, write_samples
from pipeline.drafts.torch_model import look_at_module
from tests.pipeline.sources.exports import user_code_here
from validation.data.samples import Samples

__all__ = ["user_code_here"]  # a fixture


INPUTS = (TensorSpec("x", "float32", ("batch", 4)),)
DIMS = (Dim("batch", 1, 1, 8),)


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 4)).astype("f4")


def test_no_request_is_in_both_sets_in_any_order(tmp_path: Path) -> None:
    data = rows(50)
    np.savez(tmp_path / "a.npz", x=np.concatenate([data, data[:10]]))
    np.savez(tmp_path / "b.npz", x=data[::-1])
    requests, second_requests = (split_requests(tmp_path / f"{name}.npz", INPUTS, DIMS, "unit") for name in "ab")
    golden, calibration = ([item["x"].tobytes() for item in part] for part in (requests.golden, requests.calibration))
    assert len(golden) == 10 and len(calibration) == 40 and not set(golden) & set(calibration)
    assert [item["x"].tobytes() for item in second_requests.golden] == golden
    assert requests.left_out == ("10 requests left out: equal to others",)


def test_written_requests_are_read_as_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(6))
    split = split_requests(tmp_path / "a.npz", INPUTS, DIMS, "unit")
    write_samples(tmp_path / "golden.npz", split.golden)
    assert Samples.open(tmp_path / "golden.npz", INPUTS, DIMS).count == len(split.golden)


@pytest.mark.parametrize(("suffix", "recorded"), [(".jsonl", True), (".jsonl", False), (".json", False)])
def test_recorded_and_handwritten_requests_are_read(tmp_path: Path, suffix: str, recorded: bool) -> None:
    given_rows = rows(5)
    path = tmp_path / f"requests{suffix}"
    requests = [{"inputs": encode_inputs({"x": row[None]})} if recorded else {"x": row.tolist()} for row in given_rows]
    path.write_text(json.dumps(requests) if suffix == ".json" else "\n".join(map(json.dumps, requests)))
    items = [request["x"] for request in read_requests(path, INPUTS, DIMS, "unit")]
    np.testing.assert_array_equal(np.concatenate(items), given_rows)


@pytest.mark.parametrize(
    ("shape", "first"), [((1, 3, 8, 8), (1, 3, 8, 8)), ((1, 8, 8, 3), (1, 8, 8, 3)), ((1, 1, 8, 8), (1, 1, 8, 8))]
)
def test_images_are_cut_and_scaled(tmp_path: Path, shape: tuple[int, ...], first: tuple[int, ...]) -> None:
    for index in range(3):
        Image.fromarray(np.full((20, 30, 3), 100 + index, "u1")).save(tmp_path / f"{index}.png")
    spec = (TensorSpec("x", "float32", shape),)
    items = [request["x"] for request in read_requests(tmp_path, spec, (), "unit")]
    assert [array.shape for array in items] == [first] * 3
    np.testing.assert_allclose(items[0], 100 / 255, atol=1e-6)
    symmetric = next(iter(read_requests(tmp_path, spec, (), "symmetric")))["x"]
    np.testing.assert_allclose(symmetric, 200 / 255 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("a.json", "{", DataError, "is not JSON"),
        ("a.json", "[1]", DataError, "entry 0 is not an object"),
        ("a.json", '[{"y": 1}]', DataError, "has no input 'x'"),
        ("a.json", '[{"x": ["a", "b"]}]', DataError, "entry 0: input 'x' is not an array of numbers"),
        ("a.json", "[]", DataError, "holds no requests"),
        ("a.json", '[{"x": [1, 2, 3, 4]}, {"x": [1, 2, 3, 4]}]', DataError, "at least two are needed"),
        ("a.json", '[{"x": [1, 2, 3]}]', DataError, "request 0: .*size 3"),
        ("a.json", '{"x": [[1, 2, 3, 4]]}', DataError, "1 request, 1 of equal sizes.*give a list"),
        ("a.json", '{"inputs": [{"x": [1]}]}', DataError, "entry 0 is not an object of inputs.*list of such objects"),
        ("a.json", '[{"x": [1, 2, 3, NaN]}]', DataError, "request 0: input 'x' holds nan at .0, 3."),
        ("a.json", "[" * 100_000, DataError, "is not JSON"),
        ("a.json", '[{"x": [' + "9" * 5000 + "]}]", DataError, "is not JSON"),
        ("a.jsonl", '{"y": 1}', DataError, "a.jsonl:1 has no input 'x'"),
        ("a.json", '[{"x": [[1, 2], [3]]}]', DataError, "0: input 'x' is not an array of numbers: .*inhomogeneous"),
        ("a.csv", "1,2", InputError, "has the ending .csv; files of requests are .*jsonl"),
        ("a.png", "PNG", DataError, "images needs .* of 3 or 4 axes; this one has x with 2 axes"),
        ("b.json", None, InputError, "does not exist"),
    ],
)
def test_mistakes_name_the_file_and_the_cause(tmp_path, name, content, error, words):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=words):
        split_requests(path, INPUTS, DIMS, "unit")


def test_numbers_beyond_an_inputs_type_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"ids": [1.5]}, {"ids": [2]}]))
    with pytest.raises(DataError, match="entry 0: input 'ids' holds numbers that int64 cannot hold"):
        split_requests(path, (TensorSpec("ids", "int64", ("batch", 1)),), DIMS, "unit")


def test_batched_requests_of_any_size_are_split(tmp_path: Path) -> None:
    data, path = rows(30), tmp_path / "a.jsonl"
    groups = np.split(data, [1, 3, 6, 10, 15, 21, 28])
    path.write_text("\n".join(json.dumps({"inputs": {"x": group.tolist()}}) for group in groups))
    split = split_requests(path, INPUTS, DIMS, "unit")
    assert len(split.golden) + len(split.calibration) == 30 and not split.left_out and split.sizes == {"batch": 1}
    whole = split_requests(path, (TensorSpec("x", "float32", ("length", 4)),), (Dim("length", 1, 1, 8),), "unit")
    assert whole.sizes == {"length": 2} or len(whole.left_out) == 1, "another dim than the batch is no list of samples"


def test_a_folder_of_files_contains_all_requests(tmp_path: Path) -> None:
    for index, part in enumerate(np.split(rows(12), 3)):
        np.savez(tmp_path / f"{index}.npz", x=part)
    assert len(list(read_requests(tmp_path, INPUTS, DIMS, "unit"))) == 12


def test_a_sample_of_many_requests_equals_a_full_choice(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", rows(200))
    whole_requests = split_requests(tmp_path / "a.npy", INPUTS, DIMS, "unit")
    monkeypatch.setattr("pipeline.drafts.requests.MOST_CALIBRATION", 10)
    monkeypatch.setattr("pipeline.drafts.requests.MOST_GOLDEN", 5)
    few_requests = split_requests(tmp_path / "a.npy", INPUTS, DIMS, "unit")
    chosen = [item["x"].tobytes() for item in (*few_requests.golden, *few_requests.calibration)]
    assert chosen == [item["x"].tobytes() for item in (*whole_requests.golden, *whole_requests.calibration)][:15]
    assert few_requests.left_out == ("185 requests left out: beyond 10 for calibration",)
    monkeypatch.setattr("pipeline.drafts.requests.MOST_READ", 20)
    assert "only the first 20 requests were read" in split_requests(tmp_path / "a.npy", INPUTS, DIMS, "unit").left_out


def test_images_take_a_dims_tuned_size_and_integers_stay_bytes(tmp_path: Path) -> None:
    for index, size in enumerate([(20, 30), (64, 16)]):
        Image.fromarray(np.full((*size, 3), 100 + index, "u1")).save(tmp_path / f"{index}.png")
    spec = (TensorSpec("x", "uint8", ("batch", "height", "width", 3)),)
    dims = (*DIMS, Dim("height", 4, 8, 16), Dim("width", 4, 12, 16))
    items = [request["x"] for request in read_requests(tmp_path, spec, dims, "imagenet")]
    assert [array.shape for array in items] == [(1, 8, 12, 3)] * 2 and items[0].max() == 100


@pytest.mark.parametrize("damage", ["cut", "bomb", "chunk", "empty"])
def test_a_damaged_image_is_named(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3)).astype("u1")).save(path)
    data = path.read_bytes()
    changed_fields = {"cut": data[:400], "bomb": data, "chunk": data[:60] + bytes(200) + data[260:], "empty": b""}
    path.write_bytes(changed_fields[damage])
    if damage == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"a\.png is not an image that can be read"):
        list(read_requests(tmp_path, (TensorSpec("x", "float32", (1, 3, 8, 8)),), (), "unit"))


def test_an_archive_of_zeros_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.drafts.requests.MOST_READ", 10_000)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((30_000, 4), "f4"))
    with pytest.raises(DataError, match="holds 10000 requests, 1 of equal sizes that differ"):
        split_requests(tmp_path / "a.npz", INPUTS, DIMS, "unit")


@pytest.mark.parametrize(("lengths", "length"), [(range(1, 9), 5), ([2, 3, 3, 5], 3)])
def test_few_requests_of_equal_size_are_cut_or_repeated(tmp_path: Path, lengths: list[int], length: int) -> None:
    lines = [{"x": [[n + 0.25 * k for k in range(count)]]} for n, count in enumerate(lengths)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    inputs, dims = (TensorSpec("x", "float32", ("batch", "length")),), (Dim("batch", 1, 1, 1), Dim("length", 1, 4, 99))
    split = split_requests(tmp_path / "a.jsonl", inputs, dims, "unit")
    items = [request["x"] for request in (*split.calibration, *split.golden)]
    assert len(items) == len(lines) and {array.shape for array in items} == {(1, length)}
    assert "cut or repeated to x" in split.left_out[0] and split.ranges["length"] == (min(lengths), max(lengths))
    (tmp_path / "b.jsonl").write_text('{"x": [[0, 1]]}\n{"x": [[0, 1, 0, 1]]}')
    with pytest.raises(DataError, match="2 requests, 1 of equal sizes that differ"):
        split_requests(tmp_path / "b.jsonl", inputs, dims, "unit")
    inputs, splits = (replace(inputs[0], shape=("batch", "length", "width")),), []
    for order in (1, -1):
        (tmp_path / "c.json").write_text(json.dumps([{"x": [[[1, 2]]]}, {"x": [[[3], [4]]]}][::order]))
        splits.append(split_requests(tmp_path / "c.json", inputs, (*dims, Dim("width", 1, 2, 9)), "unit"))
    assert splits[0].sizes == splits[1].sizes


@pytest.mark.parametrize(("failing", "expected"), [((4, 16), (4, 128)), ((4, 128), (16, 16)), ((4,), (16, 128))])
def test_a_dim_is_fixed_only_if_requests_fail_at_other_sizes(failing, expected, monkeypatch) -> None:
    def run(inputs):
        if (size := inputs["ids"].shape[1]) in failing:
            raise ValueError(f"no {size}")

    model = FoundModel("m", {}, (TensorSpec("ids", "int64", ("b", "seq")),), (), {"seq": FoundDim(4, 16, 128, "ran")})
    dim = probing.hold_samples(model, run, [{"ids": np.ones((2, 16), int)}], {"seq": (16, 16)}).dims["seq"]
    assert (dim.min, dim.max) == expected
    assert dim.why == "ran" if 16 in failing else dim.why.endswith(f"to {failing[-1]} fail: no {failing[-1]}")
    monkeypatch.setattr(probing, "_SECONDS", -1)
    assert probing.hold_samples(model, run, [{"ids": np.ones((2, 16), int)}], {"seq": (16, 16)}) == model


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_every_distinct_request_is_used_once(values: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        np.save(path, np.array(values, "f4")[:, None].repeat(4, 1))
        if len(set(values)) < 2:
            with pytest.raises(DataError):
                split_requests(path, INPUTS, DIMS, "unit")
            return
        split = split_requests(path, INPUTS, DIMS, "unit")
        used_values = sorted(float(item["x"][0, 0]) for item in (*split.golden, *split.calibration))
        assert used_values == sorted(set(values)) and split.golden and split.calibration


torch = pytest.importorskip("torch")

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.rest = first, nn.GRU(4, 4, batch_first=True)
    def forward(self, x): return self.rest(self.first(x))[0]
class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
    def forward(self, a, b, scale=None): return self.first(a) + b * (1 if scale is None else scale)
def sequence(): return Net(nn.Linear(3, 4))
def convolved(): return nn.Conv1d(3, 4, 3, padding=1)
def two(): return Sum()
"""


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def only_one(probe: object, name: str, sizes: dict[str, int]) -> FoundDim:
    """What is found of a dim when the time is over."""
    return FoundDim(sizes[name], sizes[name], sizes[name], "the time was over")


def look(folder: Path, function: str, **arrays: np.ndarray):
    (folder / "nets.py").write_text(CODE)
    np.savez(folder / "requests.npz", **arrays)
    return look_at_module(folder, f"nets.py:{function}", folder / "requests.npz")


@pytest.mark.parametrize("shape", [(9, 6, 3), (9, 1, 6, 3)])
def test_a_linear_layer_does_not_determine_the_rank(tmp_path: Path, shape: tuple[int, ...]) -> None:
    facts = look(tmp_path, "sequence", x=floats(*shape))
    assert facts.inputs == (TensorSpec("x", "float32", ("batch", 6, 3)),) and facts.dims["batch"].max > 1
    assert "input x: float32 [batch, 6, 3], as in the requests" in facts.notes


def test_undetermined_and_optional_inputs_follow_the_requests(tmp_path: Path) -> None:
    facts = look(tmp_path, "two", a=floats(5, 3), b=floats(5, 3), scale=floats(5, 3))
    assert not facts.unknown
    assert [spec.name for spec in facts.inputs] == ["a", "b", "scale"]
    assert look(tmp_path, "two", a=floats(5, 3)).unknown, "b has no default"


@pytest.mark.parametrize(
    ("function", "arrays", "message"),
    [
        ("two", {"a": (5, 3)}, "has no array 'b': it holds a; the model wants a, b"),
        ("two", {"a": (5, 3), "b": (5, 3), "label": (5, 1)}, "has an array 'label' that nothing asks for"),
        ("two", {"a": (5, 3), "b": (4, 3)}, "array 'b' has 4 samples, but 'a' has 5"),
        ("sequence", {"x": (5, 6, 2)}, "the model does not run with the first request: "),
    ],
)
def test_the_error_explains_why_requests_do_not_fit(tmp_path, function, arrays, message):
    assert message in look(tmp_path, function, **{name: floats(*shape) for name, shape in arrays.items()}).refused
    assert not look(tmp_path, "sequence", x=floats(9, 6, 3)).refused


def test_a_fixed_size_equals_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing._Probe, "bounds", only_one)
    assert look(tmp_path, "convolved", input=floats(9, 3, 100)).inputs[0].shape == (1, 3, 100)


def test_varying_sizes_become_a_dim_with_their_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets.py").write_text(CODE)
    lines = [json.dumps({"inputs": {"x": floats(1, length, 3).tolist()}}) for length in (6, 9, 6)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(probing._Probe, "bounds", only_one)
    module = look_at_module(tmp_path, "nets.py:sequence", tmp_path / "requests.jsonl")
    assert module.inputs == (TensorSpec("x", "float32", (1, "length", 3)),)
    assert (module.dims["length"].min, module.dims["length"].opt, module.dims["length"].max) == (6, 6, 9)


def test_file_types_determine_the_content(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 2), np.int64))
    assert observe_requests(tmp_path / "x.npy")[""].dtype == "int64"
    (tmp_path / "x.json").write_text(json.dumps([{"x": [[1, 2]]}, {"x": [[1, 2, 3]]}]))
    result = observe_requests(tmp_path / "x.json")["x"]
    assert (result.dtype, result.kind, result.sizes, result.stacked) == ("", "i", ((1, 1), (2, 3)), False)
    assert observe_requests(tmp_path) == observe_requests(tmp_path / "x.json"), "a folder of them"
    (tmp_path / "x.json").write_text("no JSON")
    assert observe_requests(tmp_path / "x.json") == {}, "who reads them all says what is wrong"


def test_a_layer_with_a_fixed_rank_separates_samples_from_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=floats(9, 2, 6, 3))
    observation, guess = observe_requests(tmp_path / "x.npz"), [TensorSpec("x", "float32", ("batch", "length", 3))]
    first_shape, shape = (reading.inputs[0].shape for reading in list_readings(guess, observation, any_rank=False))
    assert (first_shape, shape) == (("batch", "length", 3), ("batch", 2, 6, 3))
    assert next(list_readings(guess, observation, any_rank=True)).inputs[0].shape == ("batch", 2, 6, 3)
    assert [*list_readings([TensorSpec("y", "", ())], observation, any_rank=False)] == []
