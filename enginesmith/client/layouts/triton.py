"""Triton's model repository: a folder for each model, with a folder for each version, `warmup/` and `config.pbtxt`.

**A swap is one rename, of `config.pbtxt`.** First the new version's folder is renamed to its place, and last the
configuration, whose `version_policy` names the one served version. Triton reads the configuration before it looks for
versions. So it finds either the old configuration and version, which still exist, or the new ones, which exist already.
In the other order, or with the policy `latest`, Triton could open a version with the configuration of another one. If a
version fails to load, Triton continues to serve the old one.

To Triton, folders with names of digits are versions, unless the name begins with 0. So changes in `00` do not make
Triton load a served version again; changes of other names in the model's folder do. Locks and marks are files beside
the models, because Triton takes every folder there for a model.

Sources: core 73aad7c, `model_repository_manager.cc` (Poll, ModelTimestamp) and `model_lifecycle.cc` (VersionsToLoad,
AsyncLoad).
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from enginesmith.client.layouts import triton_config
from enginesmith.client.layouts.base import Placed, SharedFolder
from enginesmith.client.layouts.protobuf_text import ProtoMessage, parse
from enginesmith.client.pull import BlobFetcher, Origin, Pulled, as_json, describe, download_best, download_engine
from enginesmith.client.resolve import EngineCandidate, EngineRanking, Resolution
from enginesmith.core.errors import InputError, IntegrityError, digest_of
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.core.requirements import Library, numbers
from enginesmith.core.state import PinnedGraph, states_of, with_int8_states
from enginesmith.registry.manifest import EngineEntry, Manifest, functions_of, make_request, pinned_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import (
    BlobDigest,
    make_folder,
    reachable,
    start_atomic_write,
    sync_folder,
    write_whole,
)
from enginesmith.registry.versions.lookup import Located

CONFIG = "config.pbtxt"
STAGING = "00"
WARMUP = "warmup"
_STEM = "model"
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
# Version names that are numbers below this are kept; other names become numbers from this on, below 2^63.
_HASHED = 10**18


def triton_version(version: str) -> int:
    """The number of a version in Triton's repositories: '3' is 3; any other name gives a number of 19 digits from its
    SHA-256. It is the same on all machines and has no order."""
    if re.fullmatch(r"[1-9][0-9]{0,17}", version):
        return int(version)
    return _HASHED + int.from_bytes(hashlib.sha256(version.encode()).digest()[:8], "big") % (8 * _HASHED)


@dataclass(frozen=True)
class Triton:
    """Triton's model repository. batching: None: as in the spec.  warmup: whether Triton first runs golden inputs."""

    several: ClassVar[bool] = True
    remedy: ClassVar[str] = triton_config.REMEDY
    batching: triton_config.DynamicBatching | None = None
    warmup: bool = True

    def reject(self, entry: EngineEntry) -> str | None:
        """The reason why Triton cannot open an engine; None if it can."""
        return triton_config.find_unservable(entry)

    def check(self, manifest: Manifest, entries: Sequence[EngineEntry]) -> None:
        """See `Layout`: raises the errors of `write_config` before any file is written, and InputError for an ensemble
        with functions."""
        if functions := functions_of(manifest):
            raise InputError(
                f"{manifest.reference} has the function {functions[0].name!r} between its graphs, and Triton would not "
                "call it; pull without --layout, and serve it with enginesmith.Ensemble"
            )
        if manifest.graphs:  # each graph is checked when it is written
            return
        files = [triton_config.TritonFile(entry, triton_config.file_suffix(entry)) for entry in entries]
        triton_config.write_config(
            manifest.model, 1, "", files, hints=triton_config.ServingHints.of(manifest), batching=self.batching
        )

    def at(self, dest: Path, model: str) -> "TritonPlace":
        """The model's folder in the repository `dest`."""
        return TritonPlace(dest, model, self)


