"""What the page says about drift: the three joints of each output side by side, and every check of each joint.

Many units share a graph, so equal findings are shown once, with the units that they hold for.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginery.core.proof.report import Check
from enginery.core.text import pluralize
from enginery.core.types import PRECISIONS

JOINTS = {
    "export": "the ONNX model against the original framework",
    "quantization": "the quantized or cast graph against the fp32 graph",
    "engine": "the compiled engine against the graph it was built from",
}
_BAR_DB = 140.0
# A joint that is so much worse than the others has made the drift.
_APART_DB = 6.0
# Metrics with a least value; `bound` needs them where a value is exactly its limit.
AT_LEAST = (
    *("sqnr_db", "centered_sqnr_db", "slice_sqnr_db", "quartile_sqnr_db"),
    *("cosine", "agreement", "argmax_agreement", "accuracy"),
)
# Rows shown at once.
SHOWN = 12

Json = Mapping[str, Any]


def side_by_side(reports: Sequence[Json]) -> dict[str, Any]:
    """Rows of output and units with a cell per joint, failed ones first: shown, and the rest."""
    rows: dict[str, dict[str, Any]] = {}
    for report in reports:
        for output, cells in _cells(report):
            key = repr((report["precision"], output, [cell and cell["key"] for cell in cells.values()]))
            row = rows.setdefault(key, {"output": output, "cells": cells, "units": [], "cause": _cause(cells)})
            row["units"].append(report)
    found = sorted(rows.values(), key=_place)
    named = [{**row, "title": _units_title(row["units"]), "failed": _failed(row["cells"]) is not None} for row in found]
    return {"joints": list(JOINTS), "shown": named[:SHOWN], "rest": named[SHOWN:]}


def _cells(report: Json) -> Iterator[tuple[str, dict[str, Any]]]:
    """Per output a cell for each joint; None where nothing was measured."""
    checks = [Check.from_json(check) for check in report["checks"] if check["joint"] in JOINTS]
    for output in dict.fromkeys(check.output for check in checks):
        mine = [check for check in checks if check.output == output]
        cells = {joint: _beside([check for check in mine if check.joint == joint]) for joint in JOINTS}
        if any(cell and cell["shown"] for cell in cells.values()):
            yield output, cells


def _beside(checks: Sequence[Check]) -> dict[str, Any] | None:
    """What a cell shows: the worst SQNR (of integers, agreement); a failed check of another name in their place."""
    failed = [check for check in checks if not check.passed]
    known = _worst(checks, "sqnr_db") or _worst(checks, "agreement")
    if failed and (known is None or known["check"].passed):
        # Drift before promises; what they measure is on scales of their own.
        known = {"check": min(failed, key=_is_promise), "at": 0.0, "limit_at": None}
    if not checks:
        return None
    return {"shown": known, "failed": len(failed), "all": len(checks), "key": [check.to_json() for check in checks]}


def _is_promise(check: Check) -> bool:
    return check.name.startswith("contract ")


def bound(check: Check) -> str:
    """'≤' or '≥' of a check's limit. Which it is follows from value and verdict, and where they are equal from the
    metric: nearness and shares have a least value, all else a greatest."""
    if check.value is None or check.limit is None or math.isnan(check.value) or check.value == check.limit:
        return "≥" if check.name in AT_LEAST else "≤"
    return "≤" if (check.value < check.limit) == check.passed else "≥"


def _failed(cells: Json) -> str | None:
    return next((joint for joint, cell in cells.items() if cell and cell["failed"]), None)


def _cause(cells: Json) -> str:
    """The joint that made the drift, in words: the first that fails; else the one far below the others."""
    if joint := _failed(cells):
        return f"fails at {joint}"
    known = sorted((level, joint) for joint, cell in cells.items() if (level := _level(cell)) is not None)
    if len(known) < 2 or known[0][0] == math.inf or known[1][0] - known[0][0] < _APART_DB:
        return ""
    return f"nearly all at {known[0][1]}"


def _level(cell: Json | None) -> float | None:
    check = cell["shown"]["check"] if cell and cell["shown"] else None
    return check.value if check and check.name == "sqnr_db" and check.value is not None else None


def _place(row: Json) -> tuple[bool, int]:
    precision = row["units"][0]["precision"]
    return _failed(row["cells"]) is None, PRECISIONS.index(precision) if precision in PRECISIONS else len(PRECISIONS)


def _units_title(units: Sequence[Json]) -> dict[str, Any]:
    """A unit's own name, or the precision of several, with their names."""
    names = [str(unit["unit"]) for unit in units]
    if len(units) == 1:
        return {"text": names[0], "more": "", "names": names}
    return {"text": str(units[0]["precision"]), "more": pluralize(len(units), "unit"), "names": names}


def joints(reports: Sequence[Json]) -> list[dict[str, Any]]:
    """Per joint the distinct sets of checks, each with the units it holds for: many units share a graph."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for joint in JOINTS:
            checks = [check for check in report["checks"] if check["joint"] == joint]
            if checks:
                group = groups.setdefault((joint, repr(checks)), {"joint": joint, "checks": checks, "units": []})
                group["units"].append(report)
    return [
        {"name": joint, "what": what, "groups": [_group(group) for group in groups.values() if group["joint"] == joint]}
        for joint, what in JOINTS.items()
    ]


def _group(group: Json) -> dict[str, Any]:
    checks = [Check.from_json(check) for check in group["checks"]]
    return {
        "title": _title(group["joint"], group["units"]),
        "units": [report["unit"] for report in group["units"]],
        "checks": checks,
        "failed": [check for check in checks if not check.passed],
        "sqnr": _worst(checks, "sqnr_db"),
        "max_rel": _worst(checks, "max_rel"),
        "agreement": _worst(checks, "argmax_agreement") or _worst(checks, "agreement"),
    }


def _title(joint: str, reports: Sequence[Json]) -> str:
    if joint == "engine" and len(reports) == 1:
        return str(reports[0]["unit"])
    names = dict.fromkeys(f"{report['precision']} {report['backend']}" for report in reports)
    if joint == "export":
        return "fp32 graph"
    return ", ".join(names)


def _worst(checks: Sequence[Check], name: str) -> dict[str, Any] | None:
    """The worst check of a metric, and where a bar of it ends and its limit stands, in percent (SQNR: of 140 dB)."""
    found = [check for check in checks if check.name == name and check.value is not None]
    if not found:
        return None
    worst = min(found, key=lambda check: (check.passed, _goodness(check)))
    return {"check": worst, "at": _bar(worst.value), "limit_at": None if worst.limit is None else _bar(worst.limit)}


def _goodness(check: Check) -> float:
    value = -math.inf if check.value is None or math.isnan(check.value) else check.value
    return -value if check.name.startswith("max_") else value


def _bar(value: float | None) -> float:
    if value is None or math.isnan(value):
        return 0.0
    return round(100 * min(max(value, 0.0), _BAR_DB) / _BAR_DB, 2)
