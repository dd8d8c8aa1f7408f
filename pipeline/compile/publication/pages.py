"""Pages for people, and the JSON that each is drawn from: a version's report and a canary's.

A version's JSON is a copy of what lies in the registry by digest, made for reading in one piece; it proves nothing. It
lies with its page beside the version's manifest. A run of which no engine passed has a page, too, with what failed, at
which stage, at which node: under `failed/`, where the model's next such run replaces it.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core.codec import decode, encode_document
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.core.reports.proof import Report
from enginesmith.core.types import BuildFailure
from enginesmith.registry.evidence.attestations import attestations, judge_entries
from enginesmith.registry.evidence.build_details import quantization_records
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.evidence.latencies import latencies
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, place_of
from enginesmith.registry.store.files import reachable
from enginesmith.registry.store.layout import attestation_key, failed_data_key, failed_page_key, page_data_key, page_key
from enginesmith.registry.versions.publish import attach_page
from pipeline.outcome import JudgedUnit
from validation.attribution.result import NamedAttribution, attributions
from validation.reporting.version_document import KIND as VERSION
from validation.reporting.version_document import VersionDocument

if TYPE_CHECKING:
    from validation.canary.report import CanaryReport

# Makes the HTML page of a version's document.
DrawPage = Callable[[VersionDocument], str]
CANARY = "enginesmith-canary"
MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Measured:
    """What a run found of its units: reports of engines, and builds that gave none."""

    reports: tuple[Report, ...]
    failures: tuple[BuildFailure, ...] = ()

    @classmethod
    def of(cls, judged: Sequence[JudgedUnit]) -> "Measured":
        """Of judged units."""
        failures = tuple(item.built.failure for item in judged if item.built.failure)
        return cls(tuple(item.report for item in judged if item.report), failures)


def write_document(document: VersionDocument) -> bytes:
    """A version's document as JSON, in the order that it has, which is the page's."""
    return json.dumps(encode_document(document), ensure_ascii=False, allow_nan=False).encode()


def read_version(data: bytes, what: str) -> VersionDocument:
    """The document that `write_document` wrote. what: how errors call it. Raises IntegrityError."""
    return _version(_parse(data, what), what)


def published_document(store: Store, manifest: Manifest) -> VersionDocument:
    """A version's document with its statuses, reports and latencies of today. Raises UnknownNameError."""
    where = f"{manifest.model}@{manifest.version}"
    data = store.read(page_data_key(manifest.model, manifest.version))
    if data is None:
        raise UnknownNameError(f"{where} has no report.json beside its manifest: it is lost; publish the version again")
    document = read_version(data, f"report.json of {where}")
    reports = {report.unit: report for report in document.reports} | _find_attested(store, manifest)
    return replace(
        document,
        engines=judge_entries(store, manifest),
        reports=tuple(reports.values()),
        attributions=tuple(attributions(store, manifest).values()),
        latencies={engine: tuple(found) for engine, found in latencies(store, manifest).items()},
        canaries=tuple(canaries(store, manifest)),
    )


