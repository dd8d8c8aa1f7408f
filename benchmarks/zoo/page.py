"""docs/zoo.md, out of the results that lie in build/zoo: a row for each graph, a line for each failure.

Rows of the page whose graphs have no result here stay, so that a run of some graphs, on another machine, adds to it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo import rehearsal
from benchmarks.zoo.building import FIRST
from benchmarks.zoo.packages import FOLDER, KNOWN

Rows = Iterable[Sequence[str]]
_PRECISIONS = ("fp32", "fp16", "int8")
_PEERS = {"onnxruntime int8": "onnxruntime int8", "olive int8": "Olive int8"}
_RESULTS = ("graph", "package", "kind", "run", "edits", "s", "MiB", *_PRECISIONS, *_PEERS.values())
_REASONS = ("graph", "precision", "reason")
_BACKENDS = ("aotinductor", "iree", "tensorrt-rtx", "tvm", "xla")
_OTHERS, _SAID = ("graph", *_BACKENDS), ("graph", "backend", "reason")
_HEAD = """\
# Public models

What `enginesmith init --from-requests` and `enginesmith build` make of graphs of others on a CPU. To repeat it, run
`make zoo`: it downloads the packages, checks their digests, builds what has no result yet, and writes this page.

{summary}

- Decibels: SQNR of the worst output against the original graph without optimization, run by onnxruntime in another
  process on 12 inputs that the build never saw. "exact": no difference.
- run: rows of 2026-11-23 had narrower sizes written by hand, and were judged on golden data. Rows of 2026-11-29 had
  180 s for a command, and random inputs. Later rows had 600 to 1,500 s on two cores with much other work.
- edits: lines of the spec that were changed after `init`.
- s, MiB: of the build, with an empty registry, on busy cores: for all precisions, and the memory of all its processes
  (PSS).
- onnxruntime: `quantize_static`, Q/DQ, MinMax, uint8 and int8 per channel. Olive: `OnnxStaticQuantization`. Both have
  the same calibration data. An empty cell was not tried, or is an error of theirs. Where a row was made again without
  them, the cells are those of its earlier run.
- fp16 and int8 are empty where `init` leaves them out: the graph is quantized already or has no weights.
- Inputs are rendered and scanned pages, photographs, files, text and synthesized speech; random numbers and tokens for
  graphs whose `inputs` is `normal` or `tokens` in `benchmarks/zoo/graphs.yaml`. Modules of torch, timm and transformers
  have seeded weights.

"""
_OTHER_TEXT = """\
What each backend builds or refuses, in the first precision of the spec. TensorRT for RTX builds every precision for
sm_80 without a GPU, so its engines are unproven. An empty cell was not tried.
"""
_REHEARSED_TEXT = """\
What `enginesmith rehearse --toolchain NAME==VERSION` says of graphs that a registry serves, each in the first precision
of its spec (`python -m benchmarks.zoo --rehearse NAME==VERSION`), in commands of 8 to 19 graphs. SQNR: the engine
against its graph on golden inputs, old -> new toolchain. The table has {rehearsed} of {known} graphs. The others were
not run or did not build. The cores were busy, so most timings decide nothing.
"""


def write_page(path: Path) -> None:
    """Write the page of everything that lies there, and of the rows that it has."""
    old_tables = _read_tables(path.read_text(encoding="utf-8"))
    results = {name: result for name in KNOWN["graphs"] if (result := read(name, f"result-{FIRST}.json"))}
    old_rows = old_tables.get(_RESULTS, ())
    old_peers = {row[0]: row[-len(_PEERS) :] for row in old_rows}
    new_rows = [_row(name, result, old_peers.get(name, [""] * len(_PEERS))) for name, result in results.items()]
    rows = _join(old_rows, new_rows, results)
    reasons = _join(
        old_tables.get(_REASONS, ()),
        [row for name, result in results.items() for row in _reasons(name, result)],
        results,
    )
    values = {name: found for name in results if any(found := [read(name, f"result-{b}.json") for b in _BACKENDS])}
    statuses = [[name, *map(_statuses, found)] for name, found in values.items()]
    remarks = [
        [name, backend, text]
        for name, found in values.items()
        for backend, result in zip(_BACKENDS, found, strict=True)
        for text in _said(result)
    ]
    parts = [_HEAD.format(summary=_summary(rows)) + "\n".join(_table(_RESULTS, rows)), "## Not proven\n"]
    parts += [*_table(_REASONS, reasons), "## Other backends\n", _OTHER_TEXT]
    parts += [*_table(_OTHERS, _join(old_tables.get(_OTHERS, ()), statuses, values))]
    parts += [*_table(_SAID, _join(old_tables.get(_SAID, ()), remarks, values))]
    rehearsed_result = rehearsal.read()
    rehearsed_result = _join(old_tables.get(rehearsal.HEAD, ()), rehearsed_result, {row[0] for row in rehearsed_result})
    if rehearsed_result:
        text = _REHEARSED_TEXT.format(rehearsed=len({row[0] for row in rehearsed_result}), known=len(KNOWN["graphs"]))
        parts += ["## Another version of onnxruntime\n", text, *_table(rehearsal.HEAD, rehearsed_result)]
    path.write_text("\n".join(parts), encoding="utf-8")


def read(name: str, file: str) -> dict[str, Any]:
    """A result of a graph; {} where there is none."""
    path = FOLDER / name / file
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _read_tables(text: str) -> dict[tuple[str, ...], list[list[str]]]:
    """The rows of the tables of a page, by their heads."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    rows: list[list[str]] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            rows = None
        elif rows is None:
            rows = tables.setdefault(tuple(cells), [])
        elif not line.startswith("|---"):
            rows.append(cells)
    return tables


