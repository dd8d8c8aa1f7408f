import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.enginery.s3_server import BUCKET, ENVIRONMENT, FOREIGN, serving
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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3 server with the bucket `BUCKET`."""
    with serving() as url:
        yield url


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials that moto takes, and a cache of this test's own."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ENVIRONMENT, "ENGINERY_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_uri(s3_server: str, s3_environment: None) -> str:
    """The URI of a place in the bucket where nothing is yet."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}?endpoint={s3_server}"
