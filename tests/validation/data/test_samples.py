import itertools
import tracemalloc
import warnings
import zipfile
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.arrays import check_inputs, stored_arrays
from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec
from validation.data.samples import Samples, resize, sizes_of

IMAGE = TensorSpec("image", "float32", ("batch", 1, 4, 4))
BATCH = Dim("batch", 1, 8, 32)


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 1, 4, 4)).astype(np.float32)


def opened(path: Path, **kwargs) -> Samples:
    return Samples.open(path, kwargs.pop("inputs", [IMAGE]), kwargs.pop("dims", [BATCH]), **kwargs)


def saved(tmp_path: Path, **arrays) -> Path:
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path / "data.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_batches_give_every_sample_once_in_order(tmp_path, save):
    data = images(21)
    save(tmp_path / "data.npz", image=data, label=np.arange(21))
    samples = opened(tmp_path / "data.npz", extra=["label"])
    batches = [batch["image"] for batch in samples.batches()]
    assert [len(batch) for batch in batches] == [8, 8, 5]
    np.testing.assert_array_equal(np.concatenate(batches), data)
    np.testing.assert_array_equal(samples.column("label"), np.arange(21))
    assert samples.count == 21


@given(count=st.integers(1, 40), size=st.integers(1, 50))
def test_any_group_size_gives_the_same_samples(tmp_path_factory, count, size):
    path = tmp_path_factory.mktemp("any") / "data.npy"
    np.save(path, images(count))
    batches = [batch["image"] for batch in opened(path).batches(size)]
    assert all(len(batch) == min(size, 32) for batch in batches[:-1])
    np.testing.assert_array_equal(np.concatenate(batches), images(count))


def test_a_static_leading_size_groups_by_it(tmp_path):
    static_spec = TensorSpec("image", "float32", (4, 1, 4, 4))
    path = saved(tmp_path, image=images(12))
    assert [len(batch["image"]) for batch in opened(path, inputs=[static_spec], dims=[]).batches(7)] == [4, 4, 4]
    with pytest.raises(DataError, match=r"13 samples in groups of 4 leave 1.*drop 1 or add 3"):
        opened(saved(tmp_path, image=images(13)), inputs=[static_spec], dims=[])


def test_sizes_of_samples_and_of_groups_are_multiples(tmp_path):
    dims = [Dim("batch", 2, 6, 8, multiple=2), Dim("side", 32, 32, 96, multiple=32)]
    spec = TensorSpec("image", "float32", ("batch", "side"))
    data = np.zeros((10, 64), np.float32)
    samples = opened(saved(tmp_path, image=data), inputs=[spec], dims=dims)
    assert [len(batch["image"]) for batch in samples.batches()] == [6, 4]
    assert [len(batch["image"]) for batch in samples.batches(5)] == [4, 4, 2]
    with pytest.raises(DataError, match=r"side = 80 on axis 1, outside 32\.\.96 in steps of 32; crop or pad"):
        opened(saved(tmp_path, image=data.repeat(2, 1)[:, :80]), inputs=[spec], dims=dims)
    with pytest.raises(DataError, match=r"leave 3, but a group needs 2 or more in steps of 2; drop 1 or add 1"):
        opened(saved(tmp_path, image=data[:9]), inputs=[spec], dims=dims)


def test_a_folder_holds_inputs_whose_names_have_slashes(tmp_path):
    inputs = [TensorSpec(name, "float32", ("batch", 2)) for name in ("387", "encoder/x:0")]
    (tmp_path / "encoder").mkdir()
    for index, spec in enumerate(inputs):
        np.save(tmp_path / f"{spec.name}.npy", np.full((4, 2), index, np.float32))
    (batch,) = opened(tmp_path, inputs=inputs).batches()
    assert batch["387"].max() == 0 and batch["encoder/x:0"].min() == 1
    for name in ("../data", "/data"):
        with pytest.raises(DataError, match=r"store the inputs in one \.npz"):
            opened(tmp_path, inputs=[inputs[0], TensorSpec(name, "float32", ("batch", 2))])


def test_a_folder_holds_a_folder_for_each_input_whose_names_have_slashes(tmp_path):
    inputs = [TensorSpec(name, "float32", (1, 2)) for name in ("387", "encoder/x:0")]
    for spec in inputs:
        (tmp_path / spec.name).mkdir(parents=True)
        np.save(tmp_path / spec.name / "0.npy", np.zeros((1, 2), np.float32))
    assert opened(tmp_path, inputs=inputs, dims=[]).count == 1


