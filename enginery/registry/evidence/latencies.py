"""Latency reports: how fast a published engine was, on each kind of machine that it was timed on.

Like attestations they lie beside the manifest, keyed by the engine's digest, and a manifest never changes for them.
"""

from collections.abc import Callable, Iterator
from typing import Any

from enginery.core import parsing
from enginery.core.digest import digest_of, digest_of_bytes
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.keys import latencies_prefix, latency_key

MAX_BYTES = 16 << 20
FORMAT = 2


def attach_latency(store: Store, manifest: Manifest, report: str) -> None:
    """Put the latency report of this digest, a blob, beside its version. Does nothing where it is already.

    Raises IntegrityError for a blob that is none, or about an engine that the version does not have.
    """
    data = store.read_blob(report)
    where = f"{manifest.model}@{manifest.version}"
    try:
        engine = parsing.field(parsing.parse_json(data, MAX_BYTES), "engine", parsing.digest)
        _read(data, engine, report)
    except Malformed as error:
        raise IntegrityError(f"blob {report} is no latency report: {error}; time the engine again") from error
    if all(entry.digest != engine for entry in manifest.engines):
        raise IntegrityError(f"the latency report {report} is about engine {engine}, which {where} does not have")
    store.create(latency_key(manifest.model, manifest.version, engine, report), data)


def latencies(store: Store, manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    """By the engine's digest: the newest report of each kind of machine, the newest first. Raises IntegrityError."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for report in latency_reports(store, manifest):
        key = (report["engine"], digest_of(report["machine"]))
        if key not in newest or newest[key]["created_at"] <= report["created_at"]:
            newest[key] = report
    found: dict[str, list[dict[str, Any]]] = {}
    for report in sorted(newest.values(), key=lambda item: str(item["created_at"]), reverse=True):
        found.setdefault(report["engine"], []).append(report)
    return found


def latency_reports(store: Store, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Every report of a version. Raises IntegrityError for a damaged one."""
    prefix = latencies_prefix(manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        try:
            yield _read(store.read(key) or b"", engine, name.removesuffix(".json"))
        except Malformed as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}") from error


def _read(data: bytes, engine: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = parsing.parse_json(data, MAX_BYTES)
    if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
        raise Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
    if digest_of_bytes(data) != name or parsing.field(document, "engine", parsing.digest) != engine:
        raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
    for place, read in _SHOWN.items():
        parsing.field(document, place, read)
    return document


# What `list`, `show` and pages take out of a report.
_SHOWN: dict[str, Callable[[Any, str], object]] = {
    "machine": parsing.mapping,
    "created_at": parsing.text,
    "unit": parsing.text,
    "buckets": parsing.many(parsing.mapping),
    "anatomy": parsing.mapping,
}
