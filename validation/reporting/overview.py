"""What the HTML report shows of a version, worked out from its manifest and reports: plain values, no markup."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginery.core.proof.report import OVERLAP, Check
from enginery.core.types import PRECISIONS
from validation.attribution.words import section
from validation.latency.section import sections
from validation.reporting.distributions import distributions, worst_cases
from validation.reporting.quantized import quantizations
from validation.reporting.stages import joints, side_by_side

STATUSES = ("proven", "unproven", "failed", "refused")
_SYMBOLS = {"proven": "✓", "unproven": "?", "failed": "✕", "refused": "-"}

Json = Mapping[str, Any]


def overview(manifest: Json, pictures: bool = True) -> dict[str, Any]:
    """The names that the template uses. manifest: its JSON, with `reports` and, if any, `failures`, `quantization`,
    `attributions`, `latencies`, `canaries`.  pictures: without them nothing that needs a picture is worked out."""
    engines = [_engine(index, entry, manifest) for index, entry in enumerate(manifest.get("engines", ()))]
    counts = {status: sum(engine["status"] == status for engine in engines) for status in STATUSES}
    return {
        "manifest": manifest,
        # A run that published nothing has a page, and no version.
        "reference": f"{manifest['model']}@{manifest['version']}" if manifest["version"] else manifest["model"],
        "engines": engines,
        "groups": _by_target([engine for engine in engines if engine["status"] != "refused"]),
        "counts": counts,
        "symbols": _SYMBOLS,
        "verdict": _verdict(counts),
        "matrix": _matrix(engines),
        "tasks": _tasks(manifest, engines),
        "joints": joints(manifest.get("reports", ())),
        "beside": side_by_side(manifest.get("reports", ())),
        "distributions": distributions(manifest.get("reports", ())) if pictures else [],
        "worst": worst_cases(manifest.get("reports", ())),
        "quantizations": quantizations(manifest) if pictures else [],
        "attributions": [section(item) for item in manifest.get("attributions", ())],
        "latencies": sections(manifest.get("latencies", {}), pictures),
        "canaries": manifest.get("canaries", ()),
        "again": list(_again(f"{manifest['model']}@{manifest['version']}", engines)),
        "refusals": _by_reason(engines),
        "failures": manifest.get("failures", ()),
        "provenance": _provenance(manifest),
    }


def _verdict(counts: Mapping[str, int]) -> dict[str, str]:
    """Status and headline of the whole version."""
    usable = counts["proven"] + counts["unproven"]
    if counts["failed"]:
        rest = ", ".join(f"{counts[status]} {status}" for status in ("proven", "unproven") if counts[status])
        text = f"{_count(counts['failed'], 'engine')} failed; {rest or 'there is none to pull'}"
        return {"status": "failed", "text": text}
    if counts["unproven"]:
        rest = f"{counts['unproven']} not yet run on their hardware"
        return {"status": "unproven", "text": f"{counts['proven']} of {_count(usable, 'engine')} proven, {rest}"}
    if usable:
        return {"status": "proven", "text": f"{'All ' if usable > 1 else ''}{_count(usable, 'engine')} proven"}
    return {"status": "failed", "text": "There is no engine to pull"}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _engine(index: int, entry: Json, manifest: Json) -> dict[str, Any]:
    """An engine entry with the parts of its report that its row shows."""
    report = _report_of(entry, manifest)
    checks = [Check.from_json(check) for check in report["checks"]] if report else []
    limited = [check for check in checks if not check.passed or (check.joint != "task" and _has_room(check))]
    return {
        **entry,
        "index": index,
        "unit": _unit(entry),
        "tightest": min(limited, key=headroom_db, default=None),
        "failed_checks": sum(not check.passed for check in checks),
        "total_checks": len(checks),
        "ran": any(check.joint == "engine" for check in checks),
    }


def _again(reference: str, engines: Sequence[Json]) -> Iterator[dict[str, str]]:
    """Commands that do again what failed: of a published engine the proof, else the build."""
    for engine in engines:
        if engine["status"] == "failed" and engine["digest"]:
            run = f"enginery validate {reference} --target {engine['target']}"
            drifted = f"enginery attribute {reference} --target {engine['target']} --precision {engine['precision']}"
            yield {"unit": engine["unit"], "command": f"{run}\n{drifted}"}
        elif engine["status"] == "failed" and engine["failed_checks"]:
            words = f"--target {engine['target']} --precision {engine['precision']} --backend {engine['backend']}"
            yield {"unit": engine["unit"], "command": f"enginery build SPEC.yaml {words}"}


def _by_target(engines: Sequence[Json]) -> list[dict[str, Any]]:
    """The engines of each target, with their reasons, each said once."""
    groups: dict[str, list[Json]] = {}
    for engine in engines:
        groups.setdefault(engine["target"], []).append(engine)
    return [{"target": target, "engines": members, "reasons": _reasons(members)} for target, members in groups.items()]


def _reasons(engines: Sequence[Json]) -> list[dict[str, str]]:
    reasons: dict[str, list[str]] = {}
    for engine in engines:
        reasons.setdefault(engine["reason"], []).append(engine["precision"])
    return [{"text": text, "precisions": ", ".join(dict.fromkeys(names))} for text, names in reasons.items() if text]


def _report_of(entry: Json, manifest: Json) -> Json | None:
    return next((report for report in manifest.get("reports", ()) if report["unit"] == _unit(entry)), None)


def _unit(entry: Json) -> str:
    return f"{entry['target']} {entry['precision']} {entry['backend']}"


def _has_room(check: Check) -> bool:
    """Whether a check can be passed more or less narrowly: not a count that has to be 0, not the overlap of samples,
    and not a promise of the contract, most of which are kept or not, and the others on a scale of their own."""
    counted = check.limit == check.value == 0 or check.name == OVERLAP
    return check.limit is not None and not counted and not check.name.startswith("contract ")


def headroom_db(check: Check) -> float:
    """How far a value is from its limit, as a ratio in decibels; -inf for a failed check, so that it comes first."""
    if not check.passed:
        return -math.inf
    if check.value is None or check.limit is None or not _has_room(check):
        return math.inf
    if check.name.endswith("sqnr_db"):
        return check.value - check.limit
    if check.name.startswith("max_"):
        return _decibels(check.limit, check.value)
    return _decibels(1 - check.limit, 1 - check.value)


def _decibels(limit: float, value: float) -> float:
    if value <= 0:
        return math.inf
    return 20 * math.log10(limit / value) if limit > 0 else -math.inf


def _matrix(engines: Sequence[Json]) -> dict[str, Any]:
    """Targets by precisions, each cell holding its engines."""
    targets = list(dict.fromkeys(engine["target"] for engine in engines))
    columns = [precision for precision in PRECISIONS if any(engine["precision"] == precision for engine in engines)]
    rows = [
        {"target": target, "cells": [_cell(engines, target, precision) for precision in columns]} for target in targets
    ]
    return {"columns": columns, "rows": rows}


def _cell(engines: Sequence[Json], target: str, precision: str) -> list[Json]:
    return [engine for engine in engines if (engine["target"], engine["precision"]) == (target, precision)]


def _tasks(manifest: Json, engines: Sequence[Json]) -> dict[str, Any] | None:
    """The task metric of each graph and of each engine that was run, placed on one axis with the floor."""
    metric = (manifest.get("spec", {}).get("golden") or {}).get("metric") or {}
    points = [
        {"name": name, "kind": "graph", "value": float(value)}
        for name, values in manifest.get("metrics", {}).items()
        for value in values.values()
    ]
    points += [{"name": name, "kind": "engine", "value": value} for name, value in _engine_tasks(manifest, engines)]
    if not points:
        return None
    floor = metric.get("floor")
    axis = _axis([point["value"] for point in points] + ([floor] if floor is not None else []))
    placed = [
        {**point, "at": _place(point["value"], axis), "passed": not _below(point["value"], floor)} for point in points
    ]
    at = None if floor is None else _place(floor, axis)
    return {"name": metric.get("name", "metric"), "points": placed, "floor": floor, "floor_at": at, "axis": axis}


def _engine_tasks(manifest: Json, engines: Sequence[Json]) -> Iterator[tuple[str, float]]:
    for engine in engines:
        report = _report_of(engine, manifest) or {"checks": ()}
        values = [check["value"] for check in report["checks"] if check["joint"] == "task"]
        if values and any(check["joint"] == "engine" for check in report["checks"]):
            yield engine["unit"], float(values[-1])


def _axis(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    pad = max((high - low) * 0.15, 0.005)
    return max(0.0, low - pad) if low >= 0 else low - pad, min(1.0, high + pad) if high <= 1 else high + pad


def _place(value: float, axis: tuple[float, float]) -> float:
    """Percent along the axis."""
    low, high = axis
    return round(100 * (value - low) / (high - low), 2) if math.isfinite(value) and high > low else 0.0


def _below(value: float, floor: float | None) -> bool:
    return floor is not None and not value >= floor


def _by_reason(engines: Sequence[Json]) -> list[dict[str, Any]]:
    reasons: dict[str, list[str]] = {}
    for engine in engines:
        if engine["status"] == "refused":
            reasons.setdefault(engine["reason"], []).append(engine["unit"])
    return [{"reason": reason, "units": units} for reason, units in reasons.items()]


def _provenance(manifest: Json) -> list[dict[str, Any]]:
    """Titled groups of facts; digests are set in a fixed-width face."""
    identity = {"content": manifest.get("content"), "version report": manifest.get("report")}
    groups = [
        ("Identity", identity),
        ("What went in", manifest.get("provenance", {})),
        ("What was made of it", manifest.get("sources", {})),
        ("Toolchain", manifest.get("toolchain", {})),
        ("Host", manifest.get("host", {})),
    ]
    found = [{"title": title, "facts": {k: v for k, v in facts.items() if v is not None}} for title, facts in groups]
    return [group for group in found if group["facts"]]