@dataclass(frozen=True)
class TritonPlace(SharedFolder):
    """A model in a repository. beside: versions that stay served beside the next one."""

    layout: Triton
    beside: tuple[int, ...] = ()

    @property
    def root(self) -> Path:
        """The model's folder."""
        return self.dest / self.model

    def served(self) -> str:
        """The version number in our own configuration; '' without one. Raises InputError for one of another program."""
        return str(next(iter(self._list_served()), ""))

    def _list_served(self) -> tuple[int, ...]:
        """The version numbers in our own configuration: the served one, then one that an ensemble still uses."""
        with suppress(FileNotFoundError):
            config_text = (self.root / CONFIG).read_text(encoding="utf-8")
            try:
                version_numbers = parse(config_text).message("version_policy").message("specific").numbers("versions")
            except ValueError:
                version_numbers = ()
            if not config_text.startswith(triton_config.HEADER) or not version_numbers:
                raise InputError(f"{self.root / CONFIG} was not written by enginesmith; give another --dest")
            return version_numbers
        return ()

    def description(self) -> Path | None:
        """The JSON of the served version."""
        version_number = self.served()
        return min((self.root / version_number).glob("*.json"), default=None) if version_number else None

    def swap(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """See `Place`. Each ranking gives the engine of another compute capability."""
        if located.manifest.graphs:
            return self._swap_ensemble(store, located, rankings, fetcher, keep)
        self.layout.check(located.manifest, [ranking.resolution().chosen for ranking in rankings])
        version_number, served_number = triton_version(located.manifest.version), self.served()
        with self._leaving_nothing(version_number) if not served_number else nullcontext():
            folder, staging_folder = self.root / str(version_number), self.root / STAGING / str(version_number)
            with reachable(f"writing {self.root}"):
                for path in (self.root, self.root / STAGING):
                    make_folder(path)
                pulled_engines = [
                    self._bring(store, located, ranking, fetcher, len(rankings) == 1) for ranking in rankings
                ]
                if staging_folder.is_dir():
                    pulled_engines = [self._gather(engine, staging_folder) for engine in pulled_engines]
                hints = triton_config.ServingHints.of(located.manifest)
                self._bring_labels(store, located.manifest, hints, pulled_engines[0].path.parent, fetcher)
                warmup = self._read_warmup(store, located.manifest, pulled_engines[0].engine, fetcher)
                files = [triton_config.TritonFile(engine.engine, engine.path.name) for engine in pulled_engines]
                config = triton_config.write_config(
                    self.model,
                    version_number,
                    located.manifest.version,
                    files,
                    hints=hints,
                    batching=self.layout.batching,
                    warmup=warmup,
                    libraries=_list_libraries(pulled_engines[0].engine, rankings[0].machine, folder),
                    beside=self.beside,
                )
                is_swapped = self._switch(version_number, served_number, config, pulled_engines[0].engine, warmup, keep)
            identity = digest_of([config, *(str(engine.engine.digest) for engine in pulled_engines)])
            placed_engines = tuple(engine.moved_to(folder) for engine in pulled_engines)
            is_best = not any(engine.resolution.lost for engine in placed_engines)
            previous_number = served_number if served_number != str(version_number) else ""
            return Placed(placed_engines, folder, self.root, previous_number, is_swapped, identity, is_best)

    def _swap_ensemble(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """Write each graph as the model MODEL@GRAPH, and then the ensemble. The graphs' models also serve the versions
        of the earlier ensemble, which answers until Triton has loaded this one: it loads models before ensembles."""
        manifest, chosen = located.manifest, [ranking.resolution() for ranking in rankings]
        self.layout.check(manifest, [resolution.chosen for resolution in chosen])
        version_number, served_number = triton_version(manifest.version), self.served()
        graphs = [*zip(*(pinned_engines(store, manifest, resolution.chosen) for resolution in chosen), strict=True)]
        for versions in graphs:  # before any folder is made
            self.layout.check(versions[0][1], [engine for _, _, engine in versions])
        outputs, configs = {spec.name for spec in chosen[0].chosen.outputs}, list[tuple[PinnedGraph, ProtoMessage]]()
        for versions in graphs:
            (graph, graph_manifest, _), place = versions[0], replace(self, model=f"{self.model}@{versions[0][0].name}")
            graph_version = Located(Reference(graph.model, graph.version), graph_manifest)
            candidates = [(EngineCandidate(engine, "of the ensemble"),) for _, _, engine in versions]
            pairs = zip(rankings, candidates, strict=True)
            graph_rankings = [replace(ranking, candidates=only, rejected=()) for ranking, only in pairs]
            numbers = place._list_served()
            numbers = numbers[1:] if served_number == str(version_number) else numbers[:1]
            beside = tuple(number for number in numbers if number != triton_version(graph.version))
            replace(place, beside=beside).swap(store, graph_version, graph_rankings, fetcher, max(keep, 1))
            configs.append((graph, parse((place.root / CONFIG).read_text(encoding="utf-8"))))
            # A state is an output that the client passes on as an input.
            outputs |= {f"{graph.name}.{state.output}" for state in states_of(graph_manifest.spec)}
        config = triton_config.write_ensemble(self.model, version_number, manifest.version, configs, outputs)
        path = self.root / str(version_number) / f"{_STEM}.json"
        description = as_json(describe(located, chosen[0].chosen, path.name))
        is_there = path.is_file() and path.read_bytes() == description
        with nullcontext() if served_number else self._leaving_nothing(version_number), reachable(f"writing {path}"):
            staging_folder = self.root / STAGING / ("" if is_there else str(version_number))
            staging_folder.mkdir(parents=True, exist_ok=True)
            if not is_there:
                write_whole(staging_folder / path.name, description)
            is_swapped = self._switch(version_number, served_number, config, chosen[0].chosen, None, keep)
            for folder in self.dest.glob(f"{self.model}@*"):
                if folder.name.rpartition("@")[2] not in {graph.name for graph, _ in configs}:
                    shutil.rmtree(folder, ignore_errors=True)
        origin: Origin = "there" if is_there else "registry"
        pulled_engines = tuple(Pulled(path, path, located, resolution, origin) for resolution in chosen)
        identity = digest_of([config, *(str(resolution.chosen.digest) for resolution in chosen)])
        previous_number = served_number if served_number != str(version_number) else ""
        is_best = not any(resolution.lost for resolution in chosen)
        return Placed(pulled_engines, path.parent, self.root, previous_number, is_swapped, identity, is_best)

    @contextmanager
    def _leaving_nothing(self, number: int) -> Iterator[None]:
        """Delete the files of a failed first swap: Triton does not start with a folder without a configuration."""
        try:
            yield
        except BaseException:
            folder = self.root / str(number)
            own_folders = [folder] if any(_is_described(file) for file in folder.glob("*.json")) else []
            for path in (self.root / STAGING, self.root / WARMUP / str(number), *own_folders):
                shutil.rmtree(path, ignore_errors=True)
            for path in (self.root / WARMUP, self.root):
                with suppress(OSError):  # the folder contains other files
                    path.rmdir()
            raise

    def _bring(
        self, store: Store, located: Located, ranking: EngineRanking, fetcher: BlobFetcher, alone: bool
    ) -> Pulled:
        """Download an engine into a folder that no configuration names yet, or repair an existing folder."""

        def download(resolution: Resolution) -> Pulled:
            engine = resolution.chosen
            stem = _STEM if alone else f"{engine.hardware.sm}-{engine.precision}"
            version_number = str(triton_version(located.manifest.version))
            folder = self.root / version_number
            is_described = _read_json(folder / f"{stem}.json").get("digest") == str(engine.digest)
            download_folder = folder if is_described else self.root / STAGING / version_number
            return download_engine(
                store, located, resolution, download_folder, fetcher, file=f"{stem}{triton_config.file_suffix(engine)}"
            )

        return download_best(ranking, download)

    def _bring_labels(
        self, store: Store, manifest: Manifest, hints: triton_config.ServingHints, place: Path, fetcher: BlobFetcher
    ) -> None:
        """Write the class names of outputs beside the engine. Raises as `download_engine`; IntegrityError for lost
        ones."""
        for output in hints.labels:
            digest = manifest.sources.get(triton_config.label_source(output))
            if digest is None:
                raise IntegrityError(f"{manifest.reference} lacks the labels of {output!r}; build it again")
            path = place / Path(triton_config.label_file(triton_version(manifest.version), output, hints)).name
            fetcher.fetch(store, BlobDigest(digest, manifest.blake3.get(digest)), store.size(digest), path)

    def _gather(self, pulled: Pulled, staged: Path) -> Pulled:
        """Link an engine of the served folder into the staged folder, which will replace the served one."""
        if pulled.path.parent == staged:
            return pulled
        for path in pulled.path.parent.iterdir():
            if not (staged / path.name).exists():
                os.link(path, staged / path.name)
        return pulled.moved_to(staged)

    def _read_warmup(
        self, store: Store, manifest: Manifest, engine: EngineEntry, fetcher: BlobFetcher
    ) -> dict[str, triton_config.WarmupInput] | None:
        """Golden inputs; None without warm-up, or if the golden set is too large, lost or has inputs of other types."""
        golden_digest = manifest.sources.get("golden")
        if not self.layout.warmup or golden_digest is None:
            return None
        path = self.root / STAGING / "golden"
        with suppress(IntegrityError):
            size = store.size(golden_digest)
            if size <= triton_config.MOST_BYTES:
                fetcher.fetch(store, BlobDigest(golden_digest, manifest.blake3.get(golden_digest)), size, path)
                return triton_config.read_warmup(path, with_int8_states(make_request(engine)).inputs)
        return None

    def _switch(
        self,
        number: int,
        before: str,
        config: str,
        engine: EngineEntry,
        warmup: dict[str, triton_config.WarmupInput] | None,
        keep: int,
    ) -> bool:
        """Put warm-up files, the version and the configuration in their places, in this order; return whether anything
        changed. First delete earlier versions beyond `keep`: later, that would make Triton load the new one again."""
        staging_folder, folder = self.root / STAGING / str(number), self.root / str(number)
        self._prune(str(number), before, keep)
        if warmup:
            request = with_int8_states(make_request(engine))
            is_batched = triton_config.largest_batch(request) > 0
            make_folder(self.root / WARMUP / str(number))
            for name, content in triton_config.warmup_files(request.inputs, warmup, is_batched).items():
                write_whole(self.root / WARMUP / str(number) / name, content)
        is_new = staging_folder.is_dir()
        if is_new and folder.exists():
            # The served version gets another engine: its folder is missing between two renames. At a poll then, Triton
            # keeps its open engine, reports a failed load, and loads the new one at the next poll.
            folder.rename(self.root / STAGING / f"{number}-old")
        if is_new:
            staging_folder.rename(folder)
            sync_folder(self.root)
        is_changed = self._write_config(config.encode()) or is_new
        shutil.rmtree(self.root / STAGING, ignore_errors=True)
        if is_changed:
            # The clock is ahead of the kernel's time of a rename: this is later than any time that Triton saw.
            update_ns = time.time_ns()
            os.utime(self.root, ns=(update_ns, update_ns))
        return is_changed

    def _write_config(self, data: bytes) -> bool:
        """Replace the configuration by one rename from STAGING, which Triton ignores; return whether it changed."""
        with suppress(OSError):
            if (self.root / CONFIG).read_bytes() == data:
                return False
        with start_atomic_write(self.root / STAGING) as file:
            file.stream.write(data)
            file.commit(self.root / CONFIG)
        return True

    def _prune(self, current: str, before: str, keep: int) -> None:
        """Delete earlier versions except the last `keep` of them; other folders stay."""
        version_folders = [
            path for path in self.root.iterdir() if _NUMBER.fullmatch(path.name) and path.name != current
        ]
        own_folders = [path for path in version_folders if any(_is_described(file) for file in path.glob("*.json"))]
        own_folders.sort(key=lambda path: (path.name == before, path.stat().st_mtime), reverse=True)
        for path in own_folders[keep:]:
            for folder in (path, self.root / WARMUP / path.name):
                shutil.rmtree(folder, ignore_errors=True)


def _list_libraries(engine: EngineEntry, machine: Machine, folder: Path) -> list[str]:
    """The absolute paths of an engine's libraries for a machine: the loader would search for a relative path."""
    platform = machine.platform or f"{sys.platform}-{this_kind().machine}"
    cuda_major = numbers(machine.cuda or "0")[0]
    builds = (library.build_for(platform, cuda_major) for library in engine.requires if isinstance(library, Library))
    return [str(folder.absolute() / build.sha256) for build in builds if build]


def _is_described(path: Path) -> bool:
    """Whether a file is a description that this program wrote."""
    return {"manifest", "digest", "file"} <= _read_json(path).keys()


def _read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file; an empty one if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads(path.read_bytes())
        if isinstance(document, dict):
            return document
    return {}
