"""Versions that are several graphs: the versions that they pin, and the engines that each of their own stands for.

An engine of an ensemble is a blob of JSON that names an engine of each pinned version. So it has a status, a report,
requirements and attestations as any engine has, and is ranked by them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from enginesmith.core.codec import encode, parse_as
from enginesmith.core.constraints import Format
from enginesmith.core.digest import Digest, canonical_json
from enginesmith.core.ensemble import FUNCTION, EnsembleFunction, PinnedGraph, read_functions
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.parsing import Malformed
from enginesmith.registry.manifest import EngineEntry, Manifest, parse
from enginesmith.registry.store.base import Documents, place_of
from enginesmith.registry.store.layout import manifest_key

FORMAT = 1
MAX_BYTES = 1 << 20
SUFFIX = ".json"


def require_model(manifest: Manifest) -> None:
    """Raise InputError for an ensemble: of what works on a model of one graph."""
    if manifest.graphs:
        graphs = ", ".join(graph.reference for graph in manifest.graphs)
        where = f"{manifest.model}@{manifest.version}"
        raise InputError(f"{where} is an ensemble, and this works on a model of one graph: give one of {graphs}")


@dataclass(frozen=True)
class NamedEngine:
    """An engine of a version. unit: as in `EngineEntry.unit`: several units may have an engine of the same bytes."""

    unit: str
    digest: Digest


@dataclass(frozen=True)
class _EnsembleEngine:
    """The document of an ensemble's engine. engines: of its graphs, by name."""

    engines: Mapping[str, NamedEngine]
    format: Annotated[int, Format(FORMAT)] = FORMAT


def function_sources(functions: Iterable[EnsembleFunction]) -> dict[str, str]:
    """The files of functions between graphs, as sources of a manifest."""
    files = ((item.name, file, digest) for item in functions for file, digest in item.files.items())
    return {f"{FUNCTION} {name} {file}": digest for name, file, digest in files}


def functions_of(manifest: Manifest) -> list[EnsembleFunction]:
    """The functions between the graphs of a version. Raises IntegrityError for what describes none."""
    try:
        return read_functions(manifest.spec, manifest.sources)
    except Malformed as error:
        where = f"{manifest.model}@{manifest.version}"
        raise IntegrityError(f"{where}: {error}; build it again") from error


def write_engines(engines: Mapping[str, EngineEntry]) -> bytes:
    """The document of an ensemble's engine. engines: of its graphs, by name."""
    named = {graph: NamedEngine(entry.unit, str(entry.digest)) for graph, entry in engines.items()}
    return canonical_json(encode(_EnsembleEngine(named)))


def read_engines(store: Documents, digest: str) -> Mapping[str, NamedEngine]:
    """The engines of graphs, by name, that an ensemble's engine stands for. Raises IntegrityError for a blob that is
    none."""
    try:
        return parse_as(store.read_blob(digest, MAX_BYTES), MAX_BYTES, _EnsembleEngine).engines
    except Malformed as error:
        raise IntegrityError(f"engine {digest} of an ensemble: {error}; build it again") from error


def load_pinned(store: Documents, graph: PinnedGraph) -> Manifest:
    """The manifest of a graph's version. Raises IntegrityError where that is gone, damaged or another one."""
    key = manifest_key(graph.model, graph.version)
    where = f"graph {graph.name!r} is {graph.reference}"
    if (data := store.read(key)) is None:
        raise IntegrityError(f"{where}, which is not in {store.uri}; restore it, or build the ensemble again")
    manifest = parse(data, model=graph.model, version=graph.version, place=place_of(store, key))
    if manifest.digest != graph.manifest:
        raise IntegrityError(f"{where} with manifest {graph.manifest}, and that is now {manifest.digest}; restore it")
    if manifest.graphs:
        raise IntegrityError(f"{where}, which is an ensemble itself; a graph is a model of one graph")
    return manifest


def pinned_engines(
    store: Documents, manifest: Manifest, entry: EngineEntry
) -> Iterator[tuple[PinnedGraph, Manifest, EngineEntry]]:
    """Each graph of an ensemble's engine with its version and engine. Raises IntegrityError for what is not there."""
    named = read_engines(store, str(entry.digest))
    for graph in manifest.graphs:
        pinned = load_pinned(store, graph)
        wanted = named.get(graph.name)
        engines = {NamedEngine(item.unit, item.digest): item for item in pinned.engines if item.digest}
        if wanted is None or wanted not in engines:
            raise IntegrityError(f"graph {graph.name!r}: {graph.reference} lacks {wanted}; build the ensemble again")
        yield graph, pinned, engines[wanted]
