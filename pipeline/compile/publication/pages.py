"""Documents published with engines: pages and provenance."""

import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from enginesmith.core.codec import decode, encode_document, explain_damage
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError, canonical_json
from enginesmith.core.parsing import parse_json
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.core.reports.proof import Report
from enginesmith.core.types import BuildFailure
from enginesmith.registry.evidence.attestations import attestations, judge_entries
from enginesmith.registry.evidence.canaries import canaries, quantization_records
from enginesmith.registry.evidence.latencies import latencies
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store, place_of
from enginesmith.registry.store.files import reachable
from enginesmith.registry.store.layout import attestation_key, failed_data_key, failed_page_key, page_data_key, page_key
from enginesmith.registry.versions.publish import attach_page
from pipeline.outcome import JudgedUnit
from pipeline.values import Json
from validation.attribution.result import NamedAttribution, attributions
from validation.reporting.version_document import KIND as VERSION
from validation.reporting.version_document import VersionDocument

if TYPE_CHECKING:
    from validation.canary.report import CanaryReport

# A version's JSON copies documents of the registry into one file, for reading; it proves nothing. It is stored with
# its page beside the version's manifest. A run without a passed engine has a page, too, with the failed checks, their
# stages and nodes: under `failed/`, where the model's next such run replaces it.

CANARY = "enginesmith-canary"
MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Measured:
    """Results of a run: reports of engines, and failed builds."""

    reports: tuple[Report, ...]
    failures: tuple[BuildFailure, ...] = ()

    @classmethod
    def of(cls, judged_units: Sequence[JudgedUnit]) -> "Measured":
        """The reports and failures of judged units."""
        failures = tuple(unit.built.failure for unit in judged_units if unit.built.failure)
        return cls(tuple(unit.report for unit in judged_units if unit.report), failures)


def write_document(document: VersionDocument) -> bytes:
    """A version's document as JSON, with its keys in the page's order."""
    return json.dumps(encode_document(document), ensure_ascii=False, allow_nan=False).encode()


def read_version(data: bytes, document_name: str) -> VersionDocument:
    """The document that `write_document` wrote. document_name: how errors call it. Raises IntegrityError."""
    return _version(_parse(data, document_name), document_name)


