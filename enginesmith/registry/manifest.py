"""The manifest: one immutable document that describes a version and names its blobs by digest.

It is canonical JSON with the digest of its other fields, so that an edit by hand is detected when it is read. All
names, digests and sizes are checked before they are used. `request_of` gives the build request of a published engine.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar, get_args

from enginesmith.core import parsing
from enginesmith.core.codec import decode
from enginesmith.core.digest import canonical_json, digest_of, is_digest
from enginesmith.core.ensemble import PinnedGraph
from enginesmith.core.errors import IntegrityError
from enginesmith.core.parsing import Malformed
from enginesmith.core.parsing import field as read
from enginesmith.core.requirements import Cpu, Gpu, Requirement, Unknown, Weights, to_json
from enginesmith.core.types import (
    CPU_KIND,
    PRECISIONS,
    BuildRequest,
    QuantizedState,
    Scalar,
    ShapeProfile,
    Target,
    TensorSpec,
)
from enginesmith.registry import manifest_fields as fields

FORMAT = 1
MAX_BYTES = 16 << 20
_REMEDY = (
    "restore it from a copy; or build again, which publishes another version (change the spec's own, if it has one), "
    "then delete this file and run `enginesmith registry gc`"
)
# Fields that came after manifests had been written.
_LATER = ("shards", "graphs", "caches")
T = TypeVar("T")


class Misplaced(IntegrityError):  # noqa: N818 - says what the manifest is
    """A valid manifest of another model or version than its key says."""


Status = Literal["proven", "unproven", "failed", "refused"]
STATUSES: tuple[Status, ...] = get_args(Status)
USABLE = ("proven", "unproven")


@dataclass(frozen=True)
class EngineEntry:
    """One unit of a version: an engine that can be pulled, or the reason why there is none.

    status: 'proven' (ran on its hardware and passed), 'unproven' (never ran there, or `is_measured` is not so),
    'failed', 'refused'.
    reason: of the status, in words.  build_key: digest of the build request.
    graph: digest of the ONNX model it was compiled from.  scales: digest of the calibrated ranges of an int8 engine.
    digest, size_bytes, suffix: the engine's file; None without one.  report: digest of its validation report.
    checks: numbers of checks, as `Report.counts`.  requires: what a machine must have to run it.
    notes: messages of the compiler or a cast that users should know.
    quantized_states: as in `BuildRequest`.
    """

    target: str
    precision: str
    backend: str
    status: Status
    reason: str = ""
    compute_capability: tuple[int, int] | None = None
    product: str | None = None
    build_key: str | None = None
    graph: str | None = None
    scales: str | None = None
    digest: str | None = None
    size_bytes: int | None = None
    suffix: str | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    profiles: tuple[ShapeProfile, ...] = ()
    report: str | None = None
    checks: Mapping[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0})
    requires: tuple[Requirement, ...] = ()
    notes: tuple[str, ...] = ()
    quantized_states: tuple[QuantizedState, ...] = ()

    @property
    def unit(self) -> str:
        """The unit's short name, as in `BuildRequest.unit`."""
        return f"{self.target} {self.precision} {self.backend}"

    @property
    def usable(self) -> bool:
        """Whether the unit has an engine that may be pulled: proven or unproven."""
        return self.status in USABLE

    @property
    def is_measured(self) -> bool:
        """Whether each of its checks measured something; otherwise no run proves it without other golden data."""
        return not self.checks.get("not_measured")

    @property
    def is_stripped(self) -> bool:
        """Whether the engine's file has no weights, so that the ONNX model is needed too."""
        return any(isinstance(item, Weights) for item in self.requires)

    @property
    def cpu(self) -> str | None:
        """The kind of CPU that a CPU engine was built for, and that its status is about; None for a GPU engine."""
        return self.toolchain.get(CPU_KIND)

    @property
    def hardware(self) -> Target:
        """The build target."""
        return Target(self.target, self.compute_capability, self.product)

    def to_json(self) -> dict[str, object]:
        """A JSON object that `read_entry` reads; unknown requirements stay as they were written."""
        found = asdict(replace(self, profiles=()))
        if not found["quantized_states"]:
            del found["quantized_states"]
        return {
            **found,
            "profiles": [profile.to_json() for profile in self.profiles],
            "requires": [to_json(item) for item in self.requires],
        }