def _join(old_rows: Rows, new_rows: Rows, redone: Iterable[str]) -> list[Sequence[str]]:
    """Rows of the page and new ones, in the order of graphs.yaml; of the graphs `redone` only the new ones."""
    places, redone_names = {name: place for place, name in enumerate(KNOWN["graphs"])}, set(redone)
    rows = [*(row for row in old_rows if row[0] in places and row[0] not in redone_names), *new_rows]
    return sorted(rows, key=lambda row: places[row[0]])


def _summary(rows: Sequence[Sequence[str]]) -> str:
    cells = [dict(zip(_RESULTS, row, strict=True)) for row in rows]
    count, total = len(rows), len(KNOWN["graphs"])
    texts = []
    for precision in _PRECISIONS:
        verdicts = [row[precision] for row in cells if row[precision]]
        texts.append(f"{precision} {sum(cell.startswith('proven') for cell in verdicts)} of {len(verdicts)}")
    is_whole = [
        row["edits"] == "0" and all(not row[p] or row[p].startswith("proven") for p in ("fp32", "fp16"))
        for row in cells
    ]
    return (
        f"{count} of {total} graphs were run. Proven are: {', '.join(texts)}. {sum(is_whole)} graphs have no edit and\n"
        "no failure in fp32 and fp16."
    )


def _row(name: str, result: Mapping[str, Any], old_peers: Sequence[str]) -> list[str]:
    """A row. old_peers: cells of peers that were not tried again."""
    graph, scores = KNOWN["graphs"][name], read(name, "peers.json")
    units = {unit["precision"]: unit for unit in result.get("units", ())}
    cells = [
        f"{units[precision]['status']} {_decibels(scores.get(f'enginesmith {precision}', {}))}".strip()
        if precision in units
        else ("" if units else "error")
        for precision in _PRECISIONS
    ]
    costs = [f"{result['seconds']:.0f}", str(result["peak_mib"] or "")] if units else ["", ""]
    peers = [_decibels(scores.get(file, {})) or old_cell for file, old_cell in zip(_PEERS, old_peers, strict=True)]
    return [name, _origin(graph), graph["kind"], result.get("date", ""), "0", *costs, *cells, *peers]


def _decibels(file: Mapping[str, Any]) -> str:
    if "sqnr_db" not in file:
        return ""
    whole_text = "exact" if file["sqnr_db"] is None else f"{file['sqnr_db']:.0f}"
    return whole_text.replace("-999", "not finite") + (f", {file['equal']:.0%} equal" if file["equal"] < 1 else "")


def _origin(graph: Mapping[str, Any]) -> str:
    if "torch" in graph:
        return f"{graph['torch']}, seeded weights"
    if "grown" in graph:
        return "scikit-learn trees, by skl2onnx"
    package = KNOWN["packages"][graph["package"]]
    return f"{graph['package']} {package['version']} ({package['licence']})"


def _reasons(name: str, result: Mapping[str, Any]) -> Iterator[list[str]]:
    units = [unit for unit in result.get("units", ()) if unit["status"] != "proven"]
    yield from ([name, unit["precision"], f"{unit['status']}: {unit['reason']}"] for unit in units)
    if "error" in result and not result.get("units"):
        yield [name, "all", result["error"]]


def _statuses(result: Mapping[str, Any]) -> str:
    units = [f"{unit['precision']} {unit['status']}" for unit in result.get("units", ())]
    return "error" if "error" in result and not units else ", ".join(units)


def _said(result: Mapping[str, Any]) -> list[str]:
    units = [unit for unit in result.get("units", ()) if unit["status"] not in ("proven", "unproven")]
    texts = [f"{unit['precision']} {unit['status']}: {unit['reason']}" for unit in units]
    return [*texts, *([result["error"]] if "error" in result and not units else [])]


def _table(head: Sequence[str], rows: Rows) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(_plain(cell) for cell in row)} |"
    yield ""


def _plain(text: str) -> str:
    """A cell: one line without bars, of 300 letters at most."""
    words = str(text).replace(f"{FOLDER}/", "").replace("|", "/").replace("<", "&lt;")
    words = " ".join(words.split())
    return words if len(words) <= 304 else f"{words[:300]} ..."
