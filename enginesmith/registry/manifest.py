"""The manifest: one immutable document that describes a version and names its blobs by digest; and ensembles."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, get_args

from annotated_types import Interval, Predicate, doc

from enginesmith.core.codec import decode, document_error, encode, explain_damage, parse_as
from enginesmith.core.errors import Digest, InputError, IntegrityError, canonical_json, digest_of
from enginesmith.core.names import Name, is_suffix
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.requirements import Count, Cpu, Format, Gpu, JsonObject, Requirement, Unknown, Weights
from enginesmith.core.state import FUNCTION, EnsembleFunction, PinnedGraph, read_functions
from enginesmith.core.types import (
    CPU_KIND,
    BuildRequest,
    Precision,
    QuantizedState,
    Scalar,
    ShapeProfile,
    Target,
    TensorSpec,
)
from enginesmith.registry.store.base import Documents, place_of
from enginesmith.registry.store.layout import MAX_BLOB_BYTES, manifest_key

# The manifest: one immutable document that describes a version and names its blobs by digest.
#
# It is canonical JSON with the digest of its other fields, so that an edit by hand is detected when it is read. All
# names, digests and sizes are checked before they are used. `request_of` gives the build request of a published engine.

FORMAT = 1
MAX_BYTES = 16 << 20
_REMEDY = (
    "restore it from a copy; or build again, which publishes another version (if the spec sets a version, change it), "
    "then delete this file and run `enginesmith registry gc`"
)
Suffix = Annotated[str, Predicate(is_suffix), doc("a file suffix such as '.engine'")]
BlobSize = Annotated[int, Interval(ge=0, le=MAX_BLOB_BYTES), doc(f"a size of at most {MAX_BLOB_BYTES} bytes")]
# An int or a float, unconverted: the digest is of the text.
Number = Annotated[int | float, Interval(ge=-sys.float_info.max, le=sys.float_info.max), doc("a finite number")]


class Misplaced(IntegrityError):  # noqa: N818 - named after the manifest's state
    """A valid manifest whose model or version does not match its key."""


Status = Literal["proven", "proven on random inputs", "unproven", "failed", "refused"]
ON_RANDOM: Status = "proven on random inputs"
STATUSES: tuple[Status, ...] = get_args(Status)
USABLE = ("proven", "proven on random inputs", "unproven")


@dataclass(frozen=True)
class EngineEntry:
    """One unit of a version: an engine that can be pulled, or the reason why there is none.

    status: 'proven' (ran on its hardware and passed), 'proven on random inputs' (the same without golden data),
    'unproven' (never ran there, or `is_measured` is False), 'failed', 'refused'.
    reason: of the status, as text.  build_key: digest of the build request.
    graph: digest of the ONNX model it was compiled from.  scales: digest of the calibrated ranges of an int8 engine.
    digest, size_bytes, suffix: the engine's file; None without one.  report: digest of its validation report.
    checks, sqnr_db: `Report.counts` and `Report.sqnr_db`.  requires: requirements on a machine that runs it.
    notes: messages of the compiler or a cast for users.
    quantized_states: as in `BuildRequest`.
    """

    target: Name
    precision: Precision
    backend: Name
    status: Status
    reason: str = ""
    compute_capability: tuple[Count, Count] | None = None
    product: Name | None = None
    build_key: Digest | None = None
    graph: Digest | None = None
    scales: Digest | None = None
    digest: Digest | None = None
    size_bytes: BlobSize | None = None
    suffix: Suffix | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    profiles: tuple[ShapeProfile, ...] = ()
    report: Digest | None = None
    checks: Mapping[str, Count] = field(default_factory=lambda: {"passed": 0, "failed": 0})
    sqnr_db: float | None = None
    requires: tuple[Requirement, ...] = ()
    notes: tuple[str, ...] = ()
    quantized_states: tuple[QuantizedState, ...] = ()

    @property
    def unit(self) -> str:
        """The unit's short name, as in `BuildRequest.unit`."""
        return f"{self.target} {self.precision} {self.backend}"

    @property
    def usable(self) -> bool:
        """Whether the unit has an engine that may be pulled: proven (also on random inputs) or unproven."""
        return self.status in USABLE

    @property
    def is_measured(self) -> bool:
        """Whether each of its checks measured something; if not, no run can prove it without other golden data."""
        return not self.checks.get("not_measured")

    @property
    def is_stripped(self) -> bool:
        """Whether the engine's file has no weights, so that the ONNX model is needed too."""
        return any(isinstance(requirement, Weights) for requirement in self.requires)

    @property
    def cpu(self) -> str | None:
        """The kind of CPU that a CPU engine was built for, and its status is about; None for a GPU engine."""
        return self.toolchain.get(CPU_KIND)

    @property
    def hardware(self) -> Target:
        """The build target."""
        return Target(self.target, self.compute_capability, self.product)

    def check_fields(self) -> None:
        """Raise Malformed for a usable engine without a file, a report or a processor requirement, and for a profile
        with an unknown input or a wrong number of axes."""
        missing_fields = [name for name in ("digest", "size_bytes", "suffix", "report") if getattr(self, name) is None]
        if self.usable and missing_fields:
            raise Malformed(f"{self.unit} is {self.status} and has no {missing_fields[0]}")
        if self.usable and not any(isinstance(requirement, Gpu | Cpu | Unknown) for requirement in self.requires):
            raise Malformed(f"{self.unit} is {self.status} and does not say which processor it requires")
        axes = {spec.name: len(spec.shape) for spec in self.inputs}
        for profile in self.profiles:
            input_shapes = [(name, shape) for name, *shapes in profile.inputs for shape in shapes]
            if wrong_inputs := [
                name for name, shape in (*input_shapes, *profile.multiples) if axes.get(name) != len(shape)
            ]:
                raise Malformed(f"{self.unit} has a profile with other axes of {wrong_inputs[0][:80]!r} than its input")


