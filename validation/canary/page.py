"""The HTML page of a canary and its pictures, from the report alone: one self-contained file, the verdict first.

Observations and specs hold texts that anybody may have written: the template escapes them, and pictures hold only
numbers and the names of criteria.
"""

import math
from collections.abc import Mapping, Sequence

from enginesmith.core.codec import encode
from enginesmith.recording.traffic import EQUAL_DB
from validation.canary.judging.criteria import Criterion
from validation.canary.judging.formatting import describe_interval, describe_power, describe_value
from validation.canary.judging.thresholds import probability
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
# Where the axis of the criteria ends at most, in multiples of the margin, to either side.
MOST_MARGINS = 3.0
TONES = {"PASS": "proven", "FAIL": "failed", "INSUFFICIENT": "unproven"}
SYMBOLS = {"PASS": "✓", "FAIL": "✕", "INSUFFICIENT": "?"}
HEADLINES = {
    "PASS": "PASS: the candidate is not worse than the baseline",
    "FAIL": "FAIL: the candidate is worse than the baseline",
    "INSUFFICIENT": "INSUFFICIENT: this much data decides neither way",
}


def criteria_svg(items: Sequence[tuple[Criterion, str]]) -> str:
    """SVG of the interval of each criterion in multiples of its margin, so that one dashed line is the limit of all.

    items: criteria, each with its interval as text.
    """
    rows = []
    for item, words in items:
        scale = item.margin or 1.0
        point = None if item.estimate is None else item.estimate / scale
        # An infinite or missing bound reaches to the end of the axis.
        low = -math.inf if item.low is None else item.low / scale
        high = math.inf if item.high is None else item.high / scale
        drawn = Interval(item.name, words, low, high, point, tone=VERDICT_COLOURS[item.verdict])
        rows.append(Interval(item.name, words, None, None) if item.note else drawn)
    ends = [end for row in rows for end in (row.low, row.high) if end is not None]
    low, high = span_axis([-0.4, 1.4, *ends])
    axis = Axis(max(low, -MOST_MARGINS), min(high, MOST_MARGINS), "worse by, in multiples of the margin")
    all_words = "; ".join(f"{row.name}: {row.value}" for row in rows)
    return svg(intervals(rows, axis, f"Each criterion's interval against its margin. {all_words}", 1.0, "margin"))


def ecdf_svg(curves: LatencyCurves) -> str:
    """SVG of both distribution functions of latency, on a logarithmic axis; '' without latencies."""
    sides = {"baseline": curves.baseline, "candidate": curves.candidate}
    values = [x for curve in sides.values() for x, _ in curve if x > 0]
    if not values:
        return ""
    low, high = span_axis(values, log=True, pad=0.0, least=0.1)
    drawn = [
        Curve(name, [x for x, _ in curve], [share for _, share in curve], colour=COLOURS[name])
        for name, curve in sides.items()
    ]
    axis = Axis(low, high, "latency, logarithmic", log=True, text=seconds_text)
    return svg(ecdf(drawn, axis, "Share of requests answered within a latency, on both sides"))


def over_time_svg(courses: LatencyCourses) -> str:
    """SVG of the median (thick lines) and 90th percentile (thin lines) of latency over time; '' without windows."""
    sides = {"baseline": courses.baseline, "candidate": courses.candidate}
    rows = [*courses.baseline, *courses.candidate]
    if not rows:
        return ""
    most = max(row[0] for row in rows) or 1.0
    unit, size = ("h", 3600.0) if most >= 7200 else ("min", 60.0) if most >= 300 else ("s", 1.0)
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
            Axis(0.0, most, "time since the first request", text=lambda value: f"{value / size:.3g} {unit}"),
            Axis(low, high, log=True, text=seconds_text),
            tuple(lines),
            tuple(Key(name, colour) for name, colour in COLOURS.items()),
        )
    )


def differences_svg(rows: Sequence[QuantileSlowdown], margins: Mapping[float, float]) -> str:
    """SVG of the slowdown at each quantile with its interval; '' without rows.

    margins: by the probability of the quantile, where one is tested.
    """
    if not rows:
        return ""
    ends = [value for row in rows for value in (row.low, row.high)] + [0.0, *margins.values()]
    low, high = span_axis([min(max(end, -0.9), 3.0) for end in ends], pad=0.08)
    marks: list[Mark] = [Line([-math.inf, math.inf], [0, 0], "muted", 1.0, kind="zero")]
    for index, row in enumerate(rows):
        words = f"{percent_text(row.slowdown)} ({percent_text(row.low)} to {percent_text(row.high)})"
        name, margin = f"p{number_text(100 * row.p)}: {words}", margins.get(row.p)
        if margin is not None:
            ends = [index - 0.36, index + 0.36]
            marks.append(Line(ends, [margin, margin], "failed", 2.0, dash=True, kind="margin"))
        marks.append(Line([index, index], [row.low, row.high], "ink", 2.5, kind="span", title=name))
        marks.append(Dot(index, row.slowdown, "card", 5.5))
        marks.append(Dot(index, row.slowdown, "accent", 4.0, kind="point", title=name))
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


def render(report: CanaryReport) -> str:
    """The HTML page of a report, as `validation.canary.report.make_report` makes it."""
    seen = report.shown
    margins = {probability(name): margin for name, margin in report.thresholds.latency.items()}
    rows = [(item, *_numbers(item), describe_power(item)) for item in report.criteria]
    sides = {"candidate": report.candidate, "baseline": report.baseline}
    names = {side: f"{one.reference} {one.unit}".strip() if one.model else "unnamed" for side, one in sides.items()}
    template = templates().get_template("canary/canary.html.j2")
    return template.render(
        report=report,
        identities={side: encode(identity) for side, identity in sides.items()},
        traffic=encode(report.traffic),
        tone=TONES[report.verdict],
        headline=HEADLINES[report.verdict],
        tones=TONES,
        symbols=SYMBOLS,
        names=names,
        criteria=rows,
        criteria_picture=criteria_svg([(item, interval) for item, _, interval, _, _ in rows]),
        seen=seen,
        apart=[row for row in seen.worst if row.sqnr_db < EQUAL_DB],
        again=_describe_replay(report),
        ecdf=ecdf_svg(seen.ecdf),
        over_time=over_time_svg(seen.over_time),
        differences=differences_svg(seen.quantiles, margins),
    )


def _describe_replay(report: CanaryReport) -> str:
    """The command that replays the same traffic; '' for observations of production, and for engines without a name.

    TRAFFIC stands for the file, of which a report has the digest alone.
    """
    ours, replayed = report.candidate, report.traffic
    if replayed.digest is None or not (ours.model and report.baseline.model):
        return ""
    values = {
        "candidate": ours.reference,
        "baseline": report.baseline.reference,
        "target": ours.target,
        "precision": ours.precision,
        "scale": replayed.scale,
        "duration": replayed.duration,
        "seed": replayed.seed,
        "in-flight": replayed.in_flight,
    }
    words = [f"--{name} {value}" for name, value in values.items() if value is not None]
    return " ".join(["enginesmith canary run", *words, "--traffic TRAFFIC --out again"])


def _numbers(item: Criterion) -> tuple[str, str, str]:
    """Estimate, interval and margin of a criterion as text, with real minus signs."""
    interval = "not measured" if item.note else describe_interval(item)
    texts = (describe_value(item.estimate, item.kind), interval, describe_value(item.margin, item.kind))
    estimate, interval, margin = (text.replace("-", "−") for text in texts)  # noqa: RUF001 - a real minus sign
    return estimate, interval, margin
