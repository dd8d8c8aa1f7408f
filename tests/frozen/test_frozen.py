import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from enginesmith.cli import enginesmith
from tests.frozen.reading import SPECS, VALUES, values
from tests.frozen.surface import ARCHIVES, PROMISES, members, unpack

READ = json.loads(VALUES.read_text())


@pytest.fixture(scope="module")
def now_read() -> dict[str, Any]:
    return values()


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Paths at which `now` is not what it was; new keys are none."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [text for key in before for text in differences(before[key], now.get(key), f"{path}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = zip(before, now, strict=True)
        return [text for index, (old, new) in enumerate(pairs) for text in differences(old, new, f"{path}[{index}]")]
    return [] if before == now else [f"{path}: {before!r:.80} is now {now!r:.80}"]


@pytest.mark.parametrize("name", sorted(READ))
def test_a_frozen_file_is_read_as_before(now_read: dict[str, Any], name: str) -> None:
    assert differences(READ[name], now_read[name]) == []


@pytest.mark.parametrize("kind", ["spec", "ensemble"])
def test_frozen_specs_have_all_promised_keys(kind: str) -> None:
    files = [SPECS / "ensemble.yaml"] if kind == "ensemble" else SPECS.glob("*.yaml")
    names = {path.rpartition(".")[2] for file in files for path in members(yaml.safe_load(file.read_text()), "")}
    promised_keys = {key for key in json.loads(PROMISES.read_text())["spec keys"] if key.startswith(f"{kind}: ")}
    lacking = {key for key in promised_keys if key.rpartition(".")[2].removeprefix(f"{kind}: ") not in names}
    assert {key for key in lacking if "ensemble: golden.metric." not in key} == set()  # specs have those


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def registry(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A frozen registry, in a folder of its own."""
    return unpack(tmp_path, request.param)


def run(registry: str, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    result = CliRunner().invoke(enginesmith, [*arguments, "--registry", registry])
    assert result.exit_code == 0, result.output
    return result.output


def test_every_frozen_document_is_read_and_intact(registry: str) -> None:
    assert run(registry, "registry", "fsck").startswith("valid: 2 versions")
    listed_document = json.loads(run(registry, "list", "tiny", "--json"))
    assert [(item["version"], item["channels"]) for item in listed_document] == [
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


def test_attachments_of_versions_are_read(tmp_path: Path) -> None:
    registry = unpack(tmp_path)  # the newest, which alone has these
    shown_document = json.loads(run(registry, "show", "tiny@1", "--json"))
    assert [entry["name"] for entry in shown_document["attachments"]] == ["notes.txt"] and shown_document["latencies"]
    assert json.loads(run(registry, "show", "tiny@2", "--json"))["canaries"]


def test_frozen_engines_are_pulled_and_nothing_served_is_garbage(registry: str, tmp_path: Path) -> None:
    assert "sm_89" in run(registry, "pull", "tiny@2", "--target", "sm_89", "--dest", str(tmp_path / "engine"))
    assert "2 versions kept" in run(registry, "registry", "gc")