@dataclass(frozen=True)
class Manifest:
    """A version of a model.

    content: digest of all inputs; two runs with equal content are the same version.
    spec: the spec with every default filled in.  sources: models and data that engines were built from and measured
    against, name -> digest; stored as blobs.  provenance: origins of these (spec, weights, data files), name -> digest;
    not stored.  blake3: SHA-256 -> BLAKE3 of blobs that are pulled, if the uploader had the library.
    shards: for engines and sources whose weights lie in their own files: digest of the file that names them -> digest
    of each -> size in bytes; they are blobs.
    toolchain, host: versions and machine of the build.  metrics: the task metric per precision.
    graphs: for an ensemble, the versions that are its graphs, in the order of the data flow. Its engines are documents
    that name an engine of each graph.
    report: digest of the version's report (JSON).  created_at: ISO 8601, UTC.

    Before publication a manifest has no version ('') and no engines: see `versions.publish.publish`.
    """

    model: Name
    version: Name
    created_at: str
    content: Digest
    spec: JsonObject = field(default_factory=dict)
    sources: Mapping[str, Digest] = field(default_factory=dict)
    provenance: Mapping[str, Digest] = field(default_factory=dict)
    blake3: Mapping[str, Digest] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    host: JsonObject = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    engines: tuple[EngineEntry, ...] = ()
    report: Digest | None = None
    format: Annotated[int, Format(FORMAT)] = FORMAT
    shards: Mapping[Digest, Mapping[Digest, BlobSize]] = field(default_factory=dict)
    graphs: tuple[PinnedGraph, ...] = ()

    @property
    def reference(self) -> str:
        """'model@version'."""
        return f"{self.model}@{self.version}"

    @property
    def golden(self) -> str:
        """Digest of the golden set. Raises IntegrityError if the version has none."""
        return self._source("golden")

    @property
    def onnx(self) -> str:
        """Digest of the exported model. Raises IntegrityError if the version has none."""
        return self._source("onnx")

    def _source(self, name: str) -> str:
        if (digest := self.sources.get(name)) is None:
            raise IntegrityError(f"{self.reference} has no {name} among its sources; build it again")
        return digest

    def size_of(self, entry: EngineEntry) -> int | None:
        """Size in bytes of an engine's file and its shards; None for a unit without an engine."""
        return entry.size_bytes and entry.size_bytes + sum(self.shards.get(str(entry.digest), {}).values())

    def to_bytes(self) -> bytes:
        """The document as it is stored; equal manifests give equal bytes. Raises Malformed."""
        manifest_bytes = canonical_json({**encode(self), "digest": self.digest})
        _read(manifest_bytes)
        return manifest_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's other fields as canonical JSON."""
        return digest_of(encode(self))

    def with_blake3(self, blake3_by_sha256: Mapping[str, str | None]) -> "Manifest":
        """A copy with the BLAKE3 of blobs added. blake3_by_sha256: SHA-256 -> BLAKE3; None values are left out."""
        blake3_digests = {digest: blake3 for digest, blake3 in blake3_by_sha256.items() if blake3}
        return replace(self, blake3={**self.blake3, **blake3_digests})

    def blobs(self) -> dict[str, str]:
        """All blobs that this version refers to: digest -> description."""
        blob_roles = {digest: f"source {name}" for name, digest in self.sources.items()}
        for entry in self.engines:
            blob_roles |= {entry.report: f"report of {entry.unit}"} if entry.report else {}
            blob_roles |= {entry.digest: f"engine {entry.unit}"} if entry.digest else {}
        for whole_digest, shards in self.shards.items():
            blob_roles |= {
                shard: f"shard of {blob_roles.get(whole_digest, whole_digest)}"
                for shard in shards
                if shard not in blob_roles
            }
        return blob_roles | ({self.report: "report"} if self.report else {})


