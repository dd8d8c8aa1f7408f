"""The same composition as a real Prefect flow, on the server that it starts for itself, with builds on real Ray."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError

from pipeline.orchestration.flows.collect_garbage import collect_garbage
from tests.ensembles import write_ensemble
from tests.pipeline.projects import Project


def with_prefect(project: Project, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "enginesmith", "build", project.spec, "--registry", project.registry, "--json"]
    environment = {**os.environ, "PREFECT_HOME": str(home)}
    whole_command = [*map(str, command), "--runner", "prefect", *words]
    return subprocess.run(whole_command, capture_output=True, text=True, env=environment, check=False)


def artifacts(home: Path) -> set[tuple[str, str]]:
    """Key and type of every artifact that the runs' own servers kept."""
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        return set(database.execute("select key, type from artifact"))


def keys(outcome: Any) -> dict[str, str]:
    return {f"{e['target']} {e['precision']}": e["status"] for e in outcome["engines"]}


@pytest.mark.server
@pytest.mark.slow
def test_both_runners_and_both_executors_give_the_same_version(built: Project, project: Project, home: Path) -> None:
    for item in (built, project):
        item.change_spec(precisions=["int8"], targets=["cpu"])
    result = with_prefect(project, home, "--executor", "ray")
    assert result.returncode == 0, result.stderr
    outcome, reference = json.loads(result.stdout), built.build().json
    assert keys(outcome) == keys(reference)
    assert outcome["metrics"] == reference["metrics"]
    assert "Finished in state Completed()" in result.stderr
    assert artifacts(home) == {("engines-tiny", "table")}
    second_prefect = with_prefect(project, home, "--executor", "ray")
    assert json.loads(second_prefect.stdout)["cached"] is True
    assert "nothing was started" in second_prefect.stderr, "no server and no cluster for a run with nothing to do"


@pytest.mark.server
def test_a_task_error_is_one_message_also_in_an_empty_home(project: Project, tmp_path: Path) -> None:
    (project.folder / "tiny.onnx").write_bytes(b"garbage")
    result = with_prefect(project, tmp_path / "prefect")
    assert result.returncode == 2 and "Traceback" not in result.stderr and "tiny.onnx" in result.stderr


@pytest.mark.slow
def test_a_silent_prefect_api_is_one_message_with_exit_code_3(project: Project) -> None:
    command = [sys.executable, "-m", "enginesmith", "build", str(project.spec), "--registry", str(project.registry)]
    environment = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 3 and "error: Prefect: http://127.0.0.1:9/api does not answer" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.server
@pytest.mark.slow
def test_an_ensemble_is_built_as_a_flow(tmp_path: Path, home: Path) -> None:
    project = Project(tmp_path / "project")
    project.spec = write_ensemble(project.folder)
    result = with_prefect(project, home)
    assert result.returncode == 0, result.stderr
    assert keys(json.loads(result.stdout)) == {"cpu fp32": "proven", "cpu int8": "proven"}


@pytest.mark.parametrize("days", [-1.0, 1e9, float("nan")])
def test_an_impossible_grace_period_is_refused_before_the_run(days: float) -> None:
    with pytest.raises(ParameterTypeError, match="grace_days"):
        collect_garbage.validate_parameters({"grace_days": days})
