"""Artifacts in the Prefect UI: the report of a version or a canary, and tables of flows.

A version gives a markdown artifact (verdict, drift by stage, attribution), a table of its engines, one of drift, and a
link to its page; a canary a markdown artifact (verdict, criteria) and a link. The UI shows the newest of each key.
Prefect is imported where an artifact is posted, and nowhere else here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginesmith.core.text import format_metrics, pluralize, visible
from pipeline.values import Json

if TYPE_CHECKING:
    from validation.canary.observations import EngineIdentity
    from validation.canary.report import CanaryReport, SideObserved
    from validation.reporting.stages import StageCell
    from validation.reporting.version_document import VersionDocument

ENGINE_COLUMNS = ("target", "precision", "backend", "status", "size_bytes", "reason")


def api_problem(error: Exception, url: str | None) -> str | None:
    """What is wrong with the Prefect API at `url` and the remedy, after this error of its client; None: not known."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        remedy = "set PREFECT_API_AUTH_STRING (USER:PASSWORD), or PREFECT_API_KEY for Prefect Cloud"
        return f"Prefect: {url} refuses the credentials ({status}); {remedy}"
    # A page of its UI, or of something else, is no JSON.
    if status in (404, 405) or isinstance(error, ValueError):
        return f"Prefect: {url} is no Prefect API; its URL ends in /api: correct PREFECT_API_URL"
    return None


@dataclass(frozen=True)
class Artifact:
    """One artifact: markdown, a table or a link.  key: its name on the server."""

    key: str
    description: str = ""
    markdown: str = ""
    table: Sequence[Mapping[str, object]] = field(default=())
    link: str = ""