def parse(data: bytes, *, model: str | None = None, version: str | None = None, place: str = "") -> Manifest:
    """Parse a manifest. place: the path or URI that it was read from, for errors.

    Raises IntegrityError if it is no JSON, was edited, has a newer format or a wrong field; Misplaced if it is of
    another model or version than the given ones.
    """
    document_name = f"manifest of {model}@{version}" if model else "manifest"
    document_name += f" ({place})" if place else ""
    try:
        manifest = _read(data)
        graph_names = [graph.name for graph in manifest.graphs]
        graph_names += [function.name for function in read_functions(manifest.spec, manifest.sources)]
        if duplicate := next((name for name in graph_names if graph_names.count(name) > 1), None):
            raise Malformed(f"two of its graphs and functions are called {duplicate!r}")
    except Malformed as error:
        raise document_error(document_name, error, _REMEDY if place else "") from error
    if model is not None and (manifest.model, manifest.version) != (model, version):
        raise Misplaced(f"{document_name}: it belongs to {manifest.reference}: it was moved by hand; move it back")
    return manifest


def _read(data: bytes) -> Manifest:
    document = parse_json(data, MAX_BYTES)
    stated_digest = document.pop("digest", None)
    manifest = decode(document, Manifest, "")
    if stated_digest != (digest := digest_of(document)):
        raise Malformed(
            f"its digest is {digest}, but it states {stated_digest!r:.80}: it was edited by hand or damaged"
        )
    vars(manifest)["digest"] = digest  # of the document, as `digest` would compute it
    return manifest


def request_of(entry: EngineEntry) -> BuildRequest:
    """The build request that an engine was built from. Raises IntegrityError if its build key differs."""
    request = make_request(entry)
    if request.key != entry.build_key:
        raise IntegrityError(f"{entry.unit}: its build key is {entry.build_key}, but its fields give {request.key}")
    return request


def make_request(entry: EngineEntry) -> BuildRequest:
    """A build request from an entry's fields; the entry's build key is not checked."""
    return BuildRequest(
        model=entry.graph or "",
        precision=entry.precision,
        target=entry.hardware,
        backend=entry.backend,
        inputs=entry.inputs,
        outputs=entry.outputs,
        profiles=entry.profiles,
        options=tuple(sorted(entry.options.items())),
        toolchain=tuple(sorted(entry.toolchain.items())),
        quantized_states=entry.quantized_states,
    )


# Ensembles: the versions that they pin, and the graphs' engines that each of their engines consists of.
#
# An engine of an ensemble is a blob of JSON that names an engine of each pinned version. So it has a status, a report,
# requirements and attestations like other engines, and is ranked by them.

