import json

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.recording.recorder import Recorder
from pipeline.traffic.place import model_of_place, read_place, split_beyond

INPUTS = (TensorSpec("x", "float32", ("batch", "length")),)
EPOCH = 1_772_409_600.0


def write(path, sizes, start=EPOCH, **head):
    with Recorder(path, **head) as recorder:
        for index, size in enumerate(sizes):
            recorder.append({"x": np.zeros((1, size), np.float32)}, start + index)
    return path


def test_files_of_a_folder_are_merged_by_time(tmp_path):
    write(tmp_path / "b.jsonl", [1, 2], EPOCH)
    write(tmp_path / "a.jsonl", [7, 8], EPOCH + 0.5)
    (tmp_path / "notes.txt").write_text("not traffic")
    actual = read_place(tmp_path, INPUTS)
    assert actual.trace.sizes["length"].tolist() == [1, 7, 2, 8] and actual.trace.at.tolist() == [0, 0.5, 1, 1.5]
    assert actual.absolute and actual.trace.start == EPOCH and len(actual.files) == 2


def test_a_file_says_its_model_and_another_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [1], model="digits")
    assert model_of_place(tmp_path) == "digits" and len(read_place(path, INPUTS, "digits").trace) == 1
    with pytest.raises(DataError, match="traffic of 'digits', not of 'encoder'"):
        read_place(path, INPUTS, "encoder")
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 1, 3), np.float32))
    assert model_of_place(tmp_path / "b.npz") == "" and read_place(tmp_path / "b.npz", INPUTS).trace.timed is False


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"sampling": 0.5, "seed": 1}, "hold 1 and 0.5 of the traffic"),
        ({"start": 3.0}, "are not seconds since the epoch"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path, others, words):
    write(tmp_path / "a.jsonl", [1, 2])
    write(tmp_path / "b.jsonl", [1, 2, 3, 4, 5], **others)
    with pytest.raises(DataError, match=words):
        read_place(tmp_path, INPUTS)


def test_files_with_and_without_times_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", [1])
    (tmp_path / "b.jsonl").write_text(json.dumps({"inputs": {"x": [[1.0]]}}) + "\n")
    with pytest.raises(DataError, match=r"only one of .* has times"):
        read_place(tmp_path, INPUTS)


def test_places_without_traffic_are_reported(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_place(tmp_path / "none", INPUTS)
    with pytest.raises(DataError, match="holds no traffic"):
        read_place(tmp_path, INPUTS)
    write(tmp_path / "a.jsonl", [])
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="holds no requests"):
        read_place(tmp_path / "a.jsonl", INPUTS)


def test_another_models_requests_name_the_line(tmp_path):
    write(tmp_path / "a.jsonl", [1])
    with pytest.raises(DataError, match=r"a.jsonl:2: .*'ids'"):
        read_place(tmp_path / "a.jsonl", (TensorSpec("ids", "int64", ("batch",)),))


def test_requests_beyond_the_dims_are_counted_by_size(tmp_path):
    actual = read_place(write(tmp_path / "a.jsonl", [9, 1, 4, 9, 12]), INPUTS)
    split = split_beyond(actual.trace, (Dim("batch", 1, 1, 1), Dim("length", 2, 8, 8)))
    assert split.within.sizes["length"].tolist() == [4] and split.beyond == {"length": {1: 1, 9: 2, 12: 1}}
    assert split.fallback_share == 0.8 and split.within.start == EPOCH + 2
    with pytest.raises(DataError, match=r"none of the 5 requests is within the dims \(length 50..60\)"):
        split_beyond(actual.trace, (Dim("length", 50, 60, 60),))
