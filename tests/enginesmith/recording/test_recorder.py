import fcntl
import json
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

import enginesmith
from enginesmith.core.errors import DataError, InputError, UnavailableError
from enginesmith.core.types import TensorSpec
from enginesmith.recording import ObservationLog
from enginesmith.recording.recorder import Recorder
from enginesmith.recording.traffic import encode_inputs, read_traffic
from tests.waiting import until
from validation.canary.observations import EngineIdentity, read_observations
from validation.canary.report import made_up

SPECS = (TensorSpec("x", "float32", ("batch", 3)), TensorSpec("ids", "int64", ("batch",)))


def inputs(seed=0, batch=2):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(batch, 3)).astype(np.float32), "ids": np.arange(batch)}


def test_recorded_arrays_are_read_bit_identical(tmp_path):
    path = tmp_path / "traffic.jsonl"
    with enginesmith.Recorder(path) as recorder:
        assert recorder.append(inputs(1), at=1000.5) and recorder.append(inputs(2, 1), at=1000.0)
    traffic = read_traffic(path, SPECS)
    assert [request.at for request in traffic.requests] == [0.0, 0.5]
    for seed, batch, request in ((2, 1, traffic.requests[0]), (1, 2, traffic.requests[1])):
        for name, array in inputs(seed, batch).items():
            assert request.inputs[name].dtype == array.dtype and np.array_equal(request.inputs[name], array)
    assert path.stat().st_mode & 0o777 == 0o600, "inputs are users' data"


