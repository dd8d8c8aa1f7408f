"""Writes what is frozen: `python -m tests.frozen` builds two versions of a small model, and does to them what operators
do, so that each kind of document is in `registry.zip` and each file of users in `files.zip`. It writes what the readers
of this commit give of `files.zip` and `specs/` into `values.json`, and what is promised by name into `promises.json`.

`python -m tests.frozen names` writes `promises.json` alone, and `values` `values.json` alone.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from enginesmith.recording.recorder import Recorder
from tests.enginesmith.registry.trust.keys import written
from tests.frozen.reading import VALUES, values
from tests.frozen.surface import ARCHIVE, FILES, PROMISES, surface
from tests.pipeline.projects import write_project

COMMANDS = (
    "build tiny.yaml",
    "promote tiny@1 tiny:stable --proven-only --why first",
    "registry pin tiny@1",
    "profile tiny@1 --target cpu --precision fp32 --record",
    "registry policy set tiny:stable --proven cpu",
    "build later.yaml",
    "promote tiny@2 tiny:stable --proven-only --accept-loss",
    "rollback tiny:stable",
    "canary run --candidate tiny@2 --baseline tiny@1 --traffic traffic.jsonl --precision int8 --out canary --attach",
    "validate tiny@1 --target cpu",
    "debug attribute tiny@1 --target cpu --precision int8",
    "registry attach tiny@1 notes.txt --kind notes --note remark",
    "registry sign tiny@1 --key release.pem",
    "prefect register later.yaml --no-event",
    "pull tiny:stable --target cpu --precision int8 --dest pulled",
    "validate tiny@1 --target cpu --carry carried",
    "rollout start tiny@2 tiny:stable --proven-only --wave 99%,100% --accept-loss",
    "pull tiny:stable --target cpu --follow --once --node n1 --dest followed",
    "registry gc --delete",
)
KIT = "--device cpu --carry carried --model none --peer none --no-peaks --seconds 0.05 --out results.json"


def main() -> None:
    """Write all files beside this one, or those that the arguments name."""
    names = sys.argv[1:] or ["archives", "names", "values"]
    if "archives" in names:
        with tempfile.TemporaryDirectory() as folder:
            _write_archives(Path(folder))
    if "names" in names:
        PROMISES.write_text(json.dumps(surface(), indent=0) + "\n")
    if "values" in names:
        VALUES.write_text(json.dumps(values(), indent=1, sort_keys=True) + "\n")


def _write_archives(folder: Path) -> None:
    project = folder / "project"
    write_project(project)
    (project / "later.yaml").write_text((project / "tiny.yaml").read_text().replace("- sm_75", "- sm_86"))
    written(project, "release")
    (project / "notes.txt").write_text("a file of a user\n")
    with Recorder(project / "traffic.jsonl", model="tiny") as recorder:
        for index, rows in enumerate(np.linspace(-1, 1, 30 * 8, dtype=np.float32).reshape(30, 1, 8)):
            recorder.append({"x": rows}, at=index / 50, latency=0.001)
    for command in COMMANDS:
        arguments = ["enginesmith", *command.split(), "--registry", "../registry"]
        result = subprocess.run([sys.executable, "-m", *arguments], cwd=project, check=False)
        if result.returncode > (not command.startswith("build")):  # a canary of 30 requests cannot decide
            raise SystemExit(f"enginesmith {command}: exit code {result.returncode}")
    subprocess.run([sys.executable, "-m", "validation.gpu", *KIT.split()], cwd=project, check=True)
    _pack(folder / "registry", ARCHIVE)
    _pack(project, FILES, but=("calibration.npz", "golden.npz", "tiny.onnx", "release.pem", "report.html"))


def _pack(folder: Path, archive: Path, but: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in but:
                file.write(path, path.relative_to(folder))


if __name__ == "__main__":
    main()
