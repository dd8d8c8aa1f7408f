"""From a reference and a machine to a verified engine on disk, with a JSON description for the server that loads it.

The engine is written first and its description last; each appears whole or not at all, and the description names the
engine's digest. So a server that waits for the description never loads an incomplete engine.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from enginery.client.fetch import BlobFetcher, Origin, Wanted
from enginery.client.locate import VersionLocator
from enginery.client.resolve import FALLBACK, EngineRanking, Policy, Resolution, rank_engines
from enginery.core.codec import encode
from enginery.core.digest import digest_of_bytes
from enginery.core.errors import IntegrityError
from enginery.core.hardware.machine import Machine
from enginery.core.names import Reference
from enginery.core.reports.latency import LatencyReport
from enginery.core.requirements import SessionOption
from enginery.core.sampling import as_built, sampling_states
from enginery.core.state import state_ends, states_of
from enginery.registry.ensembles import functions_of, pinned_engines
from enginery.registry.evidence.attestations import judge_entries
from enginery.registry.evidence.latencies import measured_latencies, measured_speeds
from enginery.registry.manifest import EngineEntry, Manifest, make_request
from enginery.registry.store.base import Store
from enginery.registry.store.files import choose_digest, write_whole
from enginery.registry.trust import require
from enginery.registry.trust.requirement import UntrustedError
from enginery.registry.versions.lookup import Located, find_lost_engines
from enginery.serving.padding import padding_of

FORMAT = 1


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
    latency: LatencyReport | None = None

    def __repr__(self) -> str:
        """One line: the file, what it is of, and its status."""
        version = f"{self.located.manifest.model}@{self.located.manifest.version}"
        return f"Pulled({self.path.name!r}: {self.engine.unit} of {version}, {self.engine.status})"

    @property
    def is_cache(self) -> bool:
        """Whether it is a compile cache (`enginery.warm_start`) and no engine."""
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
        return (
            f"UNPROVEN: {self.engine.unit} is not proven on this kind of machine ({self.engine.reason}); "
            f"run `enginery validate {self.located.manifest.model}@{self.located.manifest.version}` there first"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings to show: better engines that are lost, and `warning`."""
        lost = (f"LOST: {unit}: {reason.removeprefix('lost: ')}" for unit, reason in self.resolution.lost)
        return (*lost, *([self.warning] if self.warning else []))


def locate_and_rank(
    store: Store,
    reference: Reference,
    machine: Machine,
    policy: Policy,
    locator: VersionLocator | None = None,
    *,
    sure: bool = True,
) -> tuple[Located, EngineRanking]:
    """Resolve a reference and rank its engines for a machine; engines whose blobs are lost are rejected.

    locator: None is one without a cache.  sure: whether to look for the blobs, one request each, though a download of
    the best engine would show that it is lost; always done in a folder, where a look costs nothing.
    Reads no engine. Raises UnknownNameError, IntegrityError, and UntrustedError without the signatures that the trust
    policy requires.
    """
    located = (locator or VersionLocator(store, checked=True)).locate(reference)
    return rank_located(store, located, machine, policy, sure=sure)


def rank_located(
    store: Store, located: Located, machine: Machine, policy: Policy, *, sure: bool = True
) -> tuple[Located, EngineRanking]:
    """`locate_and_rank` of a version that is located already."""
    located, entries = judge_located(store, located, policy)
    documents = located.documents or store
    policy = replace(policy, proven_only=policy.proven_only or located.proven_only)
    what = f"{located.manifest.model}@{located.manifest.version}"
    timed = partial(measured_speeds, documents, located.manifest, machine)
    found = rank_engines(entries, machine, policy, what, timed)
    if not (sure or store.near or located.manifest.graphs):
        return located, found
    lost = find_lost_engines(store, [candidate.entry for candidate in found.candidates])
    reasons = {digest: str(loss) for digest, loss in lost.items()}
    if located.manifest.graphs:
        sound = [item.entry for item in found.candidates if item.entry.digest not in lost]
        reasons |= _find_lost_graphs(store, located.manifest, sound)
    return located, found.without(reasons)