@dataclass(frozen=True)
class Manifest:
    """A version of a model.

    content: digest of all inputs; two runs with equal content are the same version.
    spec: the spec with every default filled in.  sources: models and data that engines were built from and measured
    against, name -> digest; stored as blobs.  provenance: what those were made from (spec, weights, data files),
    name -> digest; not stored.  blake3: SHA-256 -> BLAKE3 of blobs that are pulled, where the uploader had the library.
    shards: of engines and sources whose weights lie in files of their own: digest of the file that names them -> digest
    of each -> size in bytes; they are blobs.
    toolchain, host: what built it, where.  metrics: the task metric per precision.
    graphs: of an ensemble, the versions that are its graphs, in the order of the data flow. Its engines are documents
    that name an engine of each (`registry.ensembles`).
    caches: compile caches of torch, each an entry like an engine's; nothing opens them but `enginesmith.warm_start`.
    report: digest of the version's report (JSON).  created_at: ISO 8601, UTC.

    Before it is published a manifest has no version ('') and no engines: see `versions.publish.publish`.
    """

    model: str
    version: str
    created_at: str
    content: str
    spec: Mapping[str, object] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    blake3: Mapping[str, str] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    engines: tuple[EngineEntry, ...] = ()
    report: str | None = None
    format: int = FORMAT
    shards: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    graphs: tuple[PinnedGraph, ...] = ()
    caches: tuple[EngineEntry, ...] = ()

    @property
    def golden(self) -> str:
        """Digest of the golden set. Raises IntegrityError for a version without one."""
        return self._source("golden")

    @property
    def onnx(self) -> str:
        """Digest of the exported model. Raises IntegrityError for a version without one."""
        return self._source("onnx")

    def _source(self, name: str) -> str:
        if (digest := self.sources.get(name)) is None:
            raise IntegrityError(f"{self.model}@{self.version} has no {name} among its sources; build it again")
        return digest

    def to_json(self) -> dict[str, object]:
        """A JSON object, without the digest; without `shards`, `graphs` and `caches` where there are none, as manifests
        were written before those came."""
        found = asdict(replace(self, engines=(), caches=()))
        found |= {name: [entry.to_json() for entry in getattr(self, name)] for name in ("engines", "caches")}
        return {name: value for name, value in found.items() if name not in _LATER or value}

    def is_cache(self, entry: EngineEntry) -> bool:
        """Whether an entry is one of the version's compile caches, and no engine."""
        return any(cache.digest == entry.digest and cache.unit == entry.unit for cache in self.caches)

    def size_of(self, entry: EngineEntry) -> int | None:
        """Size in bytes of an engine's file and its shards; None of a unit without an engine."""
        return entry.size_bytes and entry.size_bytes + sum(self.shards.get(str(entry.digest), {}).values())

    def to_bytes(self) -> bytes:
        """The document as it is stored; equal manifests give equal bytes. Raises Malformed, and ValueError for NaN."""
        document = {**self.to_json(), "digest": self.digest}
        data = canonical_json(document)
        _read(parsing.parse_json(data, MAX_BYTES))
        return data

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's other fields as canonical JSON."""
        return digest_of(self.to_json())

    def with_blake3(self, known: Mapping[str, str | None]) -> "Manifest":
        """A copy with the BLAKE3 of blobs added. known: SHA-256 -> BLAKE3; None values are left out."""
        found = {digest: blake3 for digest, blake3 in known.items() if blake3}
        return replace(self, blake3={**self.blake3, **found})

    def blobs(self) -> dict[str, str]:
        """All blobs that this version refers to: digest -> description."""
        found = {digest: f"source {name}" for name, digest in self.sources.items()}
        for kind, entry in (*(("engine", item) for item in self.engines), *(("cache", item) for item in self.caches)):
            found |= {entry.report: f"report of {entry.unit}"} if entry.report else {}
            found |= {entry.digest: f"{kind} {entry.unit}"} if entry.digest else {}
        for whole, shards in self.shards.items():
            found |= {shard: f"shard of {found.get(whole, whole)}" for shard in shards if shard not in found}
        return found | ({self.report: "report"} if self.report else {})


