from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec
from validation.data.generated import GeneratedSamples
from validation.data.samples import Samples

IMAGE = TensorSpec("image", "float32", ("batch", 1, 4, 4))
MASK = TensorSpec("mask", "int64", ("batch", 3))
BATCH = Dim("batch", 1, 8, 32)
IMAGES = np.random.default_rng(0).standard_normal((11, 1, 4, 4)).astype(np.float32)


def opened(path: Path, *inputs: TensorSpec) -> Samples:
    return Samples.open(path, inputs or (IMAGE,), (BATCH,))


def seen(samples, *span: int) -> np.ndarray:
    return np.concatenate([inputs["image"] for _, inputs in samples.runs(*span)])


def one_file_each(folder: Path, images: np.ndarray = IMAGES) -> Path:
    folder.mkdir(exist_ok=True)
    for index, image in enumerate(images):
        np.save(folder / f"{index:03}.npy", image)
    return folder


def test_a_folder_holds_one_sample_per_file(tmp_path):
    samples = opened(one_file_each(tmp_path / "data"))
    np.testing.assert_array_equal(seen(samples), IMAGES)
    assert samples.count == 11 and [len(batch["image"]) for batch in samples.batches()] == [8, 3]


def test_files_with_a_batch_axis_are_complete_inputs(tmp_path):
    samples = opened(one_file_each(tmp_path / "data", IMAGES[:10].reshape(5, 2, 1, 4, 4)))
    assert samples.complete and [len(batch["image"]) for batch in samples.batches()] == [2] * 5


def test_a_folder_may_hold_a_file_or_a_folder_for_each_input(tmp_path):
    masks = np.ones((11, 3), np.int64)
    np.save(tmp_path / "image.npy", IMAGES)
    np.save(tmp_path / "mask.npy", masks)
    np.testing.assert_array_equal(seen(opened(tmp_path, IMAGE, MASK)), IMAGES)
    other_path = tmp_path / "folders"
    other_path.mkdir()
    one_file_each(other_path / "image")
    one_file_each(other_path / "mask", masks)
    np.testing.assert_array_equal(seen(opened(other_path, IMAGE, MASK)), IMAGES)


def test_a_folder_that_fits_no_layout_says_what_to_write(tmp_path):
    one_file_each(tmp_path)
    with pytest.raises(DataError, match=r"must hold image.npy, mask.npy, or a folder"):
        opened(tmp_path, IMAGE, MASK)


def test_a_file_of_another_shape_is_named_by_index(tmp_path):
    folder = one_file_each(tmp_path / "data")
    np.save(folder / "004.npy", IMAGES[0, :, :3])
    with pytest.raises(DataError, match=r"004.npy \(sample 4\) has shape \(1, 3, 4\)"):
        opened(folder)


def test_nan_in_one_file_is_named_by_index(tmp_path):
    folder = one_file_each(tmp_path / "data")
    np.save(folder / "007.npy", np.full((1, 4, 4), np.nan, np.float32))
    with pytest.raises(DataError, match=r"holds nan in sample 7"):
        seen(opened(folder))


def test_the_digest_of_a_folder_is_over_names_and_contents(tmp_path):
    digest = opened(one_file_each(tmp_path / "a")).digest
    assert digest == opened(one_file_each(tmp_path / "b")).digest
    (tmp_path / "b" / "000.npy").rename(tmp_path / "b" / "900.npy")
    assert digest != opened(tmp_path / "b").digest


def test_safetensors_are_streamed(tmp_path):
    path = tmp_path / "data.safetensors"
    save_file({"mask": np.ones((11, 3), np.int64), "image": IMAGES}, path, {"origin": "test"})
    np.testing.assert_array_equal(seen(opened(path, IMAGE, MASK)), IMAGES)
    np.testing.assert_array_equal(seen(opened(path, IMAGE, MASK), 3, 7), IMAGES[3:7])


@pytest.mark.parametrize("cut", [3, 20, 200, -4])
def test_truncated_safetensors_are_refused(tmp_path, cut):
    path = tmp_path / "data.safetensors"
    save_file({"image": IMAGES}, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"data.safetensors.*write it again"):
        opened(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_runs_of_one_sample_can_start_anywhere(tmp_path, save):
    save(tmp_path / "data.npz", image=IMAGES)
    samples = opened(tmp_path / "data.npz")
    assert [(stop, len(inputs["image"])) for stop, inputs in samples.runs(9)] == [(10, 1), (11, 1)]
    np.testing.assert_array_equal(seen(samples, 2, 99), IMAGES[2:])


def generated(*items: object) -> GeneratedSamples:
    return GeneratedSamples(lambda: iter(items), "data.py:samples", "0" * 64, (IMAGE,), (BATCH,))


def test_a_generator_yields_samples_or_batches():
    samples = generated({"image": IMAGES[0]}, {"image": IMAGES[1:3]})
    assert [(stop, inputs["image"].shape[0]) for stop, inputs in samples.runs()] == [(1, 1), (2, 2)]
    assert [stop for stop, _ in samples.runs(1, 2)] == [2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1], "sample 1 is a list; yield a dict"),
        ({}, "sample 1 lacks the input 'image'"),
        ({"image": IMAGES[0], "mask": 1}, "sample 1 has an array 'mask'"),
        ({"image": IMAGES[0].astype(float)}, "sample 1: 'image' is float64"),
        ({"image": IMAGES[0] * np.nan}, "sample 1: 'image' holds NaN"),
        ({"image": IMAGES[0, :, :2]}, "sample 1: tensor 'image' has shape"),
        ({"image": np.zeros((33, 1, 4, 4), np.float32)}, "sample 1: batch is 33, outside 1..32"),
    ],
)
def test_a_bad_generated_sample_is_named_by_index(bad, message):
    with pytest.raises(DataError, match=message):
        list(generated({"image": IMAGES[0]}, bad).runs())


def test_a_failing_or_empty_generator_is_a_data_error():
    def failing():
        yield {"image": IMAGES[0]}
        raise OSError("disk on fire")

    with pytest.raises(DataError, match=r"data.py:samples failed after sample 0: OSError: disk on fire"):
        list(GeneratedSamples(failing, "data.py:samples", "0" * 64, (IMAGE,), (BATCH,)).runs())
    with pytest.raises(DataError, match="gave no samples"):
        list(generated().runs())
