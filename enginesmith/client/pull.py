"""From a reference and a machine to a verified engine on disk, with a JSON description for the server that loads it.

The engine is written first and its description last; each appears whole or not at all, and the description names the
engine's digest. So a server that waits for the description never loads an incomplete engine.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.client.fetch import BlobFetcher, Origin, Wanted
from enginesmith.client.resolve import FALLBACK, EngineRanking, Resolution
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError, IntegrityError, digest_of_bytes, digest_of_file
from enginesmith.core.names import Reference
from enginesmith.core.parsing import parse_json
from enginesmith.core.state import parts_folder, state_ends, states_of, with_int8_states
from enginesmith.registry.manifest import MAX_BYTES, EngineEntry, Manifest, functions_of, make_request, pinned_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import choose_digest, write_whole
from enginesmith.registry.versions.lookup import Located
from enginesmith.serving.padding import padding_of

if TYPE_CHECKING:
    from enginesmith.core.reports.latency import LatencyReport

FORMAT = 1


def folder_name(located: Located, engine: EngineEntry) -> str:
    """The name of the folder of an engine, unique by the digest of its description."""
    description = describe(located, engine, f"{stem_of(located.manifest, engine)}{engine.suffix}")
    return f"{located.manifest.version}-{digest_of_bytes(as_json(description))[:16]}"


def stem_of(manifest: Manifest, engine: EngineEntry) -> str:
    """The file name of an engine and its description, without the suffix; with the backend where the version has
    engines of several for one target and precision."""
    stem = f"{manifest.model}-{manifest.version}-{engine.target}-{engine.precision}"
    beside = (item for item in manifest.engines if item.digest and item.target == engine.target)
    if len({item.backend for item in beside if item.precision == engine.precision}) > 1:
        stem += f"-{engine.backend}"
    return f"{stem}-cache" if manifest.is_cache(engine) else stem


def weights_name(manifest: Manifest, engine: EngineEntry) -> str | None:
    """The file name of the model beside an engine that holds its weights; None where it has them itself."""
    return f"{stem_of(manifest, engine)}.weights.onnx" if engine.is_stripped else None


def shards_of(manifest: Manifest, engine: EngineEntry) -> dict[str, int]:
    """The shards beside an engine, its own and those of the model with its weights: sizes in bytes by digest."""
    weights = manifest.shards.get(str(engine.graph), {}) if engine.is_stripped else {}
    return {**manifest.shards.get(str(engine.digest), {}), **weights}


def as_json(found: Mapping[str, object]) -> bytes:
    """A description as bytes of its file."""
    return (json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def describe(located: Located, engine: EngineEntry, file: str) -> dict[str, object]:
    """What a server needs to load an engine, and the engine's origin, as a JSON object."""
    manifest = located.manifest
    origin = {
        "format": FORMAT,
        "file": file,
        "model": manifest.model,
        "version": manifest.version,
        "channel": located.channel.name if located.channel else None,
        "manifest": manifest.digest,
    }
    weights = weights_name(manifest, engine)
    found: dict[str, object] = {"weights": weights} if weights else {}
    found |= {"kind": "cache"} if manifest.is_cache(engine) else {}
    if shards := shards_of(manifest, engine):
        found["shards"] = sorted(shards)
    request = with_int8_states(make_request(engine))
    if states := states_of(manifest.spec):
        found |= {
            "state": [encode(state) for state in states],
            "ends": state_ends(request.inputs, states, request.profiles),
        }
    if (padding := padding_of(manifest.spec)).inputs:
        found["padding"] = encode(padding)
    if engine.quantized_states:
        engine = replace(engine, inputs=request.inputs, outputs=request.outputs, profiles=request.profiles)
    return origin | found | {key: value for key, value in encode(engine).items() if key != "checks"}


# Of a file of a function's code.
MOST_CODE_BYTES = 16 << 20


