"""Reports of a kind about engines of a version. Like attestations they are stored beside the manifest, under the
engine's digest and their own; the manifest does not change."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from enginesmith.core import parsing
from enginesmith.core.codec import decode
from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.errors import IntegrityError
from enginesmith.core.parsing import Malformed
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Documents, Store
from enginesmith.registry.store.layout import evidence_prefix, latency_key, load_key


class EngineReport(Protocol):
    """A report about one engine."""

    @property
    def engine(self) -> str:
        """Its digest."""
        ...


ReportT = TypeVar("ReportT", bound=EngineReport)


@dataclass(frozen=True)
class EngineReports(Generic[ReportT]):
    """The reports of a kind. kind: the folder they lie in.  name, remedy: for messages.  format: that is read.
    most_bytes: of a report."""

    kind: Literal["latency", "loads"]
    name: str
    remedy: str
    report_class: type[ReportT]
    format: int
    most_bytes: int

    def attach(self, store: Store, manifest: Manifest, report: str) -> None:
        """Store a report, given as a blob's digest, beside its version; nothing changes if it is there already.

        Raises IntegrityError for a blob that is no such report, or about an engine that the version does not have.
        """
        engine = self.read_blob(store, report).engine
        if all(entry.digest != engine for entry in manifest.engines):
            where = f"{manifest.model}@{manifest.version}"
            raise IntegrityError(f"the {self.name} {report} is about engine {engine}, which {where} does not have")
        key = latency_key if self.kind == "latency" else load_key
        store.create(key(manifest.model, manifest.version, engine, report), store.read_blob(report))

    def read_blob(self, store: Store, report: str) -> ReportT:
        """The report with this blob digest. Raises IntegrityError for a blob that is none."""
        try:
            return self._parse(store.read_blob(report))
        except IntegrityError as error:
            raise IntegrityError(f"blob {report} is no {self.name}: {error}; {self.remedy}") from error

    def of_version(self, store: Documents, manifest: Manifest) -> Iterator[ReportT]:
        """All of a version, in the order of their keys. Raises IntegrityError for a damaged one."""
        prefix = evidence_prefix(self.kind, manifest.model, manifest.version)
        for key in store.list(prefix):
            engine, _, name = key.removeprefix(prefix).partition("/")
            data = store.read(key) or b""
            try:
                report = self._parse(data)
                if digest_of_bytes(data) != name.removesuffix(".json") or report.engine != engine:
                    raise Malformed("it is not the report its name says: it was edited by hand, moved or damaged")
            except IntegrityError as error:
                raise IntegrityError(f"{key} of {store.uri}: {error}; {self.remedy}") from error
            yield report

    def _parse(self, data: bytes) -> ReportT:
        document = parsing.parse_json(data, self.most_bytes)
        if (found := parsing.field(document, "format", parsing.count)) != self.format:
            raise Malformed(f"format is {found}; this enginesmith reads {self.format}: upgrade enginesmith")
        parsing.field(document, "engine", parsing.digest)
        return decode(document, self.report_class)