def test_one_rank_more_holds_complete_inputs(tmp_path):
    path = saved(tmp_path, image=images(6).reshape(3, 2, 1, 4, 4))
    samples = opened(path)
    assert samples.complete
    assert [batch["image"].shape for batch in samples.batches(99)] == [(2, 1, 4, 4)] * 3


def test_a_batch_dim_that_is_also_an_inner_axis_fixes_the_batch_size(tmp_path):
    square = TensorSpec("x", "float32", ("n", "n"))
    path = saved(tmp_path, x=np.ones((9, 3), np.float32))
    batches = list(opened(path, inputs=[square], dims=[Dim("n", 1, 4, 8)]).batches())
    assert [batch["x"].shape for batch in batches] == [(3, 3)] * 3


def test_big_endian_data_becomes_native(tmp_path):
    path = saved(tmp_path, image=images(3).astype(">f4"))
    (batch,) = opened(path).batches()
    assert batch["image"].dtype == np.float32
    np.testing.assert_array_equal(batch["image"], images(3))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_memory_depends_on_the_batch_not_the_file(tmp_path, save):
    big_spec = TensorSpec("x", "float32", ("batch", 1024))
    save(tmp_path / "big.npz", x=np.ones((16_384, 1024), np.float32))  # 64 MiB
    samples = opened(tmp_path / "big.npz", inputs=[big_spec])
    tracemalloc.start()
    assert sum(len(batch["x"]) for batch in samples.batches(32)) == 16_384
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_the_digest_is_the_files(tmp_path):
    first_digest = opened(saved(tmp_path, image=images(3))).digest
    assert opened(saved(tmp_path, image=images(3) + 1)).digest != first_digest


def nan_at(index: int, value: float = np.nan) -> np.ndarray:
    data = images(20)
    data[index, 0, 1, 2] = value
    return data


@pytest.mark.parametrize(("value", "message"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_non_finite_values_name_the_sample(tmp_path, value, message):
    samples = opened(saved(tmp_path, image=nan_at(13, value)))
    with pytest.raises(DataError, match=rf"array 'image' holds {message} in sample 13; remove"):
        list(samples.batches())


WRONG = {
    "dtype": ({"image": images(3).astype(np.float64)}, r"'image' is float64; the input is float32.*astype"),
    "static axis": ({"image": np.ones((3, 2, 4, 4), np.float32)}, r"axis 1 must be 1"),
    "rank": ({"image": np.ones((3, 4), np.float32)}, r"shape \(3, 4\).*same rank"),
    "no samples": ({"image": images(0)}, r"'image' has no samples"),
    "scalar": ({"image": np.float32(1)}, r"give the same rank"),
    "misspelt": ({"imgae": images(3)}, r"it holds imgae; the model wants image; did you mean 'imgae'\? rename"),
    "unasked": ({"image": images(3), "l": np.arange(3)}, r"'l' that nothing asks for: it holds image, l; the model"),
    "objects": ({"image": np.array([{}, 1], dtype=object)}, r"'image' holds Python objects.*never unpickled"),
    "structured": ({"image": np.zeros(3, [("a", "f4")])}, r"structured array"),
    "fortran": ({"image": np.asfortranarray(images(3).repeat(2, 1))}, r"Fortran order.*ascontiguousarray"),
    "empty archive": ({}, r"no array 'image': it holds none; the model wants image; rename"),
}


@pytest.mark.parametrize("arrays, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_arrays_are_named(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message) as error:
        opened(saved(tmp_path, **arrays))
    assert str(tmp_path / "data.npz") in str(error.value)


PAIR = [TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "int64", ("batch", "seq"))]
PAIR_DIMS = [Dim("batch", 2, 4, 8), Dim("seq", 1, 8, 16)]


def pair(ids: tuple[int, ...], mask: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"ids": np.zeros(ids, np.int64), "mask": np.zeros(mask, np.int64)}


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ((4, 8), (5, 8), r"'mask' has 5 samples, but 'ids' has 4"),
        ((4, 8), (4, 9), r"'mask' has seq = 9 on axis 1 and 8 elsewhere"),
        ((4, 17), (4, 17), r"seq = 17 on axis 1, outside 1..16; crop or pad.*dims.seq"),
        ((5, 8), (5, 8), r"5 samples in groups of 4 leave 1, but a group needs 2 or more; drop 1 or add 1"),
        ((4, 8), (4, 2, 8), r"some arrays hold one complete input"),
    ],
)
def test_inputs_must_agree(tmp_path, ids, mask, message):
    with pytest.raises(DataError, match=message):
        opened(saved(tmp_path, **pair(ids, mask)), inputs=PAIR, dims=PAIR_DIMS)


