"""The content of a page as Prefect artifacts: what is said is worked out without Prefect, and posted in one place.

A version gives a markdown artifact (verdict, drift by stage, attribution), a table of its engines, one of drift, and a
link to the page; a canary a markdown artifact (verdict, criteria) and its link. The last of each key is the newest.

A run's state as a Prefect progress artifact: the same as `enginery status`, where the flow run is.

Tables in the Prefect UI.
"""

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import create_table_artifact

from enginery.core.text import pluralize, visible
from enginery.registry.runs import OVER, RunItem, RunState
from pipeline.orchestration.runs.views import RunView, view_run
from pipeline.values import Json

if TYPE_CHECKING:
    from validation.canary.observations import EngineIdentity
    from validation.canary.report import CanaryReport, SideObserved
    from validation.latency.view import LatencyView
    from validation.reporting.stages import DriftRow, StageCell
    from validation.reporting.version_document import VersionDocument


ENGINE_COLUMNS = ("target", "precision", "backend", "status", "size_bytes", "reason")


@dataclass(frozen=True)
class Artifact:
    """One artifact. Of markdown, table and link one is given."""

    key: str
    description: str = ""
    markdown: str = ""
    table: Sequence[Mapping[str, object]] = field(default=())
    link: str = ""


def show_document(document: "VersionDocument | CanaryReport", page: str | None) -> list[str]:
    """Leave a version's or a canary's report on the Prefect server; the artifacts' keys. page: address of its HTML."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

    found = list(artifacts_of(document, page))
    for item in found:
        if item.link:
            create_link_artifact(item.link, link_text=item.description, key=item.key)
        elif item.markdown:
            create_markdown_artifact(item.markdown, key=item.key, description=item.description)
        else:
            create_table_artifact([dict(row) for row in item.table], key=item.key, description=item.description)
    return [item.key for item in found]


def artifacts_of(document: "VersionDocument | CanaryReport", page: str | None) -> Iterator[Artifact]:
    """What is posted."""
    from validation.reporting.version_document import VersionDocument

    if isinstance(document, VersionDocument):
        name, key, reference = _key(document.model), "page", document.reference
        yield Artifact(f"result-{name}", f"Report of {reference}", version_markdown(document, page))
        yield Artifact(f"engines-{name}", f"Engines of {reference}", table=engine_rows(document))
        if drift := drift_rows(document):
            yield Artifact(f"drift-{name}", f"Drift by joint of {reference}", table=drift)
    else:
        name = _key("-".join(filter(None, (document.candidate.model or "unnamed", document.target))))
        title, key = f"Canary{_on(document)}: {document.verdict}", "page-canary"
        yield Artifact(f"canary-{name}", title, canary_markdown(document, page))
    if page:
        yield Artifact(f"{key}-{name}", "the page", link=page)


def engine_rows(document: "VersionDocument") -> list[Json]:
    """A row per unit."""
    return [{name: getattr(engine, name) for name in ENGINE_COLUMNS} for engine in document.engines]


def drift_rows(document: "VersionDocument") -> list[Json]:
    """A row per output and units, with the three stages side by side, as the page has them."""
    from validation.reporting.stages import side_by_side

    return [_drift_row(row) for row in side_by_side(document.reports)]


def _drift_row(row: "DriftRow") -> Json:
    units = row.title + (f" ({row.more})" if row.more else "")
    cells = {joint: _cell_text(cell) for joint, cell in row.cells.items()}
    return {"what": units, "output": row.output, **cells, "drift": row.cause}


def _cell_text(cell: "StageCell | None") -> str:
    from validation.reporting.html import metric_text

    if not cell or not cell.shown:
        return ""
    check = cell.shown.check
    text = metric_text(check.value, check.name) or check.note
    limit = f" (limit {metric_text(check.limit, check.name)})" if check.limit is not None else ""
    return f"{'' if check.passed else 'FAILED '}{'' if check.name == 'sqnr_db' else check.name + ' '}{text}{limit}"


def version_markdown(document: "VersionDocument", page: str | None) -> str:
    """Verdict, task metrics, drift by stage, attribution, failures, latency."""
    from validation.reporting.overview import overview

    seen = overview(document, pictures=False)
    lines = [f"# {plain_text(seen.reference)}: {seen.verdict.text}", ""]
    lines += [f"- {plain_text(name)}: {plain_text(_format_list(values))}" for name, values in document.metrics.items()]
    failed = [engine for engine in document.engines if engine.status == "failed"]
    lines += [f"- **failed**: {plain_text(engine.unit)}: {plain_text(engine.reason)}" for engine in failed]
    lines += [f"- page: `{page}`"] if page else []
    if rows := drift_rows(document):
        lines += ["", "## Drift by joint", "", *_table(rows)]
    if seen.attributions:
        lines += ["", "## Which node drifted", ""]
        lines += [f"- {plain_text(item.name)}: {plain_text(item.headline)}" for item in seen.attributions]
    if rows := latency_rows(seen.latencies):
        lines += ["", "## Latency", "", *_table(rows)]
    return "\n".join(lines)


def latency_rows(views: "Sequence[LatencyView]") -> list[Json]:
    """A row per engine and bucket."""
    return [{"engine": item.name, **row, "machine": item.machine} for item in views for row in item.rows]


def canary_markdown(report: "CanaryReport", page: str | None) -> str:
    """Verdict, sides, criteria."""
    from validation.canary.judging.formatting import describe_interval, describe_value

    rows = []
    for item in report.criteria:
        estimate, margin = (describe_value(value, item.kind) for value in (item.estimate, item.margin))
        interval = "not measured" if item.note else describe_interval(item)
        row = {"criterion": item.name, "verdict": item.verdict, "measured": estimate}
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


def _side(identity: "EngineIdentity", seen: "SideObserved") -> str:
    name = identity.reference or "unnamed"
    return f"{name}, {pluralize(seen.requests, 'request')}, {seen.failed} failed"


def _format_list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def _table(rows: Sequence[Json]) -> list[str]:
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(plain_text(str(row[name])) for name in columns)} |" for row in rows]


def plain_text(text: str) -> str:
    """Text that anybody may have written, on one line and without meaning to markdown, HTML or a terminal."""
    line = visible(" ".join(text.split()))
    return re.sub(r"([\\`*_\[\]|<>#!])", r"\\\1", line).replace("\\<", "&lt;").replace("\\>", "&gt;")


def artifact_key(kind: str, model: str) -> str:
    """Prefect's keys are lower-case letters, digits and dashes."""
    return f"{kind}-{_key(model)}"


