import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from enginesmith.cli import enginesmith

FOLDER = Path(__file__).parents[3] / "manifests" / "examples" / "ci"
SCHEMAS = {"github-actions.yaml": "vendor.github-workflows", "gitlab-ci.yaml": "vendor.gitlab-ci"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_example_keeps_its_schema(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[name], str(FOLDER / name)]
    if name.startswith("gitlab"):
        command[3:3] = ["--data-transform", "gitlab-ci"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_commands_of_an_example_can_be_read(name: str) -> None:
    texts = _texts(yaml.safe_load((FOLDER / name).read_text()))
    items = [text for text in texts if text.startswith("enginesmith ") and "--" in text]
    assert items
    for text in items:
        words = shlex.split(re.sub(r"\s+", " ", text))
        command = enginesmith.get_command(click.Context(enginesmith), words[1])
        assert command is not None
        command.make_context(words[1], words[2:], resilient_parsing=False)


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def test_every_example_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(SCHEMAS)
