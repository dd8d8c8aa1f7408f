"""The page of a canary for people: one self-contained HTML file, the verdict first, drawn from the report's JSON alone.

What observations and specs hold anybody may have written: the template escapes it, and pictures hold numbers only.
"""

from collections.abc import Mapping
from typing import Any

from enginery.recording.outputs import EQUAL_DB
from validation.canary.judging.describing import describe_interval, describe_power, describe_value
from validation.canary.judging.thresholds import probability
from validation.canary.pictures import criteria_svg, differences_svg, ecdf_svg, over_time_svg
from validation.reporting.html import templates

TONES = {"PASS": "proven", "FAIL": "failed", "INSUFFICIENT": "unproven"}
SYMBOLS = {"PASS": "✓", "FAIL": "✕", "INSUFFICIENT": "?"}
HEADLINES = {
    "PASS": "PASS: the candidate is not worse than the baseline",
    "FAIL": "FAIL: the candidate is worse than the baseline",
    "INSUFFICIENT": "INSUFFICIENT: this much data decides neither way",
}
SIDES = ("candidate", "baseline")

Json = Mapping[str, Any]


def render(report: Json) -> str:
    """The page for a report's JSON (`validation.canary.report.make_report`)."""
    return templates().get_template("canary/canary.html.j2").render(_view(report))


def _view(report: Json) -> dict[str, Any]:
    seen = report["shown"]
    margins = {probability(name): margin for name, margin in report["thresholds"]["latency"].items()}
    criteria = [_criterion(item) for item in report["criteria"]]
    return {
        "report": report,
        "tone": TONES[report["verdict"]],
        "headline": HEADLINES[report["verdict"]],
        "tones": TONES,
        "symbols": SYMBOLS,
        "names": {name: _name(report[name]) for name in ("candidate", "baseline")},
        "criteria": criteria,
        "criteria_picture": criteria_svg(criteria),
        "seen": seen,
        "apart": [row for row in seen["worst"] if row["sqnr_db"] < EQUAL_DB],
        "again": _again(report),
        "ecdf": ecdf_svg(seen["ecdf"]),
        "over_time": over_time_svg(seen["over_time"]),
        "differences": differences_svg(seen["quantiles"], margins),
        "final": report["looks"]["fractions"][-1] >= 1.0,
    }


def _again(report: Json) -> str:
    """The command that replays the same traffic; empty for what production observed, and for engines without a name.

    The report knows its traffic by digest, not by where the file lay.
    """
    traffic, sides = report["traffic"], [report[side] for side in ("candidate", "baseline")]
    if "digest" not in traffic or not all("model" in side for side in sides):
        return ""
    words = ["enginery canary run"]
    words += [f"--{name} {side['model']}@{side.get('version', '?')}" for name, side in zip(SIDES, sides, strict=True)]
    words += [f"--{name} {sides[0][name]}" for name in ("target", "precision") if name in sides[0]]
    options = ("scale", "duration", "seed", "in_flight")
    words += [f"--{name.replace('_', '-')} {traffic[name]}" for name in options if name in traffic]
    return " ".join([*words, "--traffic TRAFFIC --out again"])


def _name(identity: Json) -> str:
    if "model" not in identity:
        return "unnamed"
    unit = " ".join(str(identity[part]) for part in ("target", "precision", "backend") if part in identity)
    return f"{identity['model']}@{identity.get('version', '?')}" + (f" {unit}" if unit else "")


def _criterion(item: Json) -> dict[str, Any]:
    texts = {f"{name}_text": describe_value(item[name], item["kind"]) for name in ("estimate", "margin")}
    texts |= {"value_text": "not measured" if item["note"] else describe_interval(item)}
    texts = {name: text.replace("-", "−") for name, text in texts.items()}  # noqa: RUF001 - a real minus sign
    return {**item, **texts, "power": describe_power(item)}
