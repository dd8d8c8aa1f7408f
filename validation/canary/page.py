"""The canary page's pictures, from the numbers of a report: what to show, as plots; `validation.plots` draws them.

Nothing that anybody wrote gets into a picture but the names of criteria, which are short and printable there.

The page of a canary for people: one self-contained HTML file, the verdict first, drawn from the report alone.

What observations and specs hold anybody may have written: the template escapes it, and pictures hold numbers only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.core.codec import encode
from enginery.recording.traffic import EQUAL_DB
from validation.canary.judging.criteria import Criterion
from validation.canary.judging.formatting import describe_interval, describe_power, describe_value
from validation.canary.judging.thresholds import probability
from validation.canary.observations import EngineIdentity
from validation.canary.report import CanaryReport
from validation.canary.views import LatencyCourses, LatencyCurves, QuantileSlowdown
from validation.plots.charts import (
    Axis,
    Colour,
    Curve,
    Dot,
    Interval,
    Key,
    Line,
    Mark,
    Plot,
    ecdf,
    intervals,
    span_axis,
)
from validation.plots.svg import svg
from validation.plots.texts import number_text, percent_text, seconds_text
from validation.reporting.html import templates

COLOURS: Mapping[str, Colour] = {"baseline": "unproven-fill", "candidate": "accent"}
VERDICT_COLOURS: Mapping[str, Colour] = {"PASS": "proven-fill", "FAIL": "failed-fill", "INSUFFICIENT": "unproven-fill"}
# Multiples of the margin on either side that the axis of the criteria holds.
MOST_MARGINS = 3.0


def criteria_svg(items: Sequence[tuple[Criterion, str]]) -> str:
    """The interval of each criterion in multiples of its margin, so that one dashed line is the limit of all.

    items: criteria of a report, each with its interval in words.
    """
    rows = [_interval(item, words) for item, words in items]
    ends = [end for row in rows for end in (row.low, row.high) if end is not None]
    low, high = span_axis([-0.4, 1.4, *ends])
    axis = Axis(max(low, -MOST_MARGINS), min(high, MOST_MARGINS), "worse by, in multiples of the margin")
    words = "; ".join(f"{row.name}: {row.value}" for row in rows)
    return svg(intervals(rows, axis, f"Each criterion's interval against its margin. {words}", 1.0, "margin"))


def _interval(item: Criterion, words: str) -> Interval:
    """An unbounded or missing end is drawn to the end of the axis."""
    scale = item.margin or 1.0
    if item.note:
        return Interval(item.name, words, None, None)
    point = None if item.estimate is None else item.estimate / scale
    low = -math.inf if item.low is None else item.low / scale
    high = math.inf if item.high is None else item.high / scale
    return Interval(item.name, words, low, high, point, tone=VERDICT_COLOURS[item.verdict])


def ecdf_svg(curves: LatencyCurves) -> str:
    """Both distribution functions over a logarithmic axis of latency."""
    sides = {"baseline": curves.baseline, "candidate": curves.candidate}
    values = [x for curve in sides.values() for x, _ in curve if x > 0]
    if not values:
        return ""
    low, high = span_axis(values, log=True, pad=0.0, least=0.1)
    drawn = [
        Curve(name, [x for x, _ in curve], [share for _, share in curve], colour=COLOURS[name])
        for name, curve in sides.items()
    ]
    words = "Share of requests answered within a latency, on both sides"
    return svg(ecdf(drawn, Axis(low, high, "latency, logarithmic", log=True, text=seconds_text), words))


def over_time_svg(courses: LatencyCourses) -> str:
    """Median (whole lines) and 90th percentile (thin ones) in windows of time."""
    sides = {"baseline": courses.baseline, "candidate": courses.candidate}
    rows = [*courses.baseline, *courses.candidate]
    if not rows:
        return ""
    most = max(row[0] for row in rows) or 1.0
    low, high = span_axis([value for row in rows for value in row[1:]], log=True, least=0.1)
    lines = [
        Line([row[0] for row in course], [row[column] for row in course], COLOURS[name], width,
             opacity=opacity, kind=name, title=f"{name}, {what}")
        for name, course in sides.items()
        for column, width, opacity, what in ((2, 1.2, 0.6, "90th percentile"), (1, 2.0, 1.0, "median"))
    ]  # fmt: skip
    return svg(
        Plot(
            "over-time",
            "Latency over the time of the canary, on both sides: median, and 90th percentile as thin lines",
            Axis(0.0, most, "time since the first request", text=lambda value: _span_text(value, most)),
            Axis(low, high, log=True, text=seconds_text),
            tuple(lines),
            tuple(Key(name, colour) for name, colour in COLOURS.items()),
        )
    )


def differences_svg(rows: Sequence[QuantileSlowdown], margins: Mapping[float, float]) -> str:
    """The slowdown at each quantile with its interval; margins: probability -> margin, where one is tested."""
    if not rows:
        return ""
    ends = [value for row in rows for value in (row.low, row.high)] + [0.0, *margins.values()]
    low, high = span_axis([min(max(end, -0.9), 3.0) for end in ends], pad=0.08)
    marks: list[Mark] = [Line([-math.inf, math.inf], [0, 0], "muted", 1.0, kind="zero")]
    for index, row in enumerate(rows):
        marks += _slowdown(index, row, margins.get(row.p))
    names = tuple((float(index), f"p{100 * row.p:.4g}") for index, row in enumerate(rows))
    return svg(
        Plot(
            "differences",
            "Slowdown of the candidate at each quantile, with its interval",
            Axis(-0.5, len(rows) - 0.5, "quantile of latency", ticks=names),
            Axis(low, high, text=percent_text),
            tuple(marks),
            (Key("margin", "failed", dash=True),) if margins else (),
        )
    )


def _slowdown(index: int, row: QuantileSlowdown, margin: float | None) -> list[Mark]:
    words = f"{percent_text(row.slowdown)} ({percent_text(row.low)} to {percent_text(row.high)})"
    name = f"p{number_text(100 * row.p)}: {words}"
    marks: list[Mark] = []
    if margin is not None:
        marks.append(Line([index - 0.36, index + 0.36], [margin, margin], "failed", 2.0, dash=True, kind="margin"))
    marks.append(Line([index, index], [row.low, row.high], "ink", 2.5, kind="span", title=name))
    marks.append(Dot(index, row.slowdown, "card", 5.5))
    return [*marks, Dot(index, row.slowdown, "accent", 4.0, kind="point", title=name)]


def _span_text(seconds: float, most: float) -> str:
    """A time on an axis that ends at `most`: one unit for all of it."""
    unit, size = ("h", 3600.0) if most >= 7200 else ("min", 60.0) if most >= 300 else ("s", 1.0)
    return f"{seconds / size:.3g} {unit}"


TONES = {"PASS": "proven", "FAIL": "failed", "INSUFFICIENT": "unproven"}
SYMBOLS = {"PASS": "✓", "FAIL": "✕", "INSUFFICIENT": "?"}
HEADLINES = {
    "PASS": "PASS: the candidate is not worse than the baseline",
    "FAIL": "FAIL: the candidate is worse than the baseline",
    "INSUFFICIENT": "INSUFFICIENT: this much data decides neither way",
}


@dataclass(frozen=True)
class CriterionRow:
    """A row of the table: a criterion with its numbers in words."""

    of: Criterion
    estimate: str
    interval: str
    margin: str
    power: str


def render(report: CanaryReport) -> str:
    """The page for a report (`validation.canary.report.make_report`)."""
    seen = report.shown
    margins = {probability(name): margin for name, margin in report.thresholds.latency.items()}
    rows = [_row(item) for item in report.criteria]
    return (
        templates()
        .get_template("canary/canary.html.j2")
        .render(
            report=report,
            identities={side: encode(identity) for side, identity in _sides(report)},
            traffic=encode(report.traffic),
            tone=TONES[report.verdict],
            headline=HEADLINES[report.verdict],
            tones=TONES,
            symbols=SYMBOLS,
            names={side: _name(identity) for side, identity in _sides(report)},
            criteria=rows,
            criteria_picture=criteria_svg([(row.of, row.interval) for row in rows]),
            seen=seen,
            apart=[row for row in seen.worst if row.sqnr_db < EQUAL_DB],
            again=_describe_replay(report),
            ecdf=ecdf_svg(seen.ecdf),
            over_time=over_time_svg(seen.over_time),
            differences=differences_svg(seen.quantiles, margins),
        )
    )


def _sides(report: CanaryReport) -> tuple[tuple[str, EngineIdentity], tuple[str, EngineIdentity]]:
    return ("candidate", report.candidate), ("baseline", report.baseline)


def _describe_replay(report: CanaryReport) -> str:
    """The command that replays the same traffic; empty for what production observed, and for engines without a name.

    The report knows its traffic by digest, not by where the file lay.
    """
    ours, replayed = report.candidate, report.traffic
    if replayed.digest is None or not (ours.model and report.baseline.model):
        return ""
    values = {
        **{side: identity.reference for side, identity in _sides(report)},
        "target": ours.target,
        "precision": ours.precision,
        "scale": replayed.scale,
        "duration": replayed.duration,
        "seed": replayed.seed,
        "in-flight": replayed.in_flight,
    }
    words = [f"--{name} {value}" for name, value in values.items() if value is not None]
    return " ".join(["enginery canary run", *words, "--traffic TRAFFIC --out again"])


def _name(identity: EngineIdentity) -> str:
    return " ".join(filter(None, (identity.reference, identity.unit))) if identity.model else "unnamed"


def _row(item: Criterion) -> CriterionRow:
    texts = (
        describe_value(item.estimate, item.kind),
        "not measured" if item.note else describe_interval(item),
        describe_value(item.margin, item.kind),
    )
    estimate, interval, margin = (text.replace("-", "−") for text in texts)  # noqa: RUF001 - a real minus sign
    return CriterionRow(item, estimate, interval, margin, describe_power(item))
