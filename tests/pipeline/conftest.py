import shutil
from pathlib import Path

import pytest

from tests.pipeline.projects import Project, write_project


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A fresh project; nothing is built."""
    write_project(tmp_path / "project")
    return Project(tmp_path / "project", capsys)


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Project and registry after one build, to be copied."""
    import subprocess
    import sys

    place = tmp_path_factory.mktemp("built")
    write_project(place / "project")
    command = [sys.executable, "-m", "pipeline.cli", "build", str(place / "project" / "tiny.yaml")]
    subprocess.run([*command, "--registry", str(place / "registry")], check=True, capture_output=True)
    return place


@pytest.fixture
def built(built_once: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A project of which version 1 is published; a copy, free to be changed."""
    shutil.copytree(built_once, tmp_path / "place")
    return Project(tmp_path / "place" / "project", capsys)
