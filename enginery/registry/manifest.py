"""The manifest: one immutable document that says everything about a version, and by digest where its bytes are.

Its bytes are canonical JSON that carries the digest of all the rest, so that an edit by hand is found when it is read.
Whatever is read from it (names, digests, sizes) is checked before anything uses it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from enginery.core import parsing
from enginery.core.digest import canonical_json, digest_of
from enginery.core.errors import IntegrityError
from enginery.core.names import is_name
from enginery.core.parsing import Malformed
from enginery.core.parsing import field as read
from enginery.core.types import CPU_KIND, PRECISIONS, Scalar, Shape, ShapeProfile, Target, TensorSpec

FORMAT = 1
MAX_BYTES = 16 << 20
_REMEDY = (
    "restore it from a copy; or build again, which publishes another version (change the spec's own, if it has one), "
    "then delete this file and run `enginery gc`"
)


class Misplaced(IntegrityError):  # noqa: N818 - says what the manifest is
    """A sound manifest of another model or version than the place it was found at."""


Status = Literal["proven", "unproven", "failed", "refused"]
STATUSES: tuple[str, ...] = get_args(Status)
USABLE = ("proven", "unproven")


@dataclass(frozen=True)
class EngineEntry:
    """One unit of a version: an engine that can be pulled, or why there is none.

    status: 'proven' (ran on its hardware and passed), 'unproven' (never ran there), 'failed', 'refused'.
    reason: what stands behind the status, in words.  build_key: digest of the build request.
    graph: digest of the ONNX model it was compiled from.  scales: digest of the calibrated ranges behind an int8 one.
    digest, size_bytes, suffix: the engine's file; None without one.  report: digest of its validation report.
    checks: how many passed and failed.  notes: what the compiler or a cast said that a person should know.
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
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The unit's short name, as in `BuildRequest.unit`."""
        return f"{self.target} {self.precision} {self.backend}"

    @property
    def usable(self) -> bool:
        """Whether there is an engine that may be pulled."""
        return self.status in USABLE

    @property
    def cpu(self) -> str | None:
        """The kind of CPU that a CPU engine was built for, and proven on if its status says so; None for a GPU's."""
        return self.toolchain.get(CPU_KIND)

    @property
    def hardware(self) -> Target:
        """The target as a value."""
        return Target(self.target, self.compute_capability, self.product)


@dataclass(frozen=True)
class Manifest:
    """A version of a model.

    content: digest of everything that went in; two runs with equal content are the same version.
    spec: the spec with every default filled in.  sources: what was compiled and measured against, name -> digest; kept
    as blobs.  provenance: what those were made from (spec, weights, data files), name -> digest; not kept.
    blake3: of blobs that are pulled, SHA-256 -> BLAKE3, where whoever uploaded them had the library.
    toolchain, host: what built it, where.  metrics: the task metric per precision.
    report: digest of the version's report (JSON).  created_at: ISO 8601, UTC.

    Before it is published a manifest has no version ('') and no engines: see `versions.publish.publish`.
    """

    model: str
    version: str
    created_at: str
    content: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    blake3: Mapping[str, str] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[EngineEntry, ...] = ()
    report: str | None = None
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """A JSON object, without the digest."""
        return asdict(self)

    def to_bytes(self) -> bytes:
        """The document as it is stored; the same manifest always gives the same bytes. Raises Malformed, ValueError."""
        document = {**self.to_json(), "digest": self.digest}
        data = canonical_json(document)
        parse(data)
        return data

    @cached_property
    def digest(self) -> str:
        """Digest of the manifest: of everything but this digest itself."""
        return digest_of(self.to_json())

    def with_blake3(self, known: Mapping[str, str | None]) -> "Manifest":
        """The manifest with the BLAKE3 of blobs, by their digests; None is left out."""
        found = {digest: blake3 for digest, blake3 in known.items() if blake3}
        return replace(self, blake3={**self.blake3, **found})

    def blobs(self) -> dict[str, str]:
        """Every blob this version needs: digest -> what it is."""
        found = {digest: f"source {name}" for name, digest in self.sources.items()}
        for entry in self.engines:
            found |= {entry.report: f"report of {entry.unit}"} if entry.report else {}
            found |= {entry.digest: f"engine {entry.unit}"} if entry.digest else {}
        return found | ({self.report: "report"} if self.report else {})