def _key(model: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


# A unit that runs longer than predicted is nearly done, and no more.
_NEARLY = 0.95


class ProgressArtifact:
    """Shows the states of runs, an artifact for each; made in the flow run whose artifacts they are, and called in the
    writers' threads."""

    def __init__(self) -> None:
        # Prefect finds the flow run of an artifact in its context, which another thread does not have.
        self._context = contextvars.copy_context()
        self._known: dict[str, UUID] = {}

    def __call__(self, run: RunState) -> None:
        """Show the state."""
        one = view_run(run)
        # Each its own copy: a context is entered by one thread at a time, and a catalog's runs have a writer each.
        self._context.copy().run(self._show, one, percent(one), description(one))

    def _show(self, one: RunView, done: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        # Each has a twin for coroutines, and says by its type that it may be either.
        create: Callable[..., Any] = create_progress_artifact
        update: Callable[..., Any] = update_progress_artifact
        run = one.run
        if run.id in self._known:
            update(self._known[run.id], done, description=text)
        else:
            self._known[run.id] = create(done, key=artifact_key("progress", run.model), description=text)


def percent(one: RunView) -> float:
    """How far the run is, 0 to 100: the share of its units that are over, and of those that run as predicted."""
    if one.run.state != "running":
        return 100.0
    shares = [_share(one, item) for item in one.run.units]
    return round(100 * sum(shares) / len(shares), 1) if shares else 0.0


def description(one: RunView) -> str:
    """Counts, and a line for each unit that runs."""
    lines = [f"{plain_text(one.run.model)}: {one.state}, {one.counts or 'preparing'}"]
    for item in one.run.units:
        if item.state == "running":
            told = "; ".join(part for part in (item.phase, item.where, one.describe(item)) if part)
            lines.append(f"- {plain_text(item.name)}: {plain_text(told)}")
    return "\n".join(lines)


def _share(one: RunView, item: RunItem) -> float:
    if item.state in OVER:
        return 1.0
    if item.state != "running" or item.predicted is None or not item.predicted.seconds:
        return 0.0
    return min(_NEARLY, (one.elapsed_s(item) or 0.0) / item.predicted.seconds)


def show_table(key: str, description: str, rows: Sequence[Json]) -> None:
    """Leave a table; with no row it says so, as the newest of its key would otherwise be an old one."""
    clean = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    create_table_artifact([dict(row) for row in rows] or [{"result": "nothing"}], key=clean, description=description)
