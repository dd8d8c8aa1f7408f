"""The HTML page of a canary and its pictures, from the report alone: one self-contained file, the verdict first.

Anybody may have written the texts in observations and specs: the template escapes them, and pictures contain only
numbers and the names of criteria.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from enginesmith.core.codec import encode
from enginesmith.recording.traffic import EQUAL_DB
from validation.canary.judging.criteria import Criterion, describe_interval, describe_power, describe_value
from validation.canary.report import CanaryReport, LatencyCourses, LatencyCurves
from validation.plotting import COLOURS, QUARTERS, WIDTH, annotate, draw_svg, seconds_text, set_axis, span, tag
from validation.reporting.html import templates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE_COLOURS: Mapping[str, str] = {"baseline": COLOURS["unproven-fill"], "candidate": COLOURS["accent"]}
# The axis of the criteria extends at most this many margins to either side.
MOST_MARGINS = 3.0
TONES = {"PASS": "proven", "FAIL": "failed", "INSUFFICIENT": "unproven"}
SYMBOLS = {"PASS": "✓", "FAIL": "✕", "INSUFFICIENT": "?"}
HEADLINES = {
    "PASS": "PASS: the candidate is not worse than the baseline",
    "FAIL": "FAIL: the candidate is worse than the baseline",
    "INSUFFICIENT": "INSUFFICIENT: this much data decides neither way",
}


def criteria_svg(items: Sequence[tuple[Criterion, str]]) -> str:
    """SVG of the interval of each criterion in multiples of its margin; one dashed line is the limit of all.

    items: criteria, each with its interval as text.
    """
    scales = [row.margin or 1.0 for row, _ in items]
    # An infinite or missing bound is drawn at the end of the axis.
    lows = [-math.inf if row.low is None else row.low / scale for (row, _), scale in zip(items, scales, strict=True)]
    highs = [math.inf if row.high is None else row.high / scale for (row, _), scale in zip(items, scales, strict=True)]
    row_indices = [index for index, (row, _) in enumerate(items) if not row.note]
    low, high = span([-0.4, 1.4, *(end for index in row_indices for end in (lows[index], highs[index]))])
    low, high = max(low, -MOST_MARGINS), min(high, MOST_MARGINS)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.axvspan(low, min(1.0, high), color=COLOURS["proven-soft"], gid=tag("fine"))
        axes.axvline(1.0, color=COLOURS["failed"], linewidth=1.5, linestyle="--", label="margin", gid=tag("limit"))
        axes.axvline(0.0, color=COLOURS["muted"], linewidth=1.0)
        for index, ((criterion, text), scale) in enumerate(zip(items, scales, strict=True)):
            y = float(len(items) - 1 - index)
            annotate(axes, criterion.name, (low, y), (2, 9), color=COLOURS["ink"], weight="bold")
            annotate(axes, text, (high, y), (-2, 9), ha="right")
            if index not in row_indices:
                continue
            gid = tag("span", f"{criterion.name}: {text}")
            axes.plot(
                [max(lows[index], low), min(highs[index], high)], [y, y], color=COLOURS["ink"], linewidth=2.5, gid=gid
            )
            if criterion.estimate is not None:
                colour = COLOURS[f"{TONES[criterion.verdict]}-fill"]
                axes.plot(criterion.estimate / scale, y, "o", color=colour, markersize=9, gid=tag("point"))
        set_axis(axes, "x", (low, high), "worse by, in multiples of the margin")
        set_axis(axes, "y", (-0.4, max(len(items), 1) - 0.4), ticks=())

    criteria_text = "; ".join(f"{criterion.name}: {text}" for criterion, text in items)
    alt_text = f"Each criterion's interval against its margin. {criteria_text}"
    return draw_svg("intervals", alt_text, draw, (WIDTH, 56 + 40 * max(len(items), 1)))


def ecdf_svg(curves: LatencyCurves) -> str:
    """SVG of both distribution functions of latency, on a logarithmic axis; '' without latencies."""
    sides = {"baseline": curves.baseline, "candidate": curves.candidate}
    values = [x for curve in sides.values() for x, _ in curve if x > 0]
    if not values:
        return ""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for name, curve in sides.items():
            xs, shares = [x for x, _ in curve], [share for _, share in curve]
            axes.step(xs, shares, where="post", color=SIDE_COLOURS[name], label=name, gid=tag("curve", name))
        x_range = span(values, log=True, pad=0.0, least=0.1)
        set_axis(axes, "x", x_range, "latency, logarithmic", log=True, text=seconds_text)
        set_axis(axes, "y", (0.0, 1.0), ticks=QUARTERS)

    return draw_svg("ecdf", "Share of requests answered within a latency, on both sides", draw)


def over_time_svg(courses: LatencyCourses) -> str:
    """SVG of the median (thick lines) and 90th percentile (thin lines) of latency over time; '' without windows."""
    sides = {"baseline": courses.baseline, "candidate": courses.candidate}
    rows = [*courses.baseline, *courses.candidate]
    if not rows:
        return ""
    duration = max(row[0] for row in rows) or 1.0
    unit, size = ("h", 3600.0) if duration >= 7200 else ("min", 60.0) if duration >= 300 else ("s", 1.0)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for name, course in sides.items():
            xs, colour = [row[0] / size for row in course], SIDE_COLOURS[name]
            p90s, medians = [row[2] for row in course], [row[1] for row in course]
            axes.plot(xs, p90s, color=colour, linewidth=1.2, alpha=0.6, gid=tag(name, f"{name}, 90th percentile"))
            axes.plot(xs, medians, color=colour, label=name, gid=tag(name, f"{name}, median"))
        label = "time since the first request"
        set_axis(axes, "x", (0.0, duration / size), label, text=lambda value: f"{value:.3g} {unit}")
        y_range = span([value for row in rows for value in row[1:]], log=True, least=0.1)
        set_axis(axes, "y", y_range, log=True, text=seconds_text)

    alt_text = "Latency over the time of the canary, on both sides: median, and 90th percentile as thin lines"
    return draw_svg("over-time", alt_text, draw)


def render(report: CanaryReport) -> str:
    """The HTML page of a report of `validation.canary.report.make_report`."""
    rows = [(criterion, *_numbers(criterion), describe_power(criterion)) for criterion in report.criteria]
    sides = {"candidate": report.candidate, "baseline": report.baseline}
    names = {
        side: f"{engine.reference} {engine.unit}".strip() if engine.model else "unnamed"
        for side, engine in sides.items()
    }
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
        criteria_picture=criteria_svg([(criterion, interval) for criterion, _, interval, _, _ in rows]),
        seen=report.view,
        apart=[row for row in report.view.worst if row.sqnr_db < EQUAL_DB],
        again=_describe_replay(report),
        ecdf=ecdf_svg(report.view.ecdf),
        over_time=over_time_svg(report.view.over_time),
    )


def _describe_replay(report: CanaryReport) -> str:
    """The command that replays the same traffic; '' for observations of production, and for engines without a name.

    TRAFFIC stands for the file's path, as a report has only the file's digest.
    """
    candidate_identity, replay_terms = report.candidate, report.traffic
    if replay_terms.digest is None or not (candidate_identity.model and report.baseline.model):
        return ""
    values = {
        "candidate": candidate_identity.reference,
        "baseline": report.baseline.reference,
        "target": candidate_identity.target,
        "precision": candidate_identity.precision,
        "scale": replay_terms.scale,
        "duration": replay_terms.duration,
        "seed": replay_terms.seed,
        "in-flight": replay_terms.in_flight,
    }
    options = [f"--{name} {value}" for name, value in values.items() if value is not None]
    return " ".join(["enginesmith canary run", *options, "--traffic TRAFFIC --out again"])


def _numbers(criterion: Criterion) -> tuple[str, str, str]:
    """Estimate, interval and margin of a criterion as text, with real minus signs."""
    texts = (
        describe_value(criterion.estimate, criterion.kind),
        "not measured" if criterion.note else describe_interval(criterion),
        describe_value(criterion.margin, criterion.kind),
    )
    estimate, interval, margin = (text.replace("-", "−") for text in texts)  # noqa: RUF001 - a real minus sign
    return estimate, interval, margin