def published_document(store: Store, manifest: Manifest) -> VersionDocument:
    """A version's document with its statuses, reports and latencies of today. Raises UnknownNameError."""
    version_name = f"{manifest.model}@{manifest.version}"
    data = store.read(page_data_key(manifest.model, manifest.version))
    if data is None:
        raise UnknownNameError(
            f"{version_name} has no report.json beside its manifest: it is lost; publish the version again"
        )
    document = read_version(data, f"report.json of {version_name}")
    reports_by_unit: dict[str, Report] = {}
    for attestation in sorted(attestations(store, manifest), key=lambda attestation: attestation.created_at):
        key = attestation_key(manifest.model, manifest.version, attestation.engine, attestation.report)
        report = Report.from_json(json.loads(store.read(key) or b"{}"))
        reports_by_unit[report.unit] = report
    reports = {report.unit: report for report in document.reports} | reports_by_unit
    return replace(
        document,
        engines=judge_entries(store, manifest),
        reports=tuple(reports.values()),
        attributions=tuple(attributions(store, manifest).values()),
        latencies={engine: tuple(engine_latencies) for engine, engine_latencies in latencies(store, manifest).items()},
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
        raise IntegrityError(f"the document is incomplete or invalid ({error!r}); make it again") from error


def _draw_or_explain(document: VersionDocument) -> str:
    """The page; if drawing fails, a page with the error, so that the version is still published."""
    try:
        return draw_page(document)
    except (IntegrityError, MemoryError) as error:
        text = escape(f"{type(error).__name__}: {error}")
        return (
            f"<!doctype html><meta charset=utf-8><title>{escape(document.reference)}</title><p>The page of "
            f"{escape(document.reference)} could not be drawn ({text}). Its data is beside it in report.json."
        )


def _version(document: dict[str, object], document_name: str) -> VersionDocument:
    with explain_damage(f"{document_name} is incomplete or invalid", "make it again"):
        return decode(document, VersionDocument)


def _parse(data: bytes, document_name: str) -> dict[str, object]:
    with explain_damage(document_name):
        document = parse_json(data, MOST_BYTES)
    if document.get("kind") not in (VERSION, CANARY):
        raise IntegrityError(
            f"{document_name} is not a report of a version or of a canary: its kind is {document.get('kind')!r}"
        )
    return document


def version_page(manifest: Manifest, results: Measured, store: Store) -> str:
    """Write the version's HTML report beside its manifest, with the JSON it is drawn from, unless it exists. Returns
    its address."""
    key, data_key = (key_of(manifest.model, manifest.version) for key_of in (page_key, page_data_key))
    if store.read(key) is None or store.read(data_key) is None:
        node_attributions = tuple(attributions(store, manifest).values())
        document = _describe(manifest, results, store, node_attributions, latencies(store, manifest))
        attach_page(store, manifest, _draw_or_explain(document).encode(), write_document(document))
    return place_of(store, key)


def add_attributions(manifest: Manifest, store: Store) -> None:
    """Draw a version's page again, with the attributions that were made after it was published. Raises IntegrityError
    for a report.json that cannot be read."""
    data = store.read(page_data_key(manifest.model, manifest.version)) or b""
    document = read_version(data, f"report.json of {manifest.model}@{manifest.version}")
    whole_document = replace(document, attributions=tuple(attributions(store, manifest).values()))
    if whole_document != document:
        attach_page(store, manifest, _draw_or_explain(whole_document).encode(), write_document(whole_document))


def failed_page(
    draft: Manifest, results: Measured, store: Store, named_attributions: tuple[NamedAttribution, ...] | None = None
) -> str:
    """Draw the page of a run that published nothing, unless an equal run drew the same page. Returns its address.

    draft: the manifest that was not published, with an empty version and the failed engines.  named_attributions: which
    node drifted; None if unknown: then those of an equal earlier run stay.
    """
    key, data_key = failed_page_key(draft.model), failed_data_key(draft.model)
    last_page = failed_document(store, draft.model)
    is_same = last_page is not None and (last_page.content, last_page.engines) == (draft.content, draft.engines)
    if (
        store.read(key) is None
        or not is_same
        or (last_page and named_attributions not in (None, last_page.attributions))
    ):
        document = _describe(draft, results, store, named_attributions or (), {})
        for object_key, content in ((data_key, write_document(document)), (key, _draw_or_explain(document).encode())):
            store.replace(object_key, content, store.read(object_key))
    return place_of(store, key)


def failed_document(store: Store, model: str) -> VersionDocument | None:
    """Data for the page of the last run that published nothing; None if it is missing."""
    try:
        return read_version(store.read(failed_data_key(model)) or b"", f"the last failed run of {model}")
    except IntegrityError:
        return None


def _describe(
    manifest: Manifest,
    results: Measured,
    store: Store,
    named_attributions: tuple[NamedAttribution, ...],
    latency_reports: Mapping[str, Sequence[LatencyReport]],
) -> VersionDocument:
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(Manifest)}
    return VersionDocument(
        **fields,
        reports=results.reports,
        failures=results.failures,
        quantization=quantization_records(store, manifest),
        attributions=named_attributions,
        latencies={engine: tuple(reports) for engine, reports in latency_reports.items()},
    )


# The provenance of a version in two standard formats, for other tools.
#
# An in-toto Statement (v1) with a SLSA Provenance (v1) predicate, and a CycloneDX 1.6 SBOM of what built it.
#
# Both are blobs whose digests the manifest names, so whoever signs the manifest signs them. They contain times and
# hosts, and are not part of a version's content: the same content built again is the same version, and keeps its first
# statement.
#
# Formats: https://github.com/in-toto/attestation/blob/main/spec/v1, https://slsa.dev/spec/v1.0/provenance,
# https://cyclonedx.org/docs/1.6/json.

# The manifest's sources of these names are the statement and the SBOM.
STATEMENT = "provenance statement"
SBOM = "sbom"
BUILD_TYPE = "urn:enginesmith:build:v1"
# The image that the build runs in, if any, set by the caller; a digest reference where possible.
IMAGE = "ENGINESMITH_BUILDER_IMAGE"

# Maximum characters of a license's name; a longer text is the license itself.
_LICENSE_TEXT = 100
_PURL_NAME = re.compile(r"[-_.]+")


