"""`enginery init` and `enginery schema`."""

import json
from pathlib import Path

import pytest

from enginery.core.types import PRECISIONS
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project


def test_the_starter_spec_is_a_good_one(tmp_path: Path, project: Project) -> None:
    path = project.folder / "model.yaml"
    assert project_init(path) == 0
    for name in ("model.py", "weights.safetensors"):
        (project.folder / name).touch()
    assert load_spec(path).model == "my-model"
    comments = [line.split() for line in path.read_text().splitlines() if line.startswith("  # ")]
    named = {word.rstrip(",") for words in comments for word in words[1:3]}
    assert set(PRECISIONS) <= named, "each precision, with a word about it"
    assert project_init(path) == 2, "an existing file is not overwritten"


def project_init(path: Path) -> int:
    from pipeline.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["init", str(path)])
    return int(ended.value.code or 0)


def test_the_schema_that_is_printed_is_that_of_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    from pipeline.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    assert not ended.value.code and schema["title"] == "Enginery model spec"
    assert "canary" in schema["$defs"]["Validation"]["properties"]