def test_a_file_may_have_many_writers(tmp_path):
    path = tmp_path / "traffic.jsonl"
    shared = Recorder(path)
    pids = []
    for child in range(3):
        if (pid := os.fork()) == 0:
            for index in range(60):
                shared.append(inputs(index, 2), at=child)
            os._exit(0)
        pids.append(pid)
    threads = [threading.Thread(target=lambda: [shared.append(inputs(9), at=9.0) for _ in range(60)]) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert len(read_traffic(path, SPECS).requests) == 360
    assert path.read_text().count("enginesmith-traffic") == 1


def test_a_child_waits_for_its_parents_lock(tmp_path):
    shared_recorder, begun_path = Recorder(tmp_path / "traffic.jsonl"), tmp_path / "begun"
    fcntl.flock(shared_recorder._file._fd, fcntl.LOCK_EX)
    if (pid := os.fork()) == 0:
        begun_path.touch()
        os._exit(0 if shared_recorder.append(inputs()) else 1)
    until(begun_path.exists)
    until(lambda: psutil.Process(pid).status() in (psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE))
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it took the lock that its parent holds"
    fcntl.flock(shared_recorder._file._fd, fcntl.LOCK_UN)
    assert os.waitpid(pid, 0)[1] == 0


def test_half_a_line_of_a_killed_writer_is_removed(tmp_path):
    path = tmp_path / "traffic.jsonl"
    with Recorder(path) as recorder:
        recorder.append(inputs())
    with path.open("a") as stream:
        stream.write('{"at": 12, "inputs": {"x"' + "y" * 100_000)
    with Recorder(path) as recorder:
        assert recorder.append(inputs())
    traffic = read_traffic(path, SPECS)
    assert len(traffic.requests) == 2 and not traffic.cut


@pytest.mark.parametrize("data", [b"PK\3\4\n\0", b"import torch\nx", b'{\n  "a": 1\n}'])
def test_a_file_with_other_content_stays_unchanged(tmp_path, data):
    (tmp_path / "model.py").write_bytes(data)
    with pytest.raises(InputError, match="is left as it is"):
        Recorder(tmp_path / "model.py")
    assert (tmp_path / "model.py").read_bytes() == data


def test_a_recorder_stops_at_its_size_and_keeps_a_sample(tmp_path):
    with Recorder(tmp_path / "small.jsonl", max_bytes=600) as recorder:
        is_recorded = [recorder.append(inputs()) for _ in range(10)]
    assert is_recorded == [True, True, *[False] * 8] and recorder.full and recorder.lost == 8
    assert (tmp_path / "small.jsonl").stat().st_size <= 600
    with Recorder(tmp_path / "sample.jsonl", sampling=0.25, seed=0) as recorder:
        for _ in range(400):
            recorder.append(inputs())
    assert 70 < recorder.kept < 130 and recorder.lost == 0
    assert read_traffic(tmp_path / "sample.jsonl", SPECS).sampling == 0.25


def test_appending_never_raises(tmp_path):
    with Recorder(tmp_path / "traffic.jsonl") as recorder:
        for bad_fields in ({"x": np.array([object()])}, {"x": np.array(["text"])}, None):
            assert recorder.append(bad_fields) is False
        assert recorder.append(inputs(), at=float("nan")) is False
        assert recorder.lost == 4 and recorder.failure
    assert recorder.append(inputs()) is False, "closed"
    if Path("/dev/full").exists():
        full_recorder = Recorder("/dev/full")
        assert full_recorder.append(inputs()) is False and "No space" in str(full_recorder.failure)
    with pytest.raises(UnavailableError):
        Recorder(tmp_path / "no" / "folder.jsonl")
    for wrong_value in (0.0, 1.5, float("nan")):
        with pytest.raises(InputError, match="sampling"):
            Recorder(tmp_path / "x", sampling=wrong_value)


def test_observations_belong_to_the_pulled_engine(tmp_path):
    described_fields = {"model": "tiny", "version": "3", "manifest": "a" * 64, "digest": "b" * 64, "precision": "int8"}
    (tmp_path / "tiny.json").write_text(json.dumps(described_fields))
    with ObservationLog(tmp_path / "log.jsonl", tmp_path / "tiny.json") as log:
        assert log.append(0.01, outputs={"y": np.ones(3)}, request=5, score=0.5)
        for latency in (0.5, float("inf"), 2e9, 10**400, None):
            assert log.append(latency, ok=False, error="timed out")
        assert not log.append(float("nan")) and log.lost == 1
    table = read_observations(tmp_path / "log.jsonl")
    assert table.identity == EngineIdentity("tiny", "3", "a" * 64, "b" * 64, precision="int8")
    assert table.ok == [True, *[False] * 5] and table.request[:2] == [5, None] and table.error[1] == "timed out"
    (tmp_path / "tiny.json").write_text("[]")
    with pytest.raises(DataError, match="enginesmith pull"):
        ObservationLog(tmp_path / "other.jsonl", tmp_path / "tiny.json")


@pytest.mark.parametrize(
    "bad",
    [{"latency": 0.0}, {"latency": -1e-6}, {"request": ""}, {"request": "x" * 201}, {"score": 1e31}, {"size": 0},
     {"latency": None}, {"score": 10**400}, {"outputs": {"y": Mock(__array__=Mock(side_effect=RuntimeError))}}],
)  # fmt: skip
def test_an_unreadable_observation_is_lost_and_the_others_are_kept(tmp_path, bad):
    with ObservationLog(tmp_path / "log.jsonl") as log:
        assert not log.append(**{"latency": 0.01} | bad) and log.lost == 1
        assert log.append(np.float32(0.5), request=np.int64(7), score=np.float32(0.5), size=np.int32(3))
    observations = read_observations(tmp_path / "log.jsonl")
    assert (observations.request, observations.size, observations.ok, observations.ended) == ([7], [3.0], [True], False)


@pytest.mark.parametrize(
    "bad",
    [{"latency": 0}, {"at": 1e12}, {"inputs": {"x": np.float32([np.nan])}}, {"inputs": {"x": np.float32([np.inf])}}],
)
def test_an_unreadable_request_is_lost_and_the_others_are_kept(tmp_path, bad):
    with Recorder(tmp_path / "traffic.jsonl") as recorder:
        assert not recorder.append(**{"inputs": inputs()} | bad) and recorder.lost == 1
        assert recorder.append(inputs(), 1.0)
    assert len(read_traffic(tmp_path / "traffic.jsonl", SPECS).requests) == 1


def request_line(**changes):
    return json.dumps({"at": 1.0, "inputs": encode_inputs(inputs())} | changes)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request_line(at=None), "at is given for some"),
        (request_line(at="now"), "at is 'now'"),
        (request_line(inputs=[1]), "inputs is missing"),
        (request_line(inputs={"x": encode_inputs(inputs())["x"]}), "no array for input 'ids'"),
        (request_line(inputs={"x": "text", "ids": [1]}), "not an array of numbers"),
        (request_line(inputs={"x": [[1, 2], [3]], "ids": [1]}), "inhomogeneous"),
        (request_line(inputs={"x": [[1, 2, None]], "ids": [1]}), "not an array of numbers"),
        (request_line(inputs={"x": [[1, 2]], "ids": [1]}), "size 2 on axis 1"),
        (request_line(inputs={"y": [1], "ids": [1]}), "no input is named 'y'"),
        (request_line(inputs={"x": {"dtype": "object", "shape": [1], "data": ""}}), "dtype 'object'"),
        (request_line(inputs={"x": {"dtype": "float32", "shape": [-1], "data": ""}}), "a list of sizes"),
        (request_line(inputs={"x": {"dtype": "float32", "shape": [10**9, 10**9], "data": ""}}), "not the size of"),
        (request_line(inputs={"x": {"dtype": "float32", "shape": [1], "data": "?"}}), "not base64"),
        (request_line(inputs={"x": [[1, 2, 1e39]], "ids": [1]}), "NaN or infinity"),
        (json.dumps({"kind": "enginesmith-observations", "format": 1}), "traffic of format 1"),
        (json.dumps({"kind": "enginesmith-traffic", "format": 9}), "format is 9; this enginesmith reads 1"),
        (json.dumps({"kind": "enginesmith-traffic", "format": 1, "sampling": -1}), "sampling is -1"),
        ("{", "is not JSON"),
    ],
)
def test_bad_traffic_is_refused_by_its_line(tmp_path, bad, message):
    path = tmp_path / "traffic.jsonl"
    path.write_text(f"{request_line()}\n{bad}\n")
    with pytest.raises(DataError, match=rf"traffic.jsonl:2: .*{message}"):
        read_traffic(path, SPECS)


