"""Latency reports: how fast a published engine was, on each kind of machine that it was timed on.

Like attestations they lie beside the manifest, keyed by the engine's digest, and a manifest never changes for them.
"""

from collections.abc import Iterator

from enginery.core import parsing
from enginery.core.codec import decode
from enginery.core.digest import digest_of_bytes
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.core.reports.latency import FORMAT, LatencyReport, MachineKind
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.keys import latencies_prefix, latency_key

MAX_BYTES = 16 << 20


def attach_latency(store: Store, manifest: Manifest, report: str) -> None:
    """Put the latency report of this digest, a blob, beside its version. Does nothing where it is already.

    Raises IntegrityError for a blob that is none, or about an engine that the version does not have.
    """
    engine = read_latency_report(store, report).engine
    if all(entry.digest != engine for entry in manifest.engines):
        where = f"{manifest.model}@{manifest.version}"
        raise IntegrityError(f"the latency report {report} is about engine {engine}, which {where} does not have")
    store.create(latency_key(manifest.model, manifest.version, engine, report), store.read_blob(report))


def read_latency_report(store: Store, report: str) -> LatencyReport:
    """The latency report of this digest, a blob. Raises IntegrityError for a blob that is none."""
    try:
        return _parse(store.read_blob(report))
    except IntegrityError as error:
        raise IntegrityError(f"blob {report} is no latency report: {error}; time the engine again") from error


def latencies(store: Store, manifest: Manifest) -> dict[str, list[LatencyReport]]:
    """By the engine's digest: the newest report of each kind of machine, the newest first. Raises IntegrityError."""
    newest: dict[tuple[str, MachineKind], LatencyReport] = {}
    for report in latency_reports(store, manifest):
        key = (report.engine, report.machine)
        if key not in newest or newest[key].created_at <= report.created_at:
            newest[key] = report
    found: dict[str, list[LatencyReport]] = {}
    for report in sorted(newest.values(), key=lambda item: item.created_at, reverse=True):
        found.setdefault(report.engine, []).append(report)
    return found


def latency_reports(store: Store, manifest: Manifest) -> Iterator[LatencyReport]:
    """Every report of a version. Raises IntegrityError for a damaged one."""
    prefix = latencies_prefix(manifest.model, manifest.version)
    for key in store.list(prefix):
        engine, _, name = key.removeprefix(prefix).partition("/")
        data = store.read(key) or b""
        try:
            report = _parse(data)
            if digest_of_bytes(data) != name.removesuffix(".json") or report.engine != engine:
                raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
        except IntegrityError as error:
            raise IntegrityError(f"{key} of {store.uri}: {error}; time the engine again") from error
        yield report


def _parse(data: bytes) -> LatencyReport:
    document = parsing.parse_json(data, MAX_BYTES)
    if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
        raise Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
    parsing.field(document, "engine", parsing.digest)
    return decode(document, LatencyReport)
