"""The page of a canary for people: one self-contained HTML file, the verdict first, drawn from the report alone.

What observations and specs hold anybody may have written: the template escapes it, and pictures hold numbers only.
"""

from dataclasses import dataclass

from enginery.core.codec import encode
from enginery.recording.outputs import EQUAL_DB
from validation.canary.judging.criteria import Criterion
from validation.canary.judging.formatting import describe_interval, describe_power, describe_value
from validation.canary.judging.thresholds import probability
from validation.canary.observations import EngineIdentity
from validation.canary.pictures import criteria_svg, differences_svg, ecdf_svg, over_time_svg
from validation.canary.report import CanaryReport
from validation.reporting.html import templates

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