def parse(data: bytes, *, model: str | None = None, version: str | None = None, place: str = "") -> Manifest:
    """Read a manifest's bytes. place: the path or URI that they were read from, for errors.

    Raises IntegrityError: not JSON, edited, a newer format, a field that is wrong, or (when given) another model or
    version than the place it was found at.
    """
    where = f"manifest of {model}@{version}" if model else "manifest"
    where += f" ({place})" if place else ""
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        if (found := read(document, "format", parsing.count)) != FORMAT:
            raise IntegrityError(f"{where}: format is {found}; this enginery reads {FORMAT}: upgrade enginery")
        manifest = _read(document)
    except Malformed as error:
        raise IntegrityError(f"{where}: {error}; {_REMEDY}" if place else f"{where}: {error}") from error
    if model is not None and (manifest.model, manifest.version) != (model, version):
        raise Misplaced(
            f"{where}: it is that of {manifest.model}@{manifest.version}; it was moved by hand; move it back"
        )
    return manifest


def _read(data: dict[str, Any]) -> Manifest:
    _check_digest(data)
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
        metrics=read(data, "metrics", parsing.mapping),
        engines=read(data, "engines", parsing.many(read_entry)),
        report=read(data, "report", parsing.optional(parsing.digest)),
    )
    if unknown := set(data) - set(asdict(replace(manifest, engines=()))) - {"digest"}:
        raise Malformed(f"{min(unknown)} is a field that format {FORMAT} does not have")
    return manifest


def _check_digest(data: Mapping[str, Any]) -> None:
    stated = read(data, "digest", parsing.digest)
    actual = digest_of({key: value for key, value in data.items() if key != "digest"})
    if stated != actual:
        raise Malformed(f"its digest is {actual}, and it says {stated}: it was edited by hand or damaged")


def read_entry(value: Any, path: str) -> EngineEntry:
    """Read an `EngineEntry` that `asdict` wrote. Raises Malformed."""
    data = parsing.mapping(value, path)

    def get(name: str, reader: Any) -> Any:
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
        size_bytes=get("size_bytes", parsing.optional(parsing.count)),
        suffix=get("suffix", parsing.optional(_suffix)),
        options=get("options", parsing.mapping_of(parsing.scalar)),
        toolchain=get("toolchain", parsing.mapping_of(parsing.text)),
        inputs=get("inputs", parsing.many(_tensor)),
        outputs=get("outputs", parsing.many(_tensor)),
        profiles=get("profiles", parsing.many(_profile)),
        report=get("report", parsing.optional(parsing.digest)),
        checks=get("checks", parsing.mapping_of(parsing.count)),
        notes=get("notes", parsing.many(parsing.text)),
    )
    _check_usable(entry, path)
    return entry


def _check_usable(entry: EngineEntry, path: str) -> None:
    """A usable engine has a file and a report; without either nobody could pull or trust it."""
    facts = {name: getattr(entry, name) for name in ("digest", "size_bytes", "suffix", "report")}
    missing = [name for name, value in facts.items() if value is None]
    if entry.usable and missing:
        raise Malformed(f"{path} ({entry.unit}) is {entry.status} and has no {missing[0]}")


def _suffix(value: Any, path: str) -> str:
    found = parsing.text(value, path)
    if not (found.startswith(".") and is_name(found[1:]) and len(found) <= 32):
        raise Malformed(f"{path} is {found[:80]!r}; it must be a file suffix such as '.engine'")
    return found


def _tensor(value: Any, path: str) -> TensorSpec:
    data = parsing.mapping(value, path)
    shape = read(data, "shape", parsing.many(_size), path)
    return TensorSpec(read(data, "name", parsing.text, path), read(data, "dtype", parsing.text, path), shape)


def _size(value: Any, path: str) -> int | str:
    return parsing.text(value, path) if isinstance(value, str) else parsing.count(value, path)


def _profile(value: Any, path: str) -> ShapeProfile:
    return ShapeProfile(read(parsing.mapping(value, path), "inputs", parsing.many(_ranges), path))


def _ranges(value: Any, path: str) -> tuple[str, Shape, Shape, Shape]:
    items = parsing.many(lambda item, _: item)(value, path)
    if len(items) != 4:
        raise Malformed(f"{path} has {len(items)} items; it must have a name and three shapes")
    low, opt, high = (parsing.many(parsing.count)(item, path) for item in items[1:])
    return parsing.text(items[0], path), low, opt, high