def show_document(document: "VersionDocument | CanaryReport", page: str | None) -> None:
    """Post the report of a version or a canary. page: address of its HTML, None for none."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

    for artifact in artifacts_of(document, page):
        if artifact.link:
            create_link_artifact(artifact.link, link_text=artifact.description, key=artifact.key)
        elif artifact.markdown:
            create_markdown_artifact(artifact.markdown, key=artifact.key, description=artifact.description)
        else:
            create_table_artifact(
                [dict(row) for row in artifact.table], key=artifact.key, description=artifact.description
            )


def artifacts_of(document: "VersionDocument | CanaryReport", page: str | None) -> Iterator[Artifact]:
    """The artifacts of a report, as `show_document` posts them."""
    from validation.reporting.version_document import VersionDocument

    if isinstance(document, VersionDocument):
        name, key, reference = _clean(document.model), "page", document.reference
        engines = [{column: getattr(engine, column) for column in ENGINE_COLUMNS} for engine in document.engines]
        yield Artifact(f"result-{name}", f"Report of {reference}", version_markdown(document, page))
        yield Artifact(f"engines-{name}", f"Engines of {reference}", table=engines)
        if drift := drift_rows(document):
            yield Artifact(f"drift-{name}", f"Drift by stage of {reference}", table=drift)
    else:
        name = _clean("-".join(filter(None, (document.candidate.model or "unnamed", document.target))))
        title, key = f"Canary{_on(document)}: {document.verdict}", "page-canary"
        yield Artifact(f"canary-{name}", title, canary_markdown(document, page))
    if page:
        yield Artifact(f"{key}-{name}", "the page", link=page)


def drift_rows(document: "VersionDocument") -> list[Json]:
    """A row per output and units, with the three stages side by side, as on the page."""
    from validation.reporting.stages import side_by_side

    return [
        {
            "what": row.title + (f" ({row.more})" if row.more else ""),
            "output": row.output,
            **{stage: _cell_text(cell) for stage, cell in row.cells.items()},
            "drift": row.cause,
        }
        for row in side_by_side(document.reports)
    ]


def _cell_text(cell: "StageCell | None") -> str:
    from validation.reporting.html import metric_text

    if not cell or not cell.worst:
        return ""
    check = cell.worst
    text = metric_text(check.value, check.name) or check.note
    limit = f" (limit {metric_text(check.limit, check.name)})" if check.limit is not None else ""
    return f"{'' if check.passed else 'FAILED '}{'' if check.name == 'sqnr_db' else check.name + ' '}{text}{limit}"


def version_markdown(document: "VersionDocument", page: str | None) -> str:
    """The report of a version as markdown: verdict, task metrics, failures, drift by stage, attribution, latency."""
    from validation.attribution.result import summarize
    from validation.latency.formatting import format_bucket
    from validation.reporting.html import overview

    page_view = overview(document, pictures=False)
    lines = [f"# {plain_text(page_view.reference)}: {page_view.verdict['text']}", ""]
    for name, values in document.metrics.items():
        lines.append(f"- {plain_text(name)}: {plain_text(format_metrics(values))}")
    failed_engines = [engine for engine in document.engines if engine.status == "failed"]
    lines += [f"- **failed**: {plain_text(engine.unit)}: {plain_text(engine.reason)}" for engine in failed_engines]
    waived_engines = [row.entry for row in page_view.engines if any(check.waived is not None for check in row.checks)]
    lines += [f"- {plain_text(engine.unit)}: {plain_text(engine.reason)}" for engine in waived_engines]
    lines += [f"- page: `{page}`"] if page else []
    if rows := drift_rows(document):
        lines += ["", "## Drift by stage", "", *_table(rows)]
    if document.attributions:
        lines += ["", "## Which node drifted", ""]
        for attribution in document.attributions:
            lines.append(f"- {plain_text(attribution.name)}: {plain_text(summarize(attribution))}")
            lines += _code((attribution.proposal.snippet if attribution.proposal else None) or "")
    reports = sorted((report for reports in document.latencies.values() for report in reports), key=lambda r: r.unit)
    if rows := [
        {"engine": report.unit, **format_bucket(bucket), "machine": str(report.machine)}
        for report in reports
        for bucket in report.buckets
    ]:
        lines += ["", "## Latency", "", *_table(rows)]
    return "\n".join(lines)


def _code(snippet: str) -> list[str]:
    """A snippet for the spec as a block of code, in which nothing is markup; no lines for none. Its names are in double
    quotes, where YAML reads the escape as '<'."""
    if not snippet:
        return []
    fence = "`" * (3 + max(map(len, re.findall("`+", snippet)), default=0))
    intro = "it passes with this in the spec, in place of quantization.overrides:"
    return [
        "",
        intro,
        "",
        f"{fence}yaml",
        *(visible(line).replace("<", "\\u003c") for line in snippet.splitlines()),
        fence,
        "",
    ]


def canary_markdown(report: "CanaryReport", page: str | None) -> str:
    """The report of a canary as markdown: verdict, candidate and baseline, criteria."""
    from validation.canary.judging.criteria import describe_interval, describe_value

    rows = []
    for criterion in report.criteria:
        estimate, margin = (describe_value(value, criterion.kind) for value in (criterion.estimate, criterion.margin))
        interval = "not measured" if criterion.note else describe_interval(criterion)
        row = {"criterion": criterion.name, "verdict": criterion.verdict, "measured": estimate}
        rows.append({**row, "interval": interval, "margin": margin})
    lines = [f"# Canary{_on(report)}: {report.verdict}", "", plain_text(report.reason), ""]
    lines += [
        f"- candidate: {plain_text(_side(report.candidate, report.observations.candidate))}",
        f"- baseline: {plain_text(_side(report.baseline, report.observations.baseline))}",
    ]
    lines += [f"- page: `{page}`"] if page else []
    return "\n".join([*lines, "", *_table(rows)])


def _on(report: "CanaryReport") -> str:
    return f" on {report.target}" if report.target else ""


def _side(identity: "EngineIdentity", observation: "SideObserved") -> str:
    name = identity.reference or "unnamed"
    return f"{name}, {pluralize(observation.requests, 'request')}, {observation.failed} failed"


def _table(rows: Sequence[Json]) -> list[str]:
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(plain_text(str(row[name])) for name in columns)} |" for row in rows]


def plain_text(text: str) -> str:
    """Text on one line in which nothing is markup for markdown, HTML or a terminal."""
    line = visible(" ".join(text.split()))
    return re.sub(r"([\\`*_\[\]|<>#!])", r"\\\1", line).replace("\\<", "&lt;").replace("\\>", "&gt;")


def _clean(name: str) -> str:
    """A name as a part of Prefect's keys, which are lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def show_table(key: str, description: str, rows: Sequence[Json]) -> None:
    """Post a table. One without rows says so: otherwise an old table would be the newest of its key."""
    from prefect.artifacts import create_table_artifact

    table_rows = [dict(row) for row in rows] or [{"result": "nothing"}]
    create_table_artifact(table_rows, key=_clean(key), description=description)