def with_provenance(store: Store, draft: Manifest, entries: Sequence[EngineEntry], started_at: str) -> Manifest:
    """The draft with its statement and SBOM stored and named among its sources. started_at: ISO 8601, UTC."""
    sbom_digest = store.put_bytes(canonical_json(environment_sbom()))
    statement_digest = store.put_bytes(canonical_json(provenance_statement(draft, entries, started_at, sbom_digest)))
    return replace(draft, sources={**draft.sources, STATEMENT: statement_digest, SBOM: sbom_digest})


def provenance_statement(draft: Manifest, entries: Sequence[EngineEntry], started_at: str, sbom: str) -> Json:
    """The statement about the engines of a version. Its subjects are the engines; the manifest cannot be one, since it
    names this statement. finishedOn is when the manifest was drafted, after the last proof."""
    image = os.environ.get(IMAGE)
    toolchains = {f"{name} {version}" for entry in entries for name, version in entry.toolchain.items()}
    materials = {**draft.sources, **draft.provenance}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": _subjects(entries),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"model": draft.model, "spec": dict(draft.spec)},
                "internalParameters": {
                    "content": draft.content,
                    "toolchains": sorted(toolchains),
                    "host": {**draft.host, "nvidia driver": _driver()},
                },
                "resolvedDependencies": [
                    *({"name": name, "digest": {"sha256": digest}} for name, digest in sorted(materials.items())),
                    *(
                        {"uri": _purl(name, version)}
                        for name, version in sorted(draft.toolchain.items())
                        if version != "absent"
                    ),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": f"{BUILD_TYPE}#{'image' if image else 'host'}",
                    "version": {name: draft.toolchain[name] for name in ("enginesmith",) if name in draft.toolchain},
                    **({"builderDependencies": [{"uri": image}]} if image else {}),
                },
                "metadata": {"invocationId": draft.content, "startedOn": started_at, "finishedOn": draft.created_at},
                "byproducts": [
                    {"name": SBOM, "digest": {"sha256": sbom}, "mediaType": "application/vnd.cyclonedx+json"}
                ],
            },
        },
    }


def _subjects(entries: Sequence[EngineEntry]) -> list[Json]:
    """One per engine file; several units may share one."""
    units_by_digest: dict[str, list[str]] = {}
    for entry in entries:
        if entry.digest:
            units_by_digest.setdefault(entry.digest, []).append(entry.unit)
    return [
        {"name": ", ".join(units), "digest": {"sha256": digest}} for digest, units in sorted(units_by_digest.items())
    ]


def _driver() -> str:
    """NVIDIA's driver on this host, as the kernel says, or 'none'."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as stream:  # noqa: PTH123 - not a path of ours
            return stream.read(100).strip()
    except (OSError, UnicodeDecodeError):
        return "none"


def environment_sbom() -> Json:
    """Every installed distribution of this process's environment.

    Without serial number and time, which are optional in CycloneDX: the same environment gives the same bytes. Engines
    that were built on other hosts name their toolchain in the manifest.
    """
    components = {item["purl"]: item for item in map(_component, importlib.metadata.distributions()) if item}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "enginesmith build environment"}},
        "components": [components[purl] for purl in sorted(components)],
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{_PURL_NAME.sub('-', name).lower()}@{quote(version, safe='.')}"


def _component(distribution: importlib.metadata.Distribution) -> Json:
    """A distribution as a component; {} for a folder that no longer is one."""
    metadata = distribution.metadata  # is read again each time
    name, version = (str(metadata[field] or "") if metadata else "" for field in ("Name", "Version"))
    if not (name and version):
        return {}
    purl, licenses = _purl(name, version), _licenses(metadata)
    component: Json = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return component | ({"licenses": licenses} if licenses else {})


def _licenses(metadata: importlib.metadata.PackageMetadata) -> list[Json]:
    """The SPDX expression (PEP 639), else the license text; [] if there is no short one."""
    if expression := metadata["License-Expression"]:
        return [{"expression": str(expression)}]
    classifiers = [str(line) for line in metadata.get_all("Classifier") or ()]
    license_names = [line.rpartition("::")[2].strip() for line in classifiers if line.startswith("License ::")]
    text = str(metadata["License"] or "").strip()
    names = license_names or ([text] if text and len(text) <= _LICENSE_TEXT and "\n" not in text else [])
    return [{"license": {"name": name}} for name in dict.fromkeys(names) if name]
