"""docs/zoo.md, out of the results that lie in build/zoo: one table for each subject."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.building import FIRST
from benchmarks.zoo.packages import FOLDER, KNOWN

Results = Mapping[str, Mapping[str, Any]]
_FILES = {
    "source": "original",
    "enginesmith fp32": "fp32",
    "enginesmith fp16": "fp16",
    "onnxconverter-common fp16": "converter-common fp16",
    "enginesmith int8": "int8",
    "onnxruntime int8": "onnxruntime int8",
    "olive int8": "Olive int8",
}
_HEAD = """\
# Public models

What `enginesmith init` and `enginesmith build` make of public ONNX graphs. To repeat it, run `make zoo`: it
downloads the packages, checks their digests and writes this page.

Inputs are rendered and scanned pages, photographs, files, text and synthesized speech. The specs are as
`enginesmith init` wrote them, with narrower sizes where `benchmarks/zoo/graphs.yaml` lists some. Times and memory were
measured on two busy cores: compare columns, not rows.
"""
_QUALITY = """\
SQNR in dB on 12 inputs outside the calibration data, against the original graph without optimization: worst output /
worst slice of an output. "exact": no difference. Bold columns are Enginesmith's. An empty cell is an engine that was
not proven, or an error of the other tool. onnxruntime int8: `quantize_static` with Q/DQ,
MinMax, uint8 activations and int8 weights per channel. converter-common: `convert_float_to_float16` with inputs and
outputs kept. Olive: `OnnxStaticQuantization` with its defaults. All use the same calibration samples.
"""
_COSTS = """\
Wall-clock time of `enginesmith build` with an empty registry, for all precisions and steps, and the peak memory of all
its processes (PSS).
"""
_OTHERS = """\
What each backend builds or refuses, in the first precision of the spec. TensorRT for RTX builds every precision for
sm_80 without a GPU, so its engines are unproven. An empty cell was not tried.
"""


def write_page(path: Path) -> None:
    """Write the page of everything that lies there."""
    results = {name: read(name, f"result-{FIRST}.json") for name in KNOWN["graphs"]}
    results = {name: result for name, result in results.items() if result}
    judged = {name: read(name, "peers.json") for name in results}
    parts = [_HEAD, *_outcomes(results), *_reasons(results), "## Quality\n", _QUALITY]
    parts += [*_table(["graph", *_columns()], _rows(judged)), *_costs(results), *_others(results)]
    path.write_text("\n".join(parts), encoding="utf-8")


def read(name: str, file: str) -> dict[str, Any]:
    """A result of a graph; {} where there is none."""
    path = FOLDER / name / file
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _outcomes(results: Results) -> Iterator[str]:
    precisions = ["fp32", "fp16", "int8"]
    units = [unit for result in results.values() for unit in result.get("units", ())]
    proven = sum(unit["status"] == "proven" for unit in units)
    yield "## Results\n"
    yield (
        f"{len(results)} graphs and {len(units)} CPU engines: {proven} are proven. The section 'Not proven' "
        "lists the others with reasons.\n"
        "A cell is empty where `init` does not choose the precision: the graph is quantized already or has no "
        "weights.\n"
    )
    rows = []
    for name, result in results.items():
        graph, found = KNOWN["graphs"][name], {unit["precision"]: unit for unit in result.get("units", ())}
        otherwise = "error" if "error" in result else ""
        status = [found[precision]["status"] if precision in found else otherwise for precision in precisions]
        rows.append([name, _origin(graph), graph["kind"], *status])
    yield from _table(["graph", "package", "kind", *precisions], rows)


def _origin(graph: Mapping[str, Any]) -> str:
    if "torch" in graph:
        return f"{graph['torch']}, seeded weights"
    if "grown" in graph:
        return "scikit-learn trees, by skl2onnx"
    package = KNOWN["packages"][graph["package"]]
    return f"{graph['package']} {package['version']} ({package['licence']})"


def _reasons(results: Results) -> Iterator[str]:
    rows = []
    for name, result in results.items():
        units = [unit for unit in result.get("units", ()) if unit["status"] != "proven"]
        rows += [[name, unit["precision"], f"{unit['status']}: {unit['reason']}"] for unit in units]
        rows += [[name, "all", result["error"]]] if "error" in result else []
    if rows:
        yield "### Not proven\n"
        yield from _table(["graph", "precision", "reason"], rows)


def _columns() -> list[str]:
    return [f"**{title}**" if file.startswith("enginesmith") else title for file, title in _FILES.items()]


def _rows(judged: Results) -> Iterator[list[str]]:
    for name, files in judged.items():
        if files:
            yield [name, *(_show_quality(files.get(file, {})) for file in _FILES)]


def _show_quality(file: Mapping[str, Any]) -> str:
    if "sqnr_db" not in file:
        return ""
    whole, worst = ("exact" if file[key] is None else f"{file[key]:.1f}" for key in ("sqnr_db", "slice_db"))
    equal = f", {file['equal']:.0%} equal" if file["equal"] < 1 else ""
    return (whole if whole == worst else f"{whole} / {worst}").replace("-999.0", "not finite") + equal


def _costs(results: Results) -> Iterator[str]:
    yield "## Build cost\n"
    yield _COSTS
    rows = [[name, f"{result['seconds']:.0f}", str(result["peak_mib"])] for name, result in results.items()]
    yield from _table(["graph", "seconds", "peak MiB"], rows)


def _others(results: Results) -> Iterator[str]:
    files = sorted(
        {path.name for name in results for path in (FOLDER / name).glob("result-*.json")} - {f"result-{FIRST}.json"}
    )
    if not files:
        return
    yield "## Other backends\n"
    yield _OTHERS
    backends = [file.removeprefix("result-").removesuffix(".json") for file in files]
    found = {name: [read(name, file) for file in files] for name in results}
    rows = [[name, *map(_statuses, each)] for name, each in found.items() if any(each)]
    yield from _table(["graph", *backends], rows)
    said = [
        [name, backend, text]
        for name, each in found.items()
        for backend, result in zip(backends, each, strict=True)
        for text in _said(result)
    ]
    if said:
        yield from _table(["graph", "backend", "reason"], said)


def _statuses(result: Mapping[str, Any]) -> str:
    units = [f"{unit['precision']} {unit['status']}" for unit in result.get("units", ())]
    return "error" if "error" in result else ", ".join(units)


def _said(result: Mapping[str, Any]) -> list[str]:
    units = [unit for unit in result.get("units", ()) if unit["status"] not in ("proven", "unproven")]
    texts = [f"{unit['precision']} {unit['status']}: {unit['reason']}" for unit in units]
    return [*texts, *([result["error"]] if "error" in result else [])]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(_plain(cell) for cell in row)} |"
    yield ""


def _plain(text: str) -> str:
    """A cell: one line without bars, of 300 letters at most."""
    words = str(text).replace(f"{FOLDER}/", "").replace("|", "/").replace("<", "&lt;")
    words = " ".join(words.split())
    return words if len(words) <= 300 else f"{words[:300]} ..."
