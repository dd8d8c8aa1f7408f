"""`enginesmith traffic record`: requests from stdin."""

import json
import subprocess
import sys

import numpy as np
import pytest

COMMAND = [sys.executable, "-m", "enginesmith"]


def test_requests_from_stdin(tmp_path):
    path = tmp_path / "traffic.jsonl"
    lines = [{"at": 3, "inputs": {"x": [[1, 2]]}}, {"inputs": {"x": [[3, 4]]}}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([*COMMAND, "traffic", "record", path], input=text, text=True, capture_output=True, check=True)
    assert "2 requests recorded" in done.stderr
    head, first, second = map(json.loads, path.read_text().splitlines())
    assert head["kind"] == "enginesmith-traffic" and first == lines[0] and second["at"] > 1e9
    bad = subprocess.run([*COMMAND, "traffic", "record", path], input='{"inputs": 3}\n', text=True, capture_output=True)
    assert bad.returncode == 2 and "inputs is missing" in bad.stderr


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((3, 2)), "z": np.zeros((4, 2))}, "every input needs as many"),
        ({"x": np.array(["a", "b"])}, "numbers and truth values can be recorded"),
        ({"x": np.array(1.0)}, "has no axes"),
        (None, "cannot be read as .npz or .npy"),
    ],
)
def test_a_mistake_in_the_first_request_leaves_no_file(tmp_path, arrays, words):
    samples, path = tmp_path / "samples.npz", tmp_path / "traffic.jsonl"
    np.savez(samples, **arrays) if arrays else samples.write_bytes(b"")
    made = [*COMMAND, "traffic", "record", path, "--samples", samples, "--per-second", "5"]
    done = subprocess.run(made, text=True, capture_output=True)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    done = subprocess.run([*COMMAND, "traffic", "record", path], input="[]\n", text=True, capture_output=True)
    assert done.returncode == 2 and "an object is needed" in done.stderr
    assert not path.exists()
