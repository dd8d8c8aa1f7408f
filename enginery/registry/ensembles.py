"""Versions that are several graphs: the versions that they pin, and the engines that each of their own stands for.

An engine of an ensemble is a blob of JSON that names an engine of each pinned version. So it has a status, a report,
requirements and attestations as any engine has, and is ranked by them.
"""

from collections.abc import Iterator, Mapping

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.ensemble import PinnedGraph
from enginery.core.errors import InputError, IntegrityError
from enginery.core.parsing import Malformed
from enginery.registry.manifest import EngineEntry, Manifest, parse
from enginery.registry.store.base import Store, place_of
from enginery.registry.store.layout import manifest_key

FORMAT = 1
MAX_BYTES = 1 << 20
SUFFIX = ".json"


def require_model(manifest: Manifest) -> None:
    """Raise InputError for an ensemble: of what works on a model of one graph."""
    if manifest.graphs:
        graphs = ", ".join(graph.reference for graph in manifest.graphs)
        where = f"{manifest.model}@{manifest.version}"
        raise InputError(f"{where} is an ensemble, and this works on a model of one graph: give one of {graphs}")


def write_engines(engines: Mapping[str, str]) -> bytes:
    """The document of an ensemble's engine. engines: graph -> digest of its engine."""
    return canonical_json({"format": FORMAT, "engines": dict(engines)})


def read_engines(store: Store, digest: str) -> dict[str, str]:
    """Graph -> digest of its engine, of an ensemble's engine. Raises IntegrityError for a blob that is none."""
    try:
        document = parsing.parse_json(store.read_blob(digest), MAX_BYTES)
        if (stated := parsing.field(document, "format", parsing.count)) != FORMAT:
            raise Malformed(f"format is {stated}; this enginery reads {FORMAT}: upgrade enginery")
        return parsing.field(document, "engines", parsing.mapping_of(parsing.digest))
    except Malformed as error:
        raise IntegrityError(f"engine {digest} of an ensemble: {error}; build it again") from error


def load_pinned(store: Store, graph: PinnedGraph) -> Manifest:
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
    store: Store, manifest: Manifest, entry: EngineEntry
) -> Iterator[tuple[PinnedGraph, Manifest, EngineEntry]]:
    """Each graph of an ensemble's engine with its version and engine. Raises IntegrityError for what is not there."""
    named = read_engines(store, str(entry.digest))
    for graph in manifest.graphs:
        pinned = load_pinned(store, graph)
        engine = next((item for item in pinned.engines if item.digest == named.get(graph.name)), None)
        if engine is None or engine.digest is None:
            raise IntegrityError(f"graph {graph.name!r}: {graph.reference} lacks the engine {named.get(graph.name)}")
        yield graph, pinned, engine