def test_different_leading_sizes_cannot_be_grouped(tmp_path):
    inputs = [TensorSpec("a", "int64", ("batch", 2)), TensorSpec("b", "int64", ("other", 2))]
    with pytest.raises(DataError, match=r"leading sizes differ \(batch, other\).*complete input"):
        opened(saved(tmp_path, a=np.zeros((4, 2), int), b=np.zeros((4, 2), int)), inputs=inputs, dims=PAIR_DIMS)


def damaged(path: Path, kind: str) -> Path:
    data = bytearray(path.read_bytes())
    if kind == "flipped":
        data[len(data) // 2] ^= 1
    contents = {"empty": b"", "garbage": b"no array" * 99, "truncated": bytes(data[:-40]), "flipped": bytes(data)}
    path.write_bytes(contents[kind])
    return path


def save_packed(method: int, path: Path, **arrays):
    np.savez(path, **arrays)
    with zipfile.ZipFile(path) as plain_file:
        members = {name: plain_file.read(name) for name in plain_file.namelist()}
    with zipfile.ZipFile(path, "w", method) as packed_file:
        for name, data in members.items():
            packed_file.writestr(name, data)


@pytest.mark.parametrize("kind", ["empty", "garbage", "truncated", "flipped"])
@pytest.mark.parametrize(
    "save",
    [np.savez, np.savez_compressed, partial(save_packed, zipfile.ZIP_BZIP2), partial(save_packed, zipfile.ZIP_LZMA)],
    ids=["stored", "deflated", "bzip2", "lzma"],
)
def test_a_damaged_archive_is_a_data_error(tmp_path, save, kind):
    save(tmp_path / "data.npz", image=images(200))
    with pytest.raises(DataError, match=r"data.npz.*write it again"):
        list(opened(damaged(tmp_path / "data.npz", kind)).batches())


def test_a_truncated_npy_is_refused_by_its_length(tmp_path):
    np.save(tmp_path / "data.npy", images(9))
    with pytest.raises(DataError, match=r"truncated or damaged"):
        opened(damaged(tmp_path / "data.npy", "truncated"))


def test_a_header_that_lies_about_its_shape_is_refused(tmp_path):
    np.save(tmp_path / "data.npy", images(9))
    data = (tmp_path / "data.npy").read_bytes().replace(b"(9, 1, 4, 4)", b"(-9,-1,4, 4)")
    (tmp_path / "data.npy").write_bytes(data)
    with pytest.raises(DataError, match=r"truncated or damaged"):
        opened(tmp_path / "data.npy")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        opened(tmp_path / "none.npz")
    with pytest.raises(DataError, match=r"must hold image\.npy, .* or just \.npy files, .*; it holds nothing"):
        opened(tmp_path)
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("data.pkl", b"\x80\x04N.")
    with pytest.raises(DataError, match=r"'data.pkl' cannot be read"):
        opened(tmp_path / "data.npz")
    np.save(tmp_path / "one.npy", images(3))
    with pytest.raises(DataError, match=r"single array; image, label are needed"):
        opened(tmp_path / "one.npy", extra=["label"])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("data.npz", r"it holds data\.npz: name that file, [^ ]*/data\.npz$"),
        ("traffic.jsonl", "it holds traffic.jsonl: `enginesmith init MODEL --from-requests"),
        ("notes.txt", r"it holds notes\.txt$"),
    ],
)
def test_a_folder_without_arrays_lists_its_content(tmp_path, file, words):
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(DataError, match=r"must hold image\.npy, or a folder of \.npy files.*" + words):
        opened(tmp_path)


def test_saved_requests_are_no_stored_arrays(tmp_path):
    (tmp_path / "traffic.jsonl").write_text('{"inputs": {"image": [[1]]}}\n')
    with pytest.raises(DataError, match=r"holds no stored arrays; `enginesmith init MODEL --from-requests .*traffic"):
        opened(tmp_path / "traffic.jsonl")


def test_columns_are_named(tmp_path):
    samples = opened(saved(tmp_path, image=images(3), label=np.arange(3)), extra=["label"])
    with pytest.raises(DataError, match=r"no array 'labl'; did you mean 'label'"):
        samples.column("labl")


