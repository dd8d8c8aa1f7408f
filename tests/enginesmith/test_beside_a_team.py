import os
import subprocess
import sys
from pathlib import Path

import pytest

import enginesmith
from tests.pipeline.projects import Project

HOME = str(Path(str(enginesmith.__file__)).parents[1])
SERVER = """
import sys
from pathlib import Path
import numpy as np
import enginesmith

registry, place = sys.argv[1:]
client = enginesmith.Client(registry)
assert client.resolve("tiny", "cpu").candidates
pulled = client.pull("tiny", place + "/engines", target="cpu")
enginesmith.pull("tiny", registry=registry, target="cpu", dest=place + "/others")
client.watch("tiny:candidate", place + "/served", target="cpu", once=True)
with enginesmith.Recorder(place + "/traffic.jsonl") as recorder:
    recorder.append({"x": np.zeros((1, 8), "float32")})
with enginesmith.recording.ObservationLog(place + "/stable.jsonl", pulled.description) as log:
    log.append(0.01, outputs={"logits": np.zeros((1, 2), "float32")})
assert (recorder.failure, log.failure) == (None, None)
assert not {"pipeline", "builders", "validation"} & sys.modules.keys()

import pipeline, builders.own, validation.own
assert pipeline.OWN == builders.own.OWN == validation.own.OWN == "a team's"
try:
    enginesmith.build
except ImportError as error:
    print(error)
"""


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A folder with a server and with the three packages."""
    folder = tmp_path / "team"
    for name in ("pipeline", "builders", "validation"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text('OWN = "a team\'s"\n')
        (folder / name / "own.py").write_text('OWN = "a team\'s"\n')
    (folder / "server.py").write_text(SERVER)
    return folder


def run(team: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(team), HOME])}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=team, env=environment)


@pytest.mark.slow
def test_a_server_resolves_pulls_watches_and_records(built: Project, team: Path, tmp_path: Path) -> None:
    result = run(team, "server.py", built.registry, tmp_path / "place")
    assert (result.returncode, result.stderr) == (0, "")
    assert "this needs Enginesmith's own package" in result.stdout and f"is {team}" in result.stdout
    assert "run `enginesmith build` as a command" in result.stdout


@pytest.mark.slow
def test_the_command_line_and_its_jobs_import_enginesmiths_own_packages(
    project: Project, team: Path, tmp_path: Path
) -> None:
    project.change_spec(targets=["cpu"], precisions=["fp32"])
    result = run(team, "-m", "enginesmith", "build", project.spec, "--registry", project.registry)
    assert result.returncode == 0, result.stderr
    result = run(
        team, "-m", "enginesmith", "pull", "tiny", "--registry", project.registry, "--dest", tmp_path / "engines"
    )
    assert result.returncode == 0, result.stderr
