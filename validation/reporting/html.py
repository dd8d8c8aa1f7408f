"""Reports as HTML pages."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from enginesmith.core.reports.proof import ON_RANDOM, OVERLAP, UNMEASURED, Check, find_unmeasured, name_task_checks
from enginesmith.core.text import format_bytes, pluralize, visible
from enginesmith.core.types import PRECISIONS, BuildFailure
from enginesmith.registry.evidence.canaries import CanaryVerdict
from enginesmith.registry.manifest import STATUSES, USABLE, EngineEntry
from validation.attribution.result import view_attribution
from validation.latency.formatting import view_latencies
from validation.limits.budget import at_most, within
from validation.plotting import digits_text, nonfinite_text, percent_text, seconds_text
from validation.reporting.quantization import quantizations
from validation.reporting.stages import (
    STAGES,
    DriftRow,
    Row,
    WorstRow,
    bar_percent,
    courses,
    distributions,
    format_bound,
    group_checks,
    side_by_side,
    worst_cases,
)
from validation.reporting.version_document import VersionDocument

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class EngineRow:
    """An engine and the checks of its report.

    tightest: the check closest to its limit, None without one.
    ran: whether the engine itself ran, and not only its graph.  entry: the engine's entry in the manifest.
    """

    entry: EngineEntry
    checks: tuple[Check, ...]
    failed_checks: int
    tightest: Check | None
    ran: bool

    @property
    def anchor(self) -> str:
        """The HTML id of the engine's row: 'engine-sm_89-fp16-tensorrt'."""
        return "engine-" + re.sub(r"[^\w.-]", "-", self.entry.unit)

    @property
    def counted(self) -> str:
        """The number of failed checks, else of passed ones: '1 of 40 failed', '39 passed, 1 not measured', 'none'."""
        if not self.checks or self.failed_checks:
            return f"{self.failed_checks} of {len(self.checks)} failed" if self.checks else "none"
        count = len(find_unmeasured(self.checks))
        return f"{len(self.checks) - count} passed" + (f", {count} {UNMEASURED}" if count else "")


@dataclass(frozen=True)
class VersionPage:
    """The variables of the template. counts: engines by status.  blind: number of unproven engines whose outputs the
    golden data does not measure completely.

    precisions: of all engines.  matrix: engines by target and precision.  beside: the three stages of each output side
    by side.  again: failed units, each with the command to repeat it.  refusals: refused units by reason.
    provenance: groups of facts by title.
    """

    manifest: VersionDocument
    reference: str
    engines: tuple[EngineRow, ...]
    counts: Mapping[str, int]
    blind: int
    verdict: Mapping[str, str]
    precisions: Sequence[str]
    matrix: Mapping[str, Mapping[str, Sequence[EngineRow]]]
    tasks: Sequence[Row]
    stages: Mapping[str, Sequence[Row]]
    stage_titles: Mapping[str, str]
    beside: Sequence[DriftRow]
    distributions: Sequence[Row]
    worst: Sequence[WorstRow]
    courses: Sequence[Row]
    quantizations: Sequence[Row]
    attributions: Sequence[Row]
    latencies: Sequence[Row]
    canaries: Sequence[CanaryVerdict]
    again: Sequence[tuple[str, str]]
    refusals: Mapping[str, Sequence[str]]
    failures: Sequence[BuildFailure]
    provenance: Mapping[str, Mapping[str, object]]


