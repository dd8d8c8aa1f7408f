"""The tutorial docs/getting-started/first-engine.md: what it says is done, in an empty folder, in order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/getting-started/first-engine.md"
BLOCK = re.compile(r"(?:Create a file `([\w.]+)`.*?)?```(python|yaml|sh)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_its_files_and_commands_give_a_running_engine(tmp_path: Path) -> None:
    home = str(PAGE.parents[2])
    environment = {**os.environ, "PYTHONPATH": home, "ENGINESMITH_CACHE": str(tmp_path / "cache")}
    environment.pop("ENGINESMITH_REGISTRY", None)
    printed_stdout = ""
    for name, kind, text in BLOCK.findall(PAGE.read_text()):
        if name:
            (tmp_path / name).write_text(text)
            continue
        commands = [["-c", text]] if kind == "python" else [["-m", *line.split()] for line in text.splitlines()]
        for words in commands:
            command = [sys.executable, "-W", "ignore", *words]
            result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
            assert result.returncode == 0, (words, result.stdout, result.stderr)
            printed_stdout = result.stdout
    assert printed_stdout.startswith("Pulled('first-1-cpu-") and "array([[" in printed_stdout