def _find_lost_graphs(store: Store, manifest: Manifest, entries: Sequence[EngineEntry]) -> dict[str, str]:
    """Engines of an ensemble of which an engine of a graph is lost: digest -> which, and why."""
    found: dict[str, str] = {}
    for entry in entries:
        engines = {str(item.digest): (graph.name, item) for graph, _, item in pinned_engines(store, manifest, entry)}
        for digest, loss in find_lost_engines(store, [item for _, item in engines.values()]).items():
            found[str(entry.digest)] = f"graph {engines[digest][0]!r}: {loss}"
    return found


def locate_engines(store: Store, reference: Reference, policy: Policy) -> tuple[Located, tuple[EngineEntry, ...]]:
    """Resolve a reference to its version and engines with their current status; raises as `locate_and_rank`."""
    return judge_located(store, VersionLocator(store, checked=True).locate(reference), policy)


def judge_located(store: Store, located: Located, policy: Policy) -> tuple[Located, tuple[EngineEntry, ...]]:
    """A located version with its signers, and its engines with their current status.

    Where a snapshot has not the signatures that the trust policy requires, the registry is asked for newer ones.
    """
    try:
        return _judge(store, located, policy)
    except UntrustedError:
        if located.documents is None:
            raise
        return _judge(store, replace(located, documents=None), policy)


