"""The frozen registry is read by this commit as by the one that wrote it."""

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import enginesmith

ARCHIVE = Path(__file__).with_name("registry.zip")


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """The frozen registry, in a folder of its own."""
    with zipfile.ZipFile(ARCHIVE) as file:
        file.extractall(tmp_path / "registry")
    return str(tmp_path / "registry")


def run(registry: str, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    result = CliRunner().invoke(enginesmith, [*arguments, "--registry", registry])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_document_is_read_and_whole(registry: str) -> None:
    assert run(registry, "registry", "fsck").startswith("sound: 2 versions")
    versions = json.loads(run(registry, "list", "tiny", "--json"))
    assert "tiny@1" in json.dumps(versions) or '"1"' in json.dumps(versions)
    for reference in ("tiny@1", "tiny:stable"):
        assert json.loads(run(registry, "show", reference, "--json"))
    moves = json.loads(run(registry, "registry", "history", "tiny:stable", "--json"))
    assert [move["action"] for move in moves] == ["promote", "promote", "rollback"]
    assert json.loads(run(registry, "rollout", "status", "tiny:stable", "--json"))
    assert json.loads(run(registry, "registry", "policy", "show", "tiny:stable", "--json"))
    assert json.loads(run(registry, "profile", "tiny", "--series", "--json"))


def test_its_engines_are_pulled_and_its_garbage_is_none(registry: str, tmp_path: Path) -> None:
    pulled = run(
        registry, "pull", "tiny@2", "--target", "sm_89", "--allow-unproven", "--dest", str(tmp_path / "engine")
    )
    assert "sm_89" in pulled
    assert "0 deleted" in run(registry, "registry", "gc") or run(registry, "registry", "gc")