def overview(version: VersionDocument, pictures: bool = True) -> VersionPage:
    """The content of the page. pictures: whether to include the sections that are pictures."""
    checks = {report.unit: report.checks for report in reversed(version.reports)}
    engines = tuple(_engine(entry, checks.get(entry.unit, ())) for entry in version.engines)
    matrix: dict[str, dict[str, list[EngineRow]]] = {}
    for row in engines:
        matrix.setdefault(row.entry.target, {}).setdefault(row.entry.precision, []).append(row)
    counts: dict[str, int] = {status: sum(engine.entry.status == status for engine in engines) for status in STATUSES}
    blind_count = sum(engine.entry.status == "unproven" and bool(find_unmeasured(engine.checks)) for engine in engines)
    reports, digest = version.reports, version.sources.get("onnx")
    # Quantized engines whose graph is the exported model itself, because its author quantized it.
    entries = [entry for entry in version.engines if entry.precision in ("int8", "fp8") and entry.status != "refused"]
    plain_precisions = [entry.precision for entry in entries if digest and entry.graph == digest]
    return VersionPage(
        manifest=version,
        reference=version.reference,
        engines=engines,
        counts=counts,
        blind=blind_count,
        verdict=dict(zip(("status", "text"), _headline(counts, blind_count), strict=True)),
        precisions=[name for name in PRECISIONS if any(name in row for row in matrix.values())],
        matrix=matrix,
        tasks=list(_tasks(version, engines)),
        stages={stage: list(group_checks(stage, reports)) for stage in STAGES},
        stage_titles=STAGES,
        beside=side_by_side(reports),
        distributions=distributions(reports) if pictures else [],
        worst=worst_cases(reports),
        courses=courses(reports),
        quantizations=quantizations(version.quantization, dict.fromkeys(plain_precisions)) if pictures else [],
        attributions=[view_attribution(attribution) for attribution in version.attributions],
        latencies=view_latencies(version.latencies, pictures),
        canaries=version.canaries or (),
        again=list(_list_commands(version.reference, engines)),
        refusals=_refusals(engines),
        failures=version.failures,
        provenance=_provenance(version),
    )


def _headline(counts: Mapping[str, int], blind: int) -> tuple[str, str]:
    """The status of the whole version, named as an engine's status, and a sentence about it."""
    proven_count, unproven_count, failure_count = (counts[status] for status in ("proven", "unproven", "failed"))
    engines_text = pluralize(proven_count + counts[ON_RANDOM] + unproven_count, "engine")
    if failure_count:
        usable_text = ", ".join(f"{counts[status]} {status}" for status in USABLE if counts[status])
        return "failed", f"{pluralize(failure_count, 'engine')} failed; {usable_text or 'there is none to pull'}"
    if unproven_count:
        clauses = [f"{blind} not measured in full"] if blind else []
        if unproven_count > blind:
            clauses.append(f"{unproven_count - blind} not yet run on their hardware")
        return "unproven", f"{proven_count} of {engines_text} proven, {', '.join(clauses)}"
    if counts[ON_RANDOM]:
        return ON_RANDOM, f"{proven_count} of {engines_text} proven, {counts[ON_RANDOM]} on random inputs"
    if proven_count:
        return "proven", f"{'All ' if proven_count > 1 else ''}{engines_text} proven"
    return "failed", "There is no engine to pull"


def _engine(entry: EngineEntry, checks: tuple[Check, ...]) -> EngineRow:
    limited_checks = [check for check in checks if not check.passed or (check.stage != "task" and _has_room(check))]
    failure_count, has_run = sum(not check.passed for check in checks), any(check.stage == "engine" for check in checks)
    return EngineRow(entry, checks, failure_count, min(limited_checks, key=headroom_db, default=None), has_run)


def _list_commands(reference: str, engines: Sequence[EngineRow]) -> Iterator[tuple[str, str]]:
    """Failed units, each with commands: to validate and attribute a published engine again, or else to build it."""
    for row in engines:
        entry = row.entry
        if entry.status == "failed" and entry.digest:
            validate_command = f"enginesmith validate {reference} --target {entry.target}"
            command = f"enginesmith debug attribute {reference} --target {entry.target} --precision {entry.precision}"
            yield entry.unit, f"{validate_command}\n{command}"
        elif entry.status == "failed" and row.failed_checks:
            option_text = f"--target {entry.target} --precision {entry.precision} --backend {entry.backend}"
            yield entry.unit, f"enginesmith build SPEC.yaml {option_text}"


def _refusals(engines: Sequence[EngineRow]) -> dict[str, list[str]]:
    """The refused units by reason, in order."""
    refusals: dict[str, list[str]] = {}
    for row in engines:
        if row.entry.status == "refused":
            refusals.setdefault(row.entry.reason, []).append(row.entry.unit)
    return refusals


def _has_room(check: Check) -> bool:
    """Whether the distance of a check's value from its limit is meaningful.

    It is not for counts that must be 0, for the overlap of samples, and for the contract, whose scales differ.
    """
    is_count = check.limit == check.value == 0 or check.name == OVERLAP
    return check.limit is not None and not is_count and not check.name.startswith("contract ")


