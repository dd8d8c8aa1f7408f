"""The page of a canary for people: one self-contained HTML file, the verdict first, drawn from the report's JSON alone.

What observations and specs hold anybody may have written: the template escapes it, and pictures hold numbers only.
"""

from collections.abc import Mapping
from typing import Any

from validation.canary.judge import describe_value
from validation.canary.pictures import (
    differences_svg,
    ecdf_svg,
    interval_svg,
    over_time_svg,
    percent_text,
    seconds_text,
)
from validation.canary.thresholds import probability
from validation.html import time_text

TONES = {"PASS": "proven", "FAIL": "failed", "INSUFFICIENT": "unproven"}
SYMBOLS = {"PASS": "✓", "FAIL": "✕", "INSUFFICIENT": "?"}
HEADLINES = {
    "PASS": "PASS: the candidate is not worse than the baseline",
    "FAIL": "FAIL: the candidate is worse than the baseline",
    "INSUFFICIENT": "INSUFFICIENT: this much data decides neither way",
}

Json = Mapping[str, Any]


def render(report: Json) -> str:
    """The page for a report's JSON (`validation.canary.report.make_report`)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("validation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": lambda value: "" if value is None else seconds_text(value),
        "percent": lambda value: "" if value is None else percent_text(value),
        "when": time_text,
    }
    return environment.get_template("canary/canary.html.j2").render(_view(report))


def _view(report: Json) -> dict[str, Any]:
    seen = report["shown"]
    margins = {probability(name): margin for name, margin in report["thresholds"]["latency"].items()}
    return {
        "report": report,
        "tone": TONES[report["verdict"]],
        "headline": HEADLINES[report["verdict"]],
        "tones": TONES,
        "symbols": SYMBOLS,
        "names": {name: _name(report[name]) for name in ("candidate", "baseline")},
        "criteria": [_criterion(item) for item in report["criteria"]],
        "seen": seen,
        "ecdf": ecdf_svg(seen["ecdf"]),
        "over_time": over_time_svg(seen["over_time"]),
        "differences": differences_svg(seen["quantiles"], margins),
        "final": report["looks"]["fractions"][-1] >= 1.0,
    }


def _name(identity: Json) -> str:
    if "model" not in identity:
        return "unnamed"
    unit = " ".join(str(identity[part]) for part in ("target", "precision", "backend") if part in identity)
    return f"{identity['model']}@{identity.get('version', '?')}" + (f" {unit}" if unit else "")


def _criterion(item: Json) -> dict[str, Any]:
    texts = {
        f"{name}_text": describe_value(item[name], item["kind"])
        for name in ("estimate", "low", "high", "margin", "detectable", "provable")
    }
    return {**item, **texts, "picture": interval_svg(item)}