SPEC = TensorSpec("x", "float32", ("batch", 2, "seq"))


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 12), st.integers(1, 12))
def test_resize_takes_elements_modulo_length(batch, seq, new_batch, new_seq):
    x = np.arange(batch * 2 * seq, dtype=np.float32).reshape(batch, 2, seq)
    resized_inputs = resize({"x": x}, [SPEC], {"batch": new_batch, "seq": new_seq})
    assert sizes_of(resized_inputs, [SPEC]) == {"batch": new_batch, "seq": new_seq}
    assert resized_inputs["x"][-1, 1, -1] == x[(new_batch - 1) % batch, 1, (new_seq - 1) % seq]


def test_places_and_lengths_stay_within_a_cut_dim():
    specs = [TensorSpec("x", "float32", ("nodes", 4)), TensorSpec("ends", "int64", (2, "edges"))]
    specs += [TensorSpec(name, "int64", (3,)) for name in ("lengths", "ids", "mask")]
    specs += [TensorSpec("atoms", "int64", ("nodes", 1)), TensorSpec("pixels", "uint8", (2, 9))]
    tensors = {"x": np.ones((9, 4), np.float32), "ends": np.arange(18).reshape(2, 9) % 9}
    tensors |= {"lengths": np.array([9, 7, 1]), "ids": np.array([10, 7, 1]), "mask": np.array([0, 1, 1])}
    tensors |= {"atoms": 8 - np.arange(9)[:, None], "pixels": tensors["ends"].astype(np.uint8)}
    result = resize(tensors, specs, {"nodes": 5})
    assert result["ends"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]] * 2 and result["lengths"].tolist() == [5, 5, 1]
    assert all((result[name] == tensors[name]).all() for name in ("ids", "mask", "pixels"))
    steps = [TensorSpec("x", "float32", ("batch", "time")), TensorSpec("lengths", "int64", ("batch",))]
    cut_arrays = resize({"x": np.ones((2, 10)), "lengths": np.array([7, 10])}, steps, {"batch": 1, "time": 4})
    assert cut_arrays["lengths"].tolist() == [4], "the longest sample is cut too"
    assert result["atoms"].ravel().tolist() == [8, 7, 6, 5, 4]
    assert (resize(tensors, specs, {"nodes": 12})["ends"] == tensors["ends"]).all()
    specs = [TensorSpec("ids", "int64", ("batch", "tokens")), TensorSpec("places", "int64", (1, 8))]
    ids = np.arange(800).reshape(8, 100) % 8
    result = resize({"ids": ids, "places": ids[:1, :8]}, specs, {"batch": 2, "tokens": 4})
    assert (result["ids"] == ids[:2, :4]).all() and (result["places"] == ids[:1, :8]).all()


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(DataError, match="empty along 'seq'"):
        resize({"x": np.ones((1, 2, 0), np.float32)}, [SPEC], {"seq": 3})
    with pytest.raises(DataError, match="another rank"):
        sizes_of({"x": np.ones((1, 2), np.float32)}, [SPEC])
    with pytest.raises(DataError, match="seq is 3 here and 2 elsewhere"):
        sizes_of({"x": np.ones((1, 2, 2)), "y": np.ones((1, 3))}, [SPEC, TensorSpec("y", "float32", ("batch", "seq"))])
    with pytest.raises(DataError, match="'x' is missing"):
        sizes_of({}, [SPEC])


IDS, PAST = TensorSpec("ids", "int64", ("batch", "tokens")), TensorSpec("past", "float32", ("batch", "past"))
MASK = TensorSpec("mask", "int64", ("batch", "past + tokens"))


def test_a_sum_follows_from_the_sizes_of_its_dims(tmp_path):
    tensors = {"ids": np.ones((1, 2), int), "past": np.ones((1, 3), np.float32), "mask": np.ones((1, 5), int)}
    specs = [MASK, IDS, PAST]
    assert sizes_of(tensors, specs) == {"batch": 1, "tokens": 2, "past": 3}
    assert resize(tensors, specs, {"past": 7, "batch": 2})["mask"].shape == (2, 9)
    assert check_inputs(specs, tensors) == sizes_of(tensors, specs)
    tensors["mask"] = np.ones((1, 4), int)
    for check in (lambda: sizes_of(tensors, specs), lambda: check_inputs(specs, tensors)):
        with pytest.raises(DataError, match=r"'mask' has size 4 on axis 1, but 'past \+ tokens' is 5"):
            check()