def parse(data: bytes, *, model: str | None = None, version: str | None = None, place: str = "") -> Manifest:
    """Read a manifest's bytes. place: the path or URI that they were read from, for errors.

    Raises IntegrityError for what is not JSON, was edited, has a newer format or a wrong field; Misplaced if it is of
    another model or version than the given ones.
    """
    where = f"manifest of {model}@{version}" if model else "manifest"
    where += f" ({place})" if place else ""
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        if (found := read(document, "format", parsing.count)) != FORMAT:
            raise IntegrityError(f"{where}: format is {found}; this enginesmith reads {FORMAT}: upgrade enginesmith")
        manifest = _read(document)
        _check_node_names(manifest)
    except Malformed as error:
        raise IntegrityError(f"{where}: {error}; {_REMEDY}" if place else f"{where}: {error}") from error
    if model is not None and (manifest.model, manifest.version) != (model, version):
        raise Misplaced(
            f"{where}: it is that of {manifest.model}@{manifest.version}; it was moved by hand; move it back"
        )
    return manifest


def _read(data: dict[str, object]) -> Manifest:
    stated = read(data, "digest", parsing.digest)
    actual = digest_of({key: value for key, value in data.items() if key != "digest"})
    if stated != actual:
        raise Malformed(f"its digest is {actual}, and it says {stated}: it was edited by hand or damaged")
    manifest = Manifest(
        model=read(data, "model", parsing.name),
        version=read(data, "version", parsing.name),
        created_at=read(data, "created_at", parsing.text),
        content=read(data, "content", parsing.digest),
        spec=read(data, "spec", parsing.mapping),
        sources=read(data, "sources", parsing.mapping_of(parsing.digest)),
        provenance=read(data, "provenance", parsing.mapping_of(parsing.digest)),
        blake3=read(data, "blake3", parsing.mapping_of(parsing.digest)),
        toolchain=read(data, "toolchain", parsing.mapping_of(parsing.text)),
        host=read(data, "host", parsing.mapping),
        metrics=read(data, "metrics", parsing.mapping_of(parsing.mapping_of(parsing.number))),
        engines=read(data, "engines", parsing.many(read_entry)),
        report=read(data, "report", parsing.optional(parsing.digest)),
        shards=read(data, "shards", parsing.mapping_of(fields.read_shards)) if "shards" in data else {},
        graphs=read(data, "graphs", parsing.many(fields.read_graph)) if "graphs" in data else (),
        caches=read(data, "caches", parsing.many(read_entry)) if "caches" in data else (),
    )
    if wrong := next((name for name in manifest.shards if not is_digest(name)), None):
        raise Malformed(f"shards has {wrong[:80]!r}, which is no digest")
    if unknown := set(data) - set(asdict(replace(manifest, engines=(), caches=()))) - {"digest"}:
        raise Malformed(f"{min(unknown)} is a field that format {FORMAT} does not have")
    return manifest


