"""`enginery record`: requests from stdin."""

import json
import subprocess
import sys

COMMAND = [sys.executable, "-m", "pipeline.cli"]


def test_requests_from_stdin(tmp_path):
    path = tmp_path / "traffic.jsonl"
    lines = [{"at": 3, "inputs": {"x": [[1, 2]]}}, {"inputs": {"x": [[3, 4]]}}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([*COMMAND, "record", path], input=text, text=True, capture_output=True, check=True)
    assert "2 requests recorded" in done.stderr
    head, first, second = map(json.loads, path.read_text().splitlines())
    assert head["kind"] == "enginery-traffic" and first == lines[0] and second["at"] > 1e9
    bad = subprocess.run([*COMMAND, "record", path], input='{"inputs": 3}\n', text=True, capture_output=True)
    assert bad.returncode == 2 and "inputs is missing" in bad.stderr
