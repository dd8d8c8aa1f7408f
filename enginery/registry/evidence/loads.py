"""Reports of load tests of published engines. Like latency reports they are stored beside the manifest, under the
engine's digest and their own; the manifest does not change."""

from collections.abc import Iterator

from enginery.core import parsing
from enginery.core.codec import decode
from enginery.core.digest import digest_of_bytes
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.core.reports.load import LOAD_FORMAT, LoadReport
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.layout import evidence_prefix, load_key

MAX_BYTES = 4 << 20


def attach_load(store: Store, manifest: Manifest, report: str) -> None:
    """Store a load report, given as a blob's digest, beside its version; nothing changes if it is there already.

    Raises IntegrityError for a blob that is no load report, or about an engine that the version does not have.
    """
    data = store.read_blob(report)
    try:
        engine = _parse(data).engine
    except IntegrityError as error:
        raise IntegrityError(f"blob {report} is no load report: {error}; run the load test again") from error
    if all(entry.digest != engine for entry in manifest.engines):
        where = f"{manifest.model}@{manifest.version}"
        raise IntegrityError(f"the load report {report} is about engine {engine}, which {where} does not have")
    store.create(load_key(manifest.model, manifest.version, engine, report), data)


def load_reports(store: Store, manifest: Manifest) -> Iterator[LoadReport]:
    """All load reports of a version, oldest first. Raises IntegrityError for a damaged one."""
    prefix = evidence_prefix("loads", manifest.model, manifest.version)
    found = []
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        data = store.read(key) or b""
        try:
            report = _parse(data)
            if digest_of_bytes(data) != name.removesuffix(".json") or report.engine != engine:
                raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
        except IntegrityError as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}; delete it, and run the load test again") from error
        found.append(report)
    yield from sorted(found, key=lambda report: report.created_at)


def _parse(data: bytes) -> LoadReport:
    document = parsing.parse_json(data, MAX_BYTES)
    if (found := parsing.field(document, "format", parsing.count)) != LOAD_FORMAT:
        raise Malformed(f"format is {found}; this enginery reads {LOAD_FORMAT}: upgrade enginery")
    parsing.field(document, "engine", parsing.digest)
    return decode(document, LoadReport)