def _check_node_names(manifest: Manifest) -> None:
    """Raise Malformed for functions that are none, and for two graphs or functions of one name, which would have one
    folder."""
    names = [graph.name for graph in manifest.graphs]
    names += [function.name for function in fields.read_functions(manifest.spec, manifest.sources)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Malformed(f"two of its graphs and functions are called {twice!r}")


def read_entry(value: object, path: str) -> EngineEntry:
    """Read an `EngineEntry` that `EngineEntry.to_json` wrote.

    Raises Malformed, also for a usable engine without a file, a report or a processor requirement.
    """
    data = parsing.mapping(value, path)

    def get(name: str, reader: Callable[[object, str], T]) -> T:
        return read(data, name, reader, path)

    entry = EngineEntry(
        target=get("target", parsing.name),
        precision=get("precision", parsing.one_of(*PRECISIONS)),
        backend=get("backend", parsing.name),
        status=get("status", parsing.one_of(*STATUSES)),
        reason=get("reason", parsing.text),
        compute_capability=get("compute_capability", parsing.optional(parsing.pair)),
        product=get("product", parsing.optional(parsing.name)),
        build_key=get("build_key", parsing.optional(parsing.digest)),
        graph=get("graph", parsing.optional(parsing.digest)),
        scales=get("scales", parsing.optional(parsing.digest)),
        digest=get("digest", parsing.optional(parsing.digest)),
        size_bytes=get("size_bytes", parsing.optional(fields.read_size)),
        suffix=get("suffix", parsing.optional(fields.read_suffix)),
        options=get("options", parsing.mapping_of(parsing.scalar)),
        toolchain=get("toolchain", parsing.mapping_of(parsing.text)),
        inputs=get("inputs", parsing.many(fields.read_tensor)),
        outputs=get("outputs", parsing.many(fields.read_tensor)),
        profiles=get("profiles", parsing.many(fields.read_profile)),
        report=get("report", parsing.optional(parsing.digest)),
        checks=get("checks", parsing.mapping_of(parsing.count)),
        requires=get("requires", parsing.many(fields.read_requirement)),
        notes=get("notes", parsing.many(parsing.text)),
        quantized_states=get("quantized_states", parsing.many(_reader_of(QuantizedState)))
        if "quantized_states" in data
        else (),
    )
    facts = {name: getattr(entry, name) for name in ("digest", "size_bytes", "suffix", "report")}
    missing = [name for name, value in facts.items() if value is None]
    if entry.usable and missing:
        raise Malformed(f"{path} ({entry.unit}) is {entry.status} and has no {missing[0]}")
    if entry.usable and not any(isinstance(item, Gpu | Cpu | Unknown) for item in entry.requires):
        raise Malformed(f"{path} ({entry.unit}) is {entry.status} and does not say which processor it requires")
    _check_profiles(entry, path)
    return entry


def _check_profiles(entry: EngineEntry, path: str) -> None:
    """Raise Malformed for a profile with sizes of what is no input, or of another number of axes."""
    axes = {spec.name: len(spec.shape) for spec in entry.inputs}
    for profile in entry.profiles:
        sizes = [(name, shape) for name, *shapes in profile.inputs for shape in shapes]
        if wrong := [name for name, shape in (*sizes, *profile.multiples) if axes.get(name) != len(shape)]:
            raise Malformed(f"{path} ({entry.unit}) has a profile with other axes of {wrong[0][:80]!r} than its input")


def _reader_of(kind: type[T]) -> Callable[[object, str], T]:
    def read(value: object, path: str) -> T:
        try:
            return decode(value, kind)
        except IntegrityError as error:
            raise Malformed(f"{path}: {error}") from error

    return read


def request_of(entry: EngineEntry) -> BuildRequest:
    """The build request that an engine was built from. Raises IntegrityError if it has another build key."""
    request = make_request(entry)
    if request.key != entry.build_key:
        raise IntegrityError(f"{entry.unit}: its build key is {entry.build_key}, its fields give {request.key}")
    return request


def make_request(entry: EngineEntry) -> BuildRequest:
    """A build request from an entry's fields; the entry's build key is not checked."""
    return BuildRequest(
        model=entry.graph or "",
        precision=entry.precision,  # type: ignore[arg-type] # checked by the manifest's parser
        target=entry.hardware,
        backend=entry.backend,
        inputs=entry.inputs,
        outputs=entry.outputs,
        profiles=entry.profiles,
        options=tuple(sorted(entry.options.items())),
        toolchain=tuple(sorted(entry.toolchain.items())),
        quantized_states=entry.quantized_states,
    )