def _judge(store: Store, located: Located, policy: Policy) -> tuple[Located, tuple[EngineEntry, ...]]:
    documents = located.documents or store
    vouched = require(documents, located.manifest, policy.trust)
    judged = located.manifest
    if policy.kind == "cache":
        judged = replace(judged, engines=judged.caches)
    entries: tuple[EngineEntry, ...] = judge_entries(documents, judged, vouched.counts)
    if policy.fallback == "onnx":
        entries = (*entries, *_fallback(store, located.manifest))
    return replace(located, signed_by=vouched.signers), entries


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
    gets these, side by side, before the engine itself. Engines of an ensemble's graphs come into folders of their
    names, before the description of the whole.
    fetcher: None uses this machine's cache, without progress.  file: the engine's name there; '' for one that tells
    model, version, target and precision. Raises IntegrityError for other bytes than were published, UnavailableError
    when registry or disk are out of reach.
    """
    engine, manifest = resolution.chosen, located.manifest
    fetcher = fetcher or BlobFetcher.for_store(store)
    if manifest.graphs:
        return _download_graphs(store, located, resolution, dest, fetcher)

    def fetch(digest: str, size_bytes: int, path: Path) -> Origin:
        return fetcher.fetch(store, choose_digest(digest, manifest.blake3.get(digest)), size_bytes, path)

    weights = dest / name if (name := _weights_name(manifest, engine)) else None
    beside = {**manifest.shards.get(str(engine.digest), {})}
    if weights is not None:
        beside |= manifest.shards.get(str(engine.graph), {})
    digests = {shard: choose_digest(shard, manifest.blake3.get(shard)) for shard in beside}
    fetcher.fetch_all(store, [Wanted(digests[shard], size, dest / shard) for shard, size in beside.items()])
    if weights is not None:
        fetch(str(engine.graph), store.size(str(engine.graph)), weights)
    stem = Path(file).stem if file else stem_of(manifest, engine)
    file = file or f"{stem}{engine.suffix}"
    path, description = dest / file, dest / f"{stem}.json"
    origin = fetch(str(engine.digest), engine.size_bytes or 0, path)
    data = _as_json(describe(located, engine, file))
    if origin != "there" or not description.is_file() or description.read_bytes() != data:
        write_whole(description, data)
    return Pulled(path, description, located, resolution, origin, weights)


def _download_graphs(
    store: Store, located: Located, resolution: Resolution, dest: Path, fetcher: BlobFetcher
) -> Pulled:
    whole, graphs, there = resolution.chosen, list[dict[str, object]](), True
    for graph, manifest, entry in pinned_engines(store, located.manifest, whole):
        # Its status is that of the whole, which is no better than its own.
        engine = replace(entry, status=whole.status, reason=whole.reason)
        own = replace(located, reference=Reference(graph.model, graph.version), manifest=manifest, channel=None)
        part = replace(resolution, chosen=engine, ranked=(engine,))
        pulled = download_engine(store, own, part, dest / graph.name, fetcher)
        there = there and pulled.cached
        file = f"{graph.name}/{pulled.description.name}"
        graphs.append({"name": graph.name, "description": file, "sources": dict(graph.sources)})
    path = dest / f"{stem_of(located.manifest, whole)}.json"
    found = {**describe(located, whole, path.name), "graphs": graphs}
    if functions := functions_of(located.manifest):
        found["functions"] = encode(functions)
        for function in functions:
            for file, digest in function.files.items():
                place = dest / function.name / file
                place.parent.mkdir(parents=True, exist_ok=True)
                there = (
                    fetcher.fetch(store, choose_digest(digest, None), store.size(digest), place) == "there" and there
                )
    data = _as_json(found)
    there = there and path.is_file() and path.read_bytes() == data
    if not there:
        write_whole(path, data)
    return Pulled(path, path, located, resolution, "there" if there else "registry")


def folder_name(located: Located, engine: EngineEntry) -> str:
    """The name of the folder of an engine, unique by the digest of its description."""
    description = describe(located, engine, f"{stem_of(located.manifest, engine)}{engine.suffix}")
    return f"{located.manifest.version}-{digest_of_bytes(_as_json(description))[:16]}"


def stem_of(manifest: Manifest, engine: EngineEntry) -> str:
    """The file name of an engine and its description, without the suffix."""
    stem = f"{manifest.model}-{manifest.version}-{engine.target}-{engine.precision}"
    return f"{stem}-cache" if manifest.is_cache(engine) else stem


def _weights_name(manifest: Manifest, engine: EngineEntry) -> str | None:
    return f"{stem_of(manifest, engine)}.weights.onnx" if engine.is_stripped else None


def _as_json(found: Mapping[str, object]) -> bytes:
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
    weights = _weights_name(manifest, engine)
    found: dict[str, object] = {"weights": weights} if weights else {}
    found |= {"kind": "cache"} if manifest.is_cache(engine) else {}
    if shards := manifest.shards.get(str(engine.digest)):
        found["shards"] = sorted(shards)
    request = as_built(make_request(engine))
    if states := (*states_of(manifest.spec), *sampling_states(engine.sampling)):
        found |= {
            "state": [encode(state) for state in states],
            "ends": state_ends(request.inputs, states, request.profiles),
        }
    if (padding := padding_of(manifest.spec)).inputs:
        found["padding"] = encode(padding)
    if engine.sampling or engine.quantized_states:
        engine = replace(engine, inputs=request.inputs, outputs=request.outputs, profiles=request.profiles)
    if options := {item.name: item.value for item in engine.requires if isinstance(item, SessionOption)}:
        found["session_options_without_vnni"] = options
    return origin | found | {key: value for key, value in engine.to_json().items() if key != "checks"}


def _fallback(store: Store, manifest: Manifest) -> tuple[EngineEntry, ...]:
    """The version's ONNX model as if it were an engine."""
    digest = manifest.sources.get("onnx")
    if digest is None:
        return ()
    described = next((entry for entry in manifest.engines if entry.inputs), None)
    return (
        EngineEntry(
            target=FALLBACK,
            precision="fp32",
            backend="onnxruntime",
            status="unproven",
            reason="the model as it was exported; no engine, and not tried on this machine",
            digest=digest,
            size_bytes=store.stored_size(digest),
            suffix=".onnx",
            inputs=described.inputs if described else (),
            outputs=described.outputs if described else (),
        ),
    )
