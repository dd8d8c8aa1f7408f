"""Pages for people, and the JSON that each is drawn from: a version's report and a canary's.

Whoever has the JSON has the page: `drawn` takes either kind. A version's JSON is a copy of what lies in the registry by
digest, made for reading in one piece; it proves nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.errors import InputError, IntegrityError, UnknownNameError
from enginery.core.parsing import Malformed, parse_json
from enginery.registry.evidence.attestations import attestations, judged
from enginery.registry.evidence.canaries import canaries
from enginery.registry.evidence.latencies import latencies
from enginery.registry.manifest import Manifest
from enginery.registry.store.atomic_write import reachable
from enginery.registry.store.base import Store
from enginery.registry.store.keys import attestation_key, page_data_key
from pipeline.values import Json

VERSION, CANARY = "enginery-version", "enginery-canary"
MOST_BYTES = 256 << 20


def version_document(manifest: Manifest, parts: Mapping[str, Any]) -> bytes:
    """What a version's page is drawn from, as JSON. parts: see `validation.reporting.html.render`."""
    return _written({"kind": VERSION, **manifest.to_json(), **parts})


def published_document(store: Store, manifest: Manifest) -> Json:
    """A version's document with its statuses, reports and latencies of today. Raises UnknownNameError."""
    where = f"{manifest.model}@{manifest.version}"
    data = store.read(page_data_key(manifest.model, manifest.version))
    if data is None:
        raise UnknownNameError(f"{where} has no report.json beside its manifest: it is lost; publish the version again")
    engines = [asdict(entry) for entry in judged(store, manifest)]
    document = _parsed(data, f"report.json of {where}")
    reports = {report["unit"]: report for report in document["reports"]} | _attested(store, manifest)
    today = {
        "engines": engines,
        "reports": list(reports.values()),
        "latencies": latencies(store, manifest),
        "canaries": [asdict(found) for found in canaries(store, manifest)],
    }
    current: Json = json.loads(_written({**document, **today}))
    return current


def read_document(path: Path) -> Json:
    """A document on disk, of either kind. Raises InputError where there is none, IntegrityError for an edited one."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; give a reference (name@3), or the report.json of a version or a canary"
        )
    with reachable(f"reading {path}"), path.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    try:
        document = _parsed(data, str(path))
    except IntegrityError as error:
        raise InputError(str(error)) from error
    if document.get("kind") == CANARY:
        from validation.canary.report import read_report

        return dict(read_report(data).document)
    return document


def drawn(document: Json) -> str:
    """The page. Raises IntegrityError for a document that lacks what its page shows."""
    try:
        if document["kind"] == CANARY:
            from validation.canary.page import render as render_canary

            return render_canary(document)
        from validation.reporting.html import render

        return render(document)
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise IntegrityError(f"the document is not whole ({error!r}); make it again") from error


def _attested(store: Store, manifest: Manifest) -> dict[str, Json]:
    """The newest attested report of each unit."""
    found: dict[str, Json] = {}
    for item in sorted(attestations(store, manifest), key=lambda item: item.created_at):
        key = attestation_key(manifest.model, manifest.version, item.engine, item.report)
        report = json.loads(store.read(key) or b"{}")
        found[str(report.get("unit"))] = report
    return found


def _written(document: Mapping[str, Any]) -> bytes:
    """In the order that it has, which is the page's."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _parsed(data: bytes, what: str) -> Json:
    try:
        document: Json = parse_json(data, MOST_BYTES)
    except Malformed as error:
        raise IntegrityError(f"{what}: {error}") from error
    if document.get("kind") not in (VERSION, CANARY):
        raise IntegrityError(f"{what} is no report of a version or of a canary: its kind is {document.get('kind')!r}")
    return document
