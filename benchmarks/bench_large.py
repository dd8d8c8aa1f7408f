"""What a model over 2 GB costs to build: memory of the driver and of each step, disk, and what a changed weight sends.

A synthetic transformer is written, opened and run once by ONNX Runtime alone (what the runtime itself takes), built,
changed in one weight and built again. Memory is resident memory, private and with mapped files, sampled every 50 ms.
Usage: python -m benchmarks.bench_large FOLDER [--gb 2.6] [--width 2048] [--precisions fp32,int8] [--once]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml

from benchmarks.large_model import TOKENS, change_weight, layers_for, write_model
from builders.reference import ReferenceSession

_TICK_S = 0.05
BATCH = 2


@dataclass
class Peak:
    """The most that a process held, in bytes. private: without mapped files."""

    resident: int = 0
    private: int = 0

    def add(self, pid: int) -> None:
        """Take in what a process holds now."""
        info = psutil.Process(pid).memory_info()
        self.resident, self.private = max(self.resident, info.rss), max(self.private, info.rss - info.shared)


@dataclass
class Watched:
    """What a command took. steps: by the request's name, and its own number.  disk_bytes: the most under `folders`."""

    driver: Peak = field(default_factory=Peak)
    steps: dict[str, Peak] = field(default_factory=dict)
    disk_bytes: int = 0
    seconds: float = 0.0
    code: int = 0


def watch(words: Sequence[str], folders: Sequence[Path], environment: dict[str, str]) -> Watched:
    """Run a command and look at it and its children."""
    watched_duration, names, start_s = Watched(), dict[int, str](), time.monotonic()
    process = subprocess.Popen(words, env=environment)
    ticks = 0
    while process.poll() is None:
        with suppress(psutil.Error):
            watched_duration.driver.add(process.pid)
            for child in psutil.Process(process.pid).children(recursive=True):
                if name := names.get(child.pid) or _step_of(child):
                    names[child.pid] = name
                    watched_duration.steps.setdefault(name, Peak()).add(child.pid)
        if ticks % 10 == 0:
            watched_duration.disk_bytes = max(watched_duration.disk_bytes, disk_bytes(folders))
        ticks += 1
        time.sleep(_TICK_S)
    watched_duration.seconds, watched_duration.code = time.monotonic() - start_s, process.returncode
    return watched_duration


def _step_of(child: psutil.Process) -> str:
    """The name of the request that a job's process runs; '' of another process."""
    if not {"builders.execution.child", "builders.execution.fork_server"} & {*child.cmdline()}:
        return ""
    with suppress(OSError, ValueError, KeyError):
        job = json.loads((Path(child.cwd()) / "job.json").read_text())
        return f"{job['request']['type'].rpartition(':')[2]} {child.pid}"
    return ""


def disk_bytes(folders: Sequence[Path]) -> int:
    """Bytes of the files under some folders, those with several names once."""
    return sum({(facts.st_dev, facts.st_ino): facts.st_blocks * 512 for facts in _files(folders)}.values())


def _files(folders: Sequence[Path]) -> Iterator[os.stat_result]:
    for folder in folders:
        for root, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    yield (Path(root) / name).stat()


def run_alone(model: Path, width: int) -> None:
    """Open a model as it is written, and run one batch."""
    with ReferenceSession(model) as session:
        session.run({"x": np.zeros((BATCH, TOKENS, width), np.float32)})


def write_spec(folder: Path, width: int, precisions: Sequence[str], backends: Sequence[str]) -> Path:
    """A spec of the model in a folder, with samples where a precision needs them."""
    rng = np.random.default_rng(1)
    samples = {"x": rng.standard_normal((4, TOKENS, width), np.float32)}
    np.savez(folder / "calibration.npz", **samples)
    spec = {
        "model": "large",
        "source": {"onnx": "model.onnx"},
        "inputs": {"x": {"dtype": "float32", "shape": ["batch", TOKENS, width]}},
        "outputs": ["y"],
        "dims": {"batch": {"min": 1, "opt": BATCH, "max": BATCH}},
        "precisions": list(precisions),
        "targets": ["cpu"],
        "backends": {name: {} for name in backends},
        "calibration": {"data": "calibration.npz"},
        "validation": {"latency": "off", "attribution": "off"},
        "build": {"memory_mib": 60_000},
        "timeouts": {"export_s": 7200, "proof_s": 7200, "quantization_s": 7200, "calibration_s": 7200},
    }
    if not {"int8", "fp8"} & {*precisions}:
        del spec["calibration"]
    (folder / "large.yaml").write_text(yaml.safe_dump(spec))
    return folder / "large.yaml"


def blobs_of(registry: Path) -> dict[str, int]:
    """Sizes of a registry's blobs by name."""
    return {path.name: path.stat().st_size for path in (registry / "blobs").rglob("*") if path.is_file()}


def report(title: str, found: Watched, alone: Peak, model_bytes: int) -> None:
    """Print a build's figures in MiB, and over those of the runtime alone."""
    print(f"\n{title}: exit {found.code}, {found.seconds:.0f} s, disk {found.disk_bytes / model_bytes:.2f} x model")
    print(f"{'process':40} {'resident':>9} {'private':>9} {'private / runtime':>18}")
    for name, peak in [("runtime alone", alone), ("driver", found.driver), *found.steps.items()]:
        ratio = peak.private / max(alone.private, 1)
        print(f"{name:40} {peak.resident >> 20:9} {peak.private >> 20:9} {ratio:18.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--backends", default="onnxruntime")
    parser.add_argument("--once", action="store_true", help="do not change a weight and build again")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    source, registry, work = (chosen.folder / name for name in ("source", "registry", "work"))
    if chosen.alone:
        run_alone(source / "model.onnx", chosen.width)
        return
    if chosen.folder.exists():
        parser.error(f"{chosen.folder} is there already; name a new folder")
    work.mkdir(parents=True)
    model = write_model(source, layers_for(int(chosen.gb * 1e9), chosen.width), chosen.width)
    spec = write_spec(source, chosen.width, chosen.precisions.split(","), chosen.backends.split(","))
    size, folders = disk_bytes([source]), (source, registry, work)
    environment = {**os.environ, "TMPDIR": str(work.resolve())}
    words = [
        sys.executable,
        "-m",
        "benchmarks.bench_large",
        str(chosen.folder),
        "--width",
        str(chosen.width),
        "--alone",
    ]
    single_driver = watch(words, folders, environment).driver
    build = [sys.executable, "-m", "enginesmith", "build", str(spec), "--registry", str(registry)]
    report(f"build of {size / 1e9:.2f} GB", watch(build, folders, environment), single_driver, size)
    if chosen.once:
        return
    blobs_before = blobs_of(registry)
    change_weight(model)
    second_watch = watch(build, folders, environment)
    fresh = {name: bytes_ for name, bytes_ in blobs_of(registry).items() if name not in blobs_before}
    report("one weight changed", second_watch, single_driver, size)
    print(
        f"new blobs: {len(fresh)}, {sum(fresh.values()) >> 20} MiB; the largest {max(fresh.values(), default=0) >> 20}"
    )


if __name__ == "__main__":
    main()