def read_document(path: Path) -> "VersionDocument | CanaryReport":
    """A document on disk, of either kind. Raises InputError where there is none, IntegrityError for an edited one."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; give a reference (name@3), or the report.json of a version or a canary"
        )
    with reachable(f"reading {path}"), path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    try:
        document = _parse(data, str(path))
    except IntegrityError as error:
        raise InputError(str(error)) from error
    if document.get("kind") == CANARY:
        from validation.canary.report import read_report

        return read_report(data)
    return _version(document, str(path))


def draw_page(document: "VersionDocument | CanaryReport") -> str:
    """The page. Raises IntegrityError for a document that lacks what its page shows."""
    try:
        if isinstance(document, VersionDocument):
            from validation.reporting.html import render

            return render(document)
        from validation.canary.page import render as render_canary

        return render_canary(document)
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise IntegrityError(f"the document is not whole ({error!r}); make it again") from error


def draw_or_explain(document: VersionDocument, draw: DrawPage) -> str:
    """The page; where it cannot be drawn, one that says why, since no page is worth a version."""
    try:
        return draw(document)
    except (IntegrityError, MemoryError) as error:
        why = escape(f"{type(error).__name__}: {error}")
        return (
            f"<!doctype html><meta charset=utf-8><title>{escape(document.reference)}</title><p>The page of "
            f"{escape(document.reference)} could not be drawn ({why}). What it is about lies beside it in report.json."
        )


def _find_attested(store: Store, manifest: Manifest) -> dict[str, Report]:
    """The newest attested report of each unit."""
    found: dict[str, Report] = {}
    for item in sorted(attestations(store, manifest), key=lambda item: item.created_at):
        key = attestation_key(manifest.model, manifest.version, item.engine, item.report)
        report = Report.from_json(json.loads(store.read(key) or b"{}"))
        found[report.unit] = report
    return found


def _version(document: dict[str, object], what: str) -> VersionDocument:
    try:
        return decode(document, VersionDocument)
    except IntegrityError as error:
        raise IntegrityError(f"{what} is not whole ({error}); make it again") from error


def _parse(data: bytes, what: str) -> dict[str, object]:
    try:
        document = parse_json(data, MOST_BYTES)
    except Malformed as error:
        raise IntegrityError(f"{what}: {error}") from error
    if document.get("kind") not in (VERSION, CANARY):
        raise IntegrityError(f"{what} is no report of a version or of a canary: its kind is {document.get('kind')!r}")
    return document


def version_page(manifest: Manifest, measured: Measured, store: Store, draw: DrawPage) -> str:
    """The version's HTML report, beside its manifest, with the JSON it is drawn from; written once. Its address."""
    key, data_key = (place(manifest.model, manifest.version) for place in (page_key, page_data_key))
    if store.read(key) is None or store.read(data_key) is None:
        found = tuple(attributions(store, manifest).values())
        document = _describe(manifest, measured, store, found, latencies(store, manifest))
        attach_page(store, manifest, draw_or_explain(document, draw).encode(), write_document(document))
    return place_of(store, key)


def add_attributions(manifest: Manifest, store: Store, draw: DrawPage) -> None:
    """Draw a version's page again, with the attributions that were made after it was published. Raises IntegrityError
    for a report.json that cannot be read."""
    data = store.read(page_data_key(manifest.model, manifest.version)) or b""
    document = read_version(data, f"report.json of {manifest.model}@{manifest.version}")
    whole = replace(document, attributions=tuple(attributions(store, manifest).values()))
    if whole != document:
        attach_page(store, manifest, draw_or_explain(whole, draw).encode(), write_document(whole))


def failed_page(
    draft: Manifest,
    measured: Measured,
    store: Store,
    draw: DrawPage,
    found: tuple[NamedAttribution, ...] | None = None,
) -> str:
    """The page of a run that published nothing; drawn again only when something else came out. Its address.

    draft: its manifest as it would have been, with the engines that failed; its version is empty.  found: which node
    drifted; None where that is not known yet: what an equal run before it found then stays.
    """
    key, data_key = failed_page_key(draft.model), failed_data_key(draft.model)
    before = failed_document(store, draft.model)
    same = before is not None and (before.content, before.engines) == (draft.content, draft.engines)
    if store.read(key) is None or not same or (before and found not in (None, before.attributions)):
        document = _describe(draft, measured, store, found or (), {})
        for place, content in ((data_key, write_document(document)), (key, draw_or_explain(document, draw).encode())):
            store.replace(place, content, store.read(place))
    return place_of(store, key)


def failed_document(store: Store, model: str) -> VersionDocument | None:
    """What the page of the last run that published nothing is drawn from; None where there is none to read."""
    try:
        return read_version(store.read(failed_data_key(model)) or b"", f"the last failed run of {model}")
    except IntegrityError:
        return None


def _describe(
    manifest: Manifest,
    measured: Measured,
    store: Store,
    found: tuple[NamedAttribution, ...],
    timed: Mapping[str, Sequence[LatencyReport]],
) -> VersionDocument:
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(Manifest)}
    return VersionDocument(
        **fields,
        reports=measured.reports,
        failures=measured.failures,
        quantization=quantization_records(store, manifest),
        attributions=found,
        latencies={engine: tuple(reports) for engine, reports in timed.items()},
    )