def headroom_db(check: Check) -> float:
    """The distance of a check's value from its limit in decibels; -inf if it failed, inf if `_has_room` is False."""
    if not check.passed:
        return -math.inf
    if check.value is None or check.limit is None or not _has_room(check):
        return math.inf
    if check.name.endswith("sqnr_db"):
        return check.value - check.limit
    limit, value = check.limit, check.value
    if not check.name.startswith("max_"):  # a share with a lower limit
        limit, value = 1 - limit, 1 - value
    if value <= 0:
        return math.inf
    return 20 * math.log10(limit / value) if limit > 0 else -math.inf


def _tasks(version: VersionDocument, engines: Sequence[EngineRow]) -> Iterator[Row]:
    """A row for each task metric of each graph and of each engine that ran, in the order of their checks.

    limit: the lowest value that passes (`side` floor) or the highest (ceiling); None where the spec has none.
    """
    graphs = [(name, "graph", value) for name, value in version.metrics.items()]
    checks = {row.entry.unit: name_task_checks(row.checks) for row in engines}
    rows = [(row.entry.unit, "engine", checks[row.entry.unit]) for row in engines if row.ran]
    checks_by_title = {title: check for title_checks in checks.values() for title, check in title_checks.items()}
    for title in dict.fromkeys([*(title for _, _, values in graphs for title in values), *checks_by_title]):
        values = [(name, kind, values[title]) for name, kind, values in graphs if title in values]
        engine = [(name, kind, title_checks[title].value) for name, kind, title_checks in rows if title in title_checks]
        values += [(name, kind, value) for name, kind, value in engine if value is not None]
        if values:
            check = checks_by_title.get(title)
            metric, limit = (check.name, check.limit) if check else (title, None)
            points = [
                {"name": name, "kind": kind, "value": value, "passed": limit is None or within(metric, value, limit)}
                for name, kind, value in values
            ]
            side = "ceiling" if at_most(metric) else "floor"
            yield {"title": title, "name": metric, "points": points, "limit": limit, "side": side}


def _provenance(version: VersionDocument) -> dict[str, dict[str, object]]:
    """Groups of facts by title, without facts that are None and groups that are empty."""
    groups: dict[str, Mapping[str, object]] = {
        "Identity": {"content": version.content, "version report": version.report},
        "What went in": version.provenance,
        "What was made of it": version.sources,
        "Toolchain": version.toolchain,
        "Host": version.host,
    }
    facts = {title: {name: fact for name, fact in group.items() if fact is not None} for title, group in groups.items()}
    return {title: group for title, group in facts.items() if group}


# The HTML page of a model version: one self-contained file, without scripts or network.
#
# A page contains texts from specs and compilers' logs, which anybody may have written. Therefore the templates escape
# all texts and control characters, and use no such text as an address, a class or an id.


def render(version: VersionDocument) -> str:
    """The HTML page of a version."""
    page = overview(version)
    return templates().get_template("reporting/report.html.j2").render(page=page, **vars(page))


@cache
def templates() -> "Environment":
    """The Jinja environment of all pages, of versions and of canaries, with the filters that they use."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("validation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_show,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bar": bar_percent,
        "bound": format_bound,
        "element": lambda value, digits=7: nonfinite_text(value) or digits_text(value, digits),
        "bytes": format_bytes,
        "metric": metric_text,
        "shape": lambda shape: " × ".join(map(str, shape)) or "scalar",  # noqa: RUF001 - a multiplication sign
        "when": time_text,
        "seconds": lambda value: "" if value is None else seconds_text(value),
        "percent": lambda value: "" if value is None else percent_text(value),
    }
    return environment


def _show(value: object) -> object:
    """The output of a template's expression: control characters in plain text become visible; markup is unchanged."""
    return visible(value) if type(value) is str else value


def metric_text(value: float | None, name: str) -> str:
    """The value of the metric `name`, with its unit; '' for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return nonfinite_text(value)
    if name.endswith("_db"):
        return f"{value:.1f} dB"
    if name == "nonfinite":
        return f"{value:.0f}"
    if name.startswith("max_"):
        return f"{value:.2g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if value not in (0, 1) else f"{value:.0f}"


def time_text(timestamp: str) -> str:
    """'2026-01-31 08:43 UTC' for an ISO 8601 time in UTC."""
    return f"{timestamp[:10]} {timestamp[11:16]} UTC"
