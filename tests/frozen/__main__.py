"""Writes the frozen registry: `python -m tests.frozen` builds two versions of a small model and does to them what
operators do, so that each kind of document is there once. `python -m tests.frozen promises` writes `promises.json`."""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.frozen.surface import ARCHIVE, PROMISES, surface
from tests.pipeline.projects import write_project

COMMANDS = (
    "build tiny.yaml",
    "promote tiny@1 tiny:stable --proven-only --why first",
    "registry pin tiny@1",
    "profile tiny@1 --target cpu --precision fp32 --record",
    "registry policy set tiny:stable --proven cpu",
    "build tiny.yaml",
    "promote tiny@2 tiny:stable --proven-only --accept-loss",
    "rollback tiny:stable",
    "rollout start tiny@2 tiny:stable --proven-only --wave 50%,100% --accept-loss",
)


def main() -> None:
    """Write `registry.zip` beside this file, or what is promised of the present tree."""
    if sys.argv[1:] == ["promises"]:
        PROMISES.write_text(json.dumps(surface(), indent=0) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        write_project(project)
        for number, command in enumerate(COMMANDS):
            if number and command.startswith("build"):
                spec = project / "tiny.yaml"
                spec.write_text(spec.read_text().replace("- sm_75", "- sm_86"))
            subprocess.run(
                [sys.executable, "-m", "enginesmith", *command.split(), "--registry", "../registry"],
                cwd=project,
                check=True,
            )
        registry = Path(folder) / "registry"
        with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
            for path in sorted(registry.rglob("*")):
                if path.is_file():
                    file.write(path, path.relative_to(registry))


if __name__ == "__main__":
    main()