def test_stored_arrays_are_as_long_as_a_sum_of_their_dims(tmp_path):
    dims = [Dim(name, 1, 1, 4) for name in ("batch", "tokens", "past")]
    for length, message in ((5, None), (6, "has 6 along 'past \\+ tokens', which is 5")):
        mask = np.ones((3, length), int)
        path = saved(tmp_path, ids=np.ones((3, 2), int), past=np.ones((3, 3), "f4"), mask=mask)
        with pytest.raises(DataError, match=message) if message else nullcontext():
            assert len(list(opened(path, inputs=[IDS, PAST, MASK], dims=dims).batches())) == 3


def test_labels_are_numbers(tmp_path):
    samples = opened(saved(tmp_path, image=images(2), label=np.array(["cat", "dog"])), extra=["label"])
    with pytest.raises(DataError, match="'label' is <U3; store integers"):
        samples.column("label")


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 4))
def test_parts_are_disjoint_and_cover_everything(tmp_path_factory, count, of, group):
    path = tmp_path_factory.mktemp("parts") / "x.npy"
    np.save(path, np.zeros((count * group, 3), np.float32))
    samples = Samples.open(path, [TensorSpec("x", "float32", (group, 3))], [])
    parts = [samples.part(index, of) for index in range(of)]
    assert parts[0][0] == 0 and parts[-1][1] == count * group
    assert all(part_before[1] == after[0] for part_before, after in itertools.pairwise(parts))
    assert all(edge % group == 0 for part in parts for edge in part)
    assert max(stop - start for start, stop in parts) - min(stop - start for start, stop in parts) <= group


def test_a_scalar_input_is_an_array_of_no_axes(tmp_path):
    rate, signal = TensorSpec("rate", "int64", ()), TensorSpec("signal", "float32", ("batch", 4))
    path = saved(tmp_path, rate=np.full(3, 16000), signal=np.ones((3, 1, 4), "f4"))
    runs = [inputs for _, inputs in opened(path, inputs=[rate, signal]).runs()]
    assert [type(inputs["rate"]) for inputs in runs] == [np.ndarray] * 3
    assert [(inputs["rate"].shape, int(inputs["rate"])) for inputs in runs] == [((), 16000)] * 3


ARRAYS = st.dictionaries(
    st.sampled_from(["x", "m", "label", "other"]),
    st.tuples(st.sampled_from(["f4", "i8", "c8"]), st.lists(st.integers(0, 4), max_size=4)),
    min_size=1,
)


@given(arrays=ARRAYS, labelled=st.booleans())
def test_mistakes_are_found_exactly_if_opening_raises(tmp_path_factory, arrays, labelled):
    inputs = (TensorSpec("x", "float32", ("n", 3)), TensorSpec("m", "int64", ("n",)))
    dims, labels = (Dim("n", 2, 2, 3),), "label" if labelled else None
    path = tmp_path_factory.mktemp("samples") / "s.npz"
    np.savez(path, **{name: np.zeros(shape, dtype) for name, (dtype, shape) in arrays.items()})
    mistakes = list(Samples.find_mistakes(path, inputs, dims, (labels,) if labels else ()))
    try:
        samples = Samples.open(path, inputs, dims, (labels,) if labels else ())
        if labels:
            samples.column(labels)
    except DataError as error:
        assert mistakes and (str(error) in mistakes or "no axes" in str(error) or len(mistakes) > 1)
    else:
        assert mistakes == []


def test_few_headers_of_a_large_folder_are_read(tmp_path):
    for index in range(20):
        np.save(tmp_path / f"{index:02}.npy", np.zeros(3 if index < 19 else 4, "float32"))
    inputs = (TensorSpec("x", "float32", (3,)),)
    assert list(Samples.find_mistakes(tmp_path, inputs, ())) == [], "the last file is not opened"
    with pytest.raises(DataError, match=r"19\.npy \(sample 19\)"):
        Samples.open(tmp_path, inputs, ())
    np.save(tmp_path / "01.npy", np.zeros(4, "float32"))
    assert "all samples must be alike" in next(Samples.find_mistakes(tmp_path, inputs, ()))


@pytest.mark.parametrize("names", [("x.npy", "x.npy"), ("x", "x.npy")])
def test_a_duplicate_array_is_refused(tmp_path, names):
    path, stored_file = tmp_path / "twice.npz", BytesIO()
    np.save(stored_file, np.ones(3, np.float32))
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings(action="ignore"):
        for name in names:
            archive.writestr(name, stored_file.getvalue())
    with pytest.raises(DataError, match=r"'x'.* is in the file twice"):
        stored_arrays(path)