@dataclass(frozen=True, repr=False)
class Pulled:
    """An engine on disk. path: the engine.  description: the JSON beside it.  origin: where its bytes came from.

    weights: the ONNX model beside it that holds the weights of an engine whose own file leaves them out.
    latency: the newest report on machines of this kind, where it was looked for (`Client.pull_all`) and is there.
    """

    path: Path
    description: Path
    located: Located
    resolution: Resolution
    origin: Origin
    weights: Path | None = None
    latency: "LatencyReport | None" = None

    def __repr__(self) -> str:
        """One line: the file, what it is of, and its status."""
        version = f"{self.located.manifest.model}@{self.located.manifest.version}"
        return f"Pulled({self.path.name!r}: {self.engine.unit} of {version}, {self.engine.status})"

    @property
    def is_cache(self) -> bool:
        """Whether it is a compile cache (`enginesmith.warm_start`) and no engine."""
        return self.located.manifest.is_cache(self.engine)

    @property
    def cached(self) -> bool:
        """Whether the engine was there already, and intact."""
        return self.origin == "there"

    @property
    def engine(self) -> EngineEntry:
        """The engine that was chosen, with the status it has today."""
        return self.resolution.chosen

    @property
    def warning(self) -> str | None:
        """The warning to show before the engine is used; None when it is proven."""
        if self.engine.status == "proven":
            return None
        if self.engine.target == FALLBACK:
            return f"FALLBACK: no engine of this version fits this machine; this is {self.engine.reason}"
        if not self.engine.is_measured:
            return f"UNPROVEN: {self.engine.unit} is not proven: {self.engine.reason}"
        return (
            f"UNPROVEN: {self.engine.unit} is not proven on this kind of machine ({self.engine.reason}); "
            f"run `enginesmith validate {self.located.manifest.model}@{self.located.manifest.version}` there first"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings to show: better engines that are lost, and `warning`."""
        lost = (f"LOST: {unit}: {reason.removeprefix('lost: ')}" for unit, reason in self.resolution.lost)
        return (*lost, *([self.warning] if self.warning else []))


def download_best(found: EngineRanking, download: Callable[[Resolution], Pulled]) -> Pulled:
    """Call `download` for the best engine; if it raises IntegrityError, for the next one.

    Raises what `download` raises for the last one, and as `EngineRanking.resolution`.
    """
    while True:
        resolution = found.resolution()
        try:
            return download(resolution)
        except IntegrityError as error:
            if len(found.candidates) == 1:
                raise
            found = found.without({str(resolution.chosen.digest): str(error)})


def download_each(
    store: Store, located: Located, found: EngineRanking, dest: Path, fetcher: BlobFetcher
) -> list[Pulled]:
    """Download every compatible engine, best first, each with its latency on machines of this kind.

    Raises as `EngineRanking.resolution`, `download_engine`, and IntegrityError for a damaged latency report.
    """
    from enginesmith.registry.evidence.latencies import measured_latencies

    timed = measured_latencies(located.documents or store, located.manifest, found.machine)
    resolution = found.resolution()
    pulled = [
        download_engine(store, located, replace(resolution, chosen=engine), dest, fetcher)
        for engine in resolution.ranked
    ]
    return [replace(each, latency=timed.get(str(each.engine.digest))) for each in pulled]


def download_engine(
    store: Store,
    located: Located,
    resolution: Resolution,
    dest: Path,
    fetcher: BlobFetcher | None = None,
    *,
    file: str = "",
) -> Pulled:
    """Download the chosen engine into the folder `dest`, verified, with a JSON description beside it.

    An engine without weights of its own gets the model that holds them beside it, and one whose weights lie in shards
    gets these, side by side, before the engine itself. Of an ensemble the engines and functions come into a folder of
    this version, in it a folder for each, before the description of the whole.
    fetcher: None uses this machine's cache, without progress.  file: the engine's name there; '' for one that tells
    model, version, target and precision. Raises IntegrityError for other bytes than were published, UnavailableError
    when registry or disk are out of reach, and InputError where another version's engine has the file's name.
    """
    engine, manifest = resolution.chosen, located.manifest
    fetcher = fetcher or BlobFetcher.for_store(store)
    if manifest.graphs:
        return _download_graphs(store, located, resolution, dest, fetcher)

    def fetch(digest: str, size_bytes: int, path: Path) -> Origin:
        return fetcher.fetch(store, choose_digest(digest, manifest.blake3.get(digest)), size_bytes, path)

    stem = Path(file).stem if file else stem_of(manifest, engine)
    file = file or f"{stem}{engine.suffix}"
    path, description = dest / file, dest / f"{stem}.json"
    _check_owner(description, manifest)
    weights = dest / name if (name := weights_name(manifest, engine)) else None
    beside = shards_of(manifest, engine)
    digests = {shard: choose_digest(shard, manifest.blake3.get(shard)) for shard in beside}
    fetcher.fetch_all(store, [Wanted(digests[shard], size, dest / shard) for shard, size in beside.items()])
    if weights is not None:
        fetch(str(engine.graph), store.size(str(engine.graph)), weights)
    origin = fetch(str(engine.digest), engine.size_bytes or 0, path)
    data = as_json(describe(located, engine, file))
    if origin != "there" or not description.is_file() or description.read_bytes() != data:
        write_whole(description, data)
    return Pulled(path, description, located, resolution, origin, weights)


def _download_graphs(
    store: Store, located: Located, resolution: Resolution, dest: Path, fetcher: BlobFetcher
) -> Pulled:
    whole, graphs, functions, there = resolution.chosen, list[dict[str, object]](), functions_of(located.manifest), True
    path = dest / f"{stem_of(located.manifest, whole)}.json"
    _check_owner(path, located.manifest)
    parts = parts_folder(located.manifest.model, located.manifest.version)
    for graph, manifest, entry in pinned_engines(store, located.manifest, whole):
        # Its status is that of the whole, which is no better than its own.
        engine = replace(entry, status=whole.status, reason=whole.reason)
        own = replace(located, reference=Reference(graph.model, graph.version), manifest=manifest, channel=None)
        part = replace(resolution, chosen=engine, ranked=(engine,))
        pulled = download_engine(store, own, part, dest / parts / graph.name, fetcher)
        there = there and pulled.cached
        file = f"{parts}/{graph.name}/{pulled.description.name}"
        about = {"name": graph.name, "description": file, "digest": entry.digest}
        graphs.append({**about, "sources": dict(graph.sources)})
    for function in functions:
        for file, digest in function.files.items():
            place = dest / parts / function.name / file
            if not place.is_file() or digest_of_file(place) != digest:
                there = False
                write_whole(place, store.read_blob(digest, MOST_CODE_BYTES))
    found = {**describe(located, whole, path.name), "graphs": graphs}
    found |= {"functions": encode(functions)} if functions else {}
    data = as_json(found)
    there = there and path.is_file() and path.read_bytes() == data
    if not there:
        write_whole(path, data)
    return Pulled(path, path, located, resolution, "there" if there else "registry")


def _check_owner(description: Path, manifest: Manifest) -> None:
    """Raise InputError where another version's description has this name: 'a-1' of version 2 and 'a' of '1-2' have."""
    with suppress(OSError, IntegrityError):
        found = parse_json(description.read_bytes(), MAX_BYTES)
        if (found.get("model"), found.get("version")) != (manifest.model, manifest.version):
            raise InputError(f"{description} is of {found.get('model')}@{found.get('version')}; give another folder")
