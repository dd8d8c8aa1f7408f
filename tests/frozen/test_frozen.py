"""The frozen registry is read by this commit as by the one that wrote it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import enginesmith
from tests.frozen.surface import unpack


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """The frozen registry, in a folder of its own."""
    return unpack(tmp_path)


def run(registry: str, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    result = CliRunner().invoke(enginesmith, [*arguments, "--registry", registry])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_document_is_read_and_whole(registry: str) -> None:
    assert run(registry, "registry", "fsck").startswith("valid: 2 versions")
    listed = json.loads(run(registry, "list", "tiny", "--json"))
    assert [(item["version"], item["channels"]) for item in listed] == [
        ("1", {"stable": "1"}),
        ("2", {"candidate": "2"}),
    ]
    for reference in ("tiny@1", "tiny:stable", "tiny@2"):
        assert json.loads(run(registry, "show", reference, "--json"))["model"] == "tiny"
    moves = json.loads(run(registry, "registry", "history", "tiny:stable", "--json"))
    assert sorted(move["action"] for move in moves) == ["promote", "promote", "rollback"]
    assert json.loads(run(registry, "rollout", "status", "tiny:stable", "--json"))[0]["channel"] == "stable"
    assert json.loads(run(registry, "registry", "policy", "show", "tiny:stable", "--json"))["policy"]["proven"] == [
        "cpu"
    ]
    assert json.loads(run(registry, "profile", "tiny", "--series", "--json"))[0]["series"]["model"] == "tiny"


def test_its_engines_are_pulled_and_nothing_served_is_garbage(registry: str, tmp_path: Path) -> None:
    assert "sm_89" in run(registry, "pull", "tiny@2", "--target", "sm_89", "--dest", str(tmp_path / "engine"))
    assert "2 versions kept" in run(registry, "registry", "gc")