def test_handwritten_traffic_in_npz_is_read_within_a_limit(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text(json.dumps({"at": 5, "inputs": {"x": [[1, 2, 3]], "ids": [7]}}) + "\n{")
    traffic = read_traffic(path, SPECS)
    assert traffic.requests[0].inputs["x"].dtype == np.float32 and traffic.cut and traffic.timed
    line = {"latency": 0.25, "inputs": {"x": [[1, 2, 3]], "ids": [7]}}
    path.write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    untimed_traffic = read_traffic(path, SPECS)
    assert not untimed_traffic.timed and [request.latency for request in untimed_traffic.requests] == [0.25, 0.25]
    arrays = {"x": np.zeros((4, 1, 3), np.float32), "ids": np.zeros((4, 1), np.int64)}
    np.savez(tmp_path / "traffic.npz", at=[3.0, 1.0, 2.0, 4.0], **arrays)
    assert [request.at for request in read_traffic(tmp_path / "traffic.npz", SPECS).requests] == [0, 1, 2, 3]
    np.savez(tmp_path / "bad.npz", at=[3.0, 1.0], **arrays)
    with pytest.raises(DataError, match="axis 0 must have"):
        read_traffic(tmp_path / "bad.npz", SPECS)
    np.savez(tmp_path / "bad.npz", **arrays)
    untimed_traffic = read_traffic(tmp_path / "bad.npz", SPECS)
    assert not untimed_traffic.timed and [request.at for request in untimed_traffic.requests] == [0, 0, 0, 0]
    with pytest.raises(DataError, match="more than 10 bytes"):
        read_traffic(path, SPECS, most_bytes=10)
    path.write_text("")
    with pytest.raises(DataError, match="holds no requests"):
        read_traffic(path, SPECS)


def test_generated_traffic_has_real_inputs_at_random_arrivals(tmp_path):
    np.savez(tmp_path / "samples.npz", x=np.arange(12.0).reshape(4, 3), ids=np.arange(4))
    actual = list(made_up(tmp_path / "samples.npz", 100.0, 500, 2, 0))
    gaps = np.diff([time_s for time_s, _ in actual])
    assert gaps.mean() == pytest.approx(0.01, rel=0.15) and gaps.std() == pytest.approx(0.01, rel=0.25)
    assert [list(inputs["ids"]) for _, inputs in actual[:3]] == [[0, 1], [2, 3], [0, 1]]
    np.savez(tmp_path / "samples.npz", x=np.zeros((4, 3)), ids=np.arange(3))
    with pytest.raises(DataError, match="all inputs need the same number"):
        list(made_up(tmp_path / "samples.npz", 1.0, None, 1, 0))


def test_labels_among_samples_are_left_out(tmp_path):
    samples = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "ids": np.arange(4), "label": np.zeros(4, np.int64)}
    np.savez(tmp_path / "golden.npz", **samples)
    path = tmp_path / "made.jsonl"
    with Recorder(path, made="golden.npz") as recorder:
        for time_s, inputs in made_up(tmp_path / "golden.npz", 100.0, None, 1, 0):
            assert recorder.append(inputs, time_s)
    traffic = read_traffic(path, SPECS)
    assert traffic.surplus == ("label",) and [set(request.inputs) for request in traffic.requests] == [{"x", "ids"}] * 4
    real_text = path.read_text().replace(', "made": "golden.npz"', "").replace(',"made":"golden.npz"', "")
    path.write_text(real_text)
    with pytest.raises(DataError, match="no input is named 'label'"):  # what somebody sent is not changed
        read_traffic(path, SPECS)


@pytest.mark.parametrize(
    ("error", "expected"), [(None, ""), (ValueError("a bad stride"), "a bad stride"), ("no file \udcff", "no file ?")]
)
def test_an_error_without_text_does_not_fail_the_request(tmp_path, error, expected):
    with ObservationLog(tmp_path / "log.jsonl") as log:
        assert log.append(0.0, ok=False, error=error)
    assert read_observations(tmp_path / "log.jsonl").error == [expected]


def test_traffic_keeps_its_start_and_its_model(tmp_path):
    with Recorder(tmp_path / "a.jsonl", model="digits") as recorder:
        for value in (1_700_000_003.0, 1_700_000_001.0):
            recorder.append({"x": np.zeros((1, 2), np.float32)}, value)
    traffic = read_traffic(tmp_path / "a.jsonl", (TensorSpec("x", "float32", (1, 2)),))
    assert traffic.start == 1_700_000_001.0 and [request.at for request in traffic.requests] == [0.0, 2.0]
    assert traffic.model == "digits"
    (tmp_path / "b.jsonl").write_text('{"inputs": {"x": [[1.0, 2.0]]}}\n')
    untimed_traffic = read_traffic(tmp_path / "b.jsonl", (TensorSpec("x", "float32", (1, 2)),))
    assert untimed_traffic.start == 0.0 and untimed_traffic.model == ""
