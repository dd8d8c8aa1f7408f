"""`import enginery`: light, typed, and the same verbs as the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import enginery
from builders.errors import SpecError
from tests.pipeline.projects import Project, write_project


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, enginery; print(sorted({'pydantic', 'numpy', 'torch', 'click', 'pipeline'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_serving_code_uses_is_light_too(tmp_path: Path) -> None:
    code = (
        "import sys, enginery; enginery.Recorder('traffic.jsonl').append({}); enginery.ObservationLog('log.jsonl')\n"
        "heavy = {'pipeline', 'pydantic', 'click', 'torch', 'onnx', 'onnxruntime', 'prefect', 'ray', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert done.stdout == "[]\n"


def test_build_then_pull(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    project = Project(tmp_path / "project")
    outcome = enginery.build(project.spec, registry=str(project.registry), targets="cpu")
    assert outcome.version == "1"
    assert not outcome.failed
    pulled = enginery.pull("tiny", registry=project.registry, dest=tmp_path / "engines", target="cpu")
    assert pulled.path.is_file()
    assert pulled.engine.precision == "int8"
    assert pulled.warning is None


def test_its_errors_are_the_projects_own(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        enginery.load_spec(tmp_path / "gone.yaml")
    with pytest.raises(AttributeError, match="load_spec"):
        enginery.nonsense  # noqa: B018 - the access is the test


def test_the_published_schema_is_the_one_of_the_code() -> None:
    page = Path(__file__).parent.parent / "docs" / "spec.schema.json"
    printed = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "schema"], capture_output=True, text=True, check=True
    ).stdout
    assert page.read_text() == printed, "run `make docs`"