ENSEMBLE_FORMAT = 1
MAX_ENSEMBLE_BYTES = 1 << 20
SUFFIX = ".json"


def require_model(manifest: Manifest) -> None:
    """Raise InputError for an ensemble, which commands for one graph cannot handle."""
    if manifest.graphs:
        graph_list = ", ".join(graph.reference for graph in manifest.graphs)
        raise InputError(
            f"{manifest.reference} is an ensemble, and this works on a model of one graph: give one of {graph_list}"
        )


@dataclass(frozen=True)
class NamedEngine:
    """An engine of a version. unit: as in `EngineEntry.unit`, because several units may have identical engines."""

    unit: str
    digest: Digest


@dataclass(frozen=True)
class _EnsembleEngine:
    """The document of an ensemble's engine. engines: of its graphs, by name."""

    engines: Mapping[str, NamedEngine]
    format: Annotated[int, Format(ENSEMBLE_FORMAT)] = ENSEMBLE_FORMAT


def function_sources(functions: Iterable[EnsembleFunction]) -> dict[str, str]:
    """The files of functions between graphs, as sources of a manifest."""
    files = ((function.name, file, digest) for function in functions for file, digest in function.files.items())
    return {f"{FUNCTION} {name} {file}": digest for name, file, digest in files}


def functions_of(manifest: Manifest) -> list[EnsembleFunction]:
    """The functions between the graphs of a version. Raises IntegrityError for an invalid description."""
    with explain_damage(manifest.reference, "build it again"):
        return read_functions(manifest.spec, manifest.sources)


def write_engines(engines: Mapping[str, EngineEntry]) -> bytes:
    """The document of an ensemble's engine. engines: of its graphs, by name."""
    named_engines = {graph: NamedEngine(entry.unit, str(entry.digest)) for graph, entry in engines.items()}
    return canonical_json(encode(_EnsembleEngine(named_engines)))


def read_engines(store: Documents, digest: str) -> Mapping[str, NamedEngine]:
    """The engines by graph in the document of an ensemble's engine. Raises IntegrityError for another blob."""
    with explain_damage(f"engine {digest} of an ensemble", "build it again"):
        return parse_as(store.read_blob(digest, MAX_ENSEMBLE_BYTES), MAX_ENSEMBLE_BYTES, _EnsembleEngine).engines


def load_pinned(store: Documents, graph: PinnedGraph) -> Manifest:
    """The manifest of a graph's version. Raises IntegrityError if it is missing, damaged or another one."""
    key = manifest_key(graph.model, graph.version)
    graph_text = f"graph {graph.name!r} is {graph.reference}"
    if (manifest_bytes := store.read(key)) is None:
        raise IntegrityError(f"{graph_text}, which is not in {store.uri}; restore it, or build the ensemble again")
    manifest = parse(manifest_bytes, model=graph.model, version=graph.version, place=place_of(store, key))
    if manifest.digest != graph.manifest:
        raise IntegrityError(
            f"{graph_text} with manifest {graph.manifest}, but the manifest is now {manifest.digest}; restore it"
        )
    if manifest.graphs:
        raise IntegrityError(f"{graph_text}, which is an ensemble; an ensemble cannot contain an ensemble")
    return manifest


def pinned_engines(
    store: Documents, manifest: Manifest, entry: EngineEntry
) -> Iterator[tuple[PinnedGraph, Manifest, EngineEntry]]:
    """Each graph of an ensemble's engine with its version and engine. Raises IntegrityError if one is missing."""
    named_engines = read_engines(store, str(entry.digest))
    for graph in manifest.graphs:
        pinned_manifest = load_pinned(store, graph)
        engine_digest = named_engines.get(graph.name)
        engines = {NamedEngine(e.unit, e.digest): e for e in pinned_manifest.engines if e.digest}
        if engine_digest is None or engine_digest not in engines:
            raise IntegrityError(
                f"graph {graph.name!r}: {graph.reference} lacks {engine_digest}; build the ensemble again"
            )
        yield graph, pinned_manifest, engines[engine_digest]
