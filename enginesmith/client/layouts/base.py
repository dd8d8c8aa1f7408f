"""The protocol of layouts, the plain layout, and the engines of a version that a layout can open."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from enginesmith.client.locate import judge_located, rank_located
from enginesmith.client.pull import BlobFetcher, Pulled, download_best, download_engine, folder_name, with_attachments
from enginesmith.client.resolve import EngineRanking, Policy, Resolution
from enginesmith.core.errors import InputError, UnavailableError, UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.registry.manifest import EngineEntry, Manifest, pinned_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import make_folder, reachable, sync_folder
from enginesmith.registry.versions.lookup import Located

# A layout determines where a model's engines are on disk, and how a server is switched to other engines.
#
# Callers pass a layout as a value (`Plain()`, `Triton(...)`). `at` binds it to a folder and a model, and returns
# a `Place`, which swaps the engines served there. A failure before the last rename changes no file that a server reads.


@dataclass(frozen=True)
class Placed:
    """The result of a swap. pulled: an engine, or one for each machine.  folder: of the engines.  current: the path
    that leads to this folder.  previous: name of the earlier folder.

    swapped: whether the folder changed.  identity: changes whenever a server must open a file again.
    whole: whether each engine is the best that fits; False if a better one is lost.
    """

    pulled: tuple[Pulled, ...]
    folder: Path
    current: Path
    previous: str
    swapped: bool
    identity: str
    whole: bool


# Files in the folder beside the served engine: the writer's lock; the identity of the engine for which the hook
# succeeded; the reason why the served engine is no longer trusted.
PlaceFile = Literal["lock", "hooked", "distrusted"]


class Place(Protocol):
    """A model in a folder."""

    def file(self, kind: PlaceFile) -> Path:
        """Path of a file of this place."""

    def served(self) -> str:
        """The name of the served engine; '' if none is served."""

    def description(self) -> Path | None:
        """The JSON description of the served engine; None if none is served, or the file is missing."""

    def swap(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """Download the best engine of each ranking, switch to it, and delete earlier engines except the last `keep`.

        Raises IntegrityError, UnavailableError, UnknownNameError if no engine fits, InputError.
        """


class Layout(Protocol):
    """A layout of engines on disk."""

    several: ClassVar[bool]
    remedy: ClassVar[str]

    def reject(self, entry: EngineEntry) -> str | None:
        """The reason why a server of this layout cannot open an engine; None if it can."""

    def check(self, manifest: Manifest, entries: Sequence[EngineEntry]) -> None:
        """Raise InputError for engines that this layout cannot contain together, or not with its options."""
        ...

    def at(self, dest: Path, model: str) -> Place:
        """The place of a model in the folder `dest`."""


@contextmanager
def hold(place: Place) -> Iterator[None]:
    """Hold the lock of a place, so that only one process writes there. Raises UnavailableError if another holds it."""
    path = place.file("lock")
    folder = path.parent
    with reachable(f"writing {folder}"):
        make_folder(folder)
        lock_file = path.open("ab")
    with lock_file:
        try:
            fcntl.flock(lock_file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"another process already pulls into {folder}; give another --dest") from error
        yield


# Inode, size in bytes, and the time in ns of the last change of content.
_Facts = tuple[int, int, int]


@dataclass(frozen=True)
class PlacedFiles:
    """The state of the served engine's files when they were placed. served: the engine's name at that place."""

    served: str
    files: tuple[tuple[Path, _Facts], ...]

    def are_there(self, place: Place) -> bool:
        """Whether the place serves the same engine, and no file is missing or changed; new files do not count."""
        with suppress(OSError):
            return place.served() == self.served and all(_facts(path) == file_stat for path, file_stat in self.files)
        return False


def placed_files(place: Place, folder: Path) -> PlacedFiles:
    """The files in the folder of the served engine. Raises OSError if the folder is missing."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return PlacedFiles(place.served(), tuple((path, _facts(path)) for path in files))


def _facts(path: Path) -> _Facts:
    file_stat = path.stat()
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns


@dataclass(frozen=True)
class SharedFolder:
    """The files that a `Place` keeps beside a model, in a folder that other models also use."""

    dest: Path
    model: str

    def file(self, kind: PlaceFile) -> Path:
        """See `Place`."""
        return self.dest / f".enginesmith-{self.model}.{kind}"


# The plain layout: the link `current` leads to a folder with one engine and its description, '3-8a41c0b2d9e7f631'.
#
# A swap is one rename over the link. A server that opens `current/...` gets the old engine or the new one; the old
# folder stays for servers that have it open.

CURRENT = "current"
# The file beside `current` with the reason why the served engine is no longer trusted.
MARK = "distrusted"
_FILES: Mapping[PlaceFile, str] = {
    "lock": ".enginesmith-watch.lock", "hooked": ".enginesmith-hooked", "distrusted": MARK,
}  # fmt: skip
_STAGING = ".enginesmith-staging-"
_FOLDER = re.compile(r".+-[0-9a-f]{16}")


@dataclass(frozen=True)
class Plain:
    """One engine, and the link `current` to it."""

    several: ClassVar[bool] = False
    remedy: ClassVar[str] = ""

    def reject(self, entry: EngineEntry) -> str | None:  # noqa: ARG002 - see Layout
        """None: this layout works for every server."""
        return None

    def check(self, manifest: Manifest, entries: Sequence[EngineEntry]) -> None:
        """See `Layout`. There is nothing to check, since the layout holds one engine."""

    def at(self, dest: Path, model: str) -> "PlainPlace":  # noqa: ARG002 - see Layout
        """The place is the folder itself, which holds one model."""
        return PlainPlace(dest)


@dataclass(frozen=True)
class PlainPlace:
    """A folder with the link `current`."""

    dest: Path

    def file(self, kind: PlaceFile) -> Path:
        """See `Place`."""
        return self.dest / _FILES[kind]

    def served(self) -> str:
        """The target of the link, unresolved; '' without a link."""
        with suppress(OSError):
            return os.readlink(self.dest / CURRENT)  # noqa: PTH115
        return ""

    def description(self) -> Path | None:
        """The JSON description in the folder that the link leads to."""
        return min((self.dest / CURRENT).glob("*.json"), default=None)

    def swap(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """See `Place`; one engine only."""
        with reachable(f"writing {self.dest}"):
            pulled_engine = download_best(
                rankings[0], lambda resolution: self._download(store, located, resolution, fetcher)
            )
            folder = self.dest / folder_name(located, pulled_engine.engine)
            pulled_engine = with_attachments(pulled_engine, store, rankings[0], folder, fetcher)
            previous_name = self._point_to(folder.name)
        os.utime(folder)
        # Of the folders that were served before, the last `keep` stay.
        folders = [path for path in self.dest.iterdir() if path.is_dir() and not path.is_symlink()]
        old_folders = [path for path in folders if _FOLDER.fullmatch(path.name) and path.name != folder.name]
        old_folders.sort(key=lambda path: (path.name == previous_name, path.stat().st_mtime), reverse=True)
        staging_folders = [path for path in folders if path.name.startswith(_STAGING)]
        for path in old_folders[keep:] + staging_folders:
            shutil.rmtree(path, ignore_errors=True)
        replaced_name = previous_name if previous_name != folder.name else ""
        is_swapped, is_best = previous_name != folder.name, not pulled_engine.resolution.lost
        return Placed((pulled_engine,), folder, self.dest / CURRENT, replaced_name, is_swapped, folder.name, is_best)

    def _download(self, store: Store, located: Located, resolution: Resolution, fetcher: BlobFetcher) -> Pulled:
        """Download an engine to its folder. A new folder appears atomically; an existing one is repaired."""
        folder = self.dest / folder_name(located, resolution.chosen)
        download_folder = folder if folder.is_dir() else self.dest / f"{_STAGING}{str(resolution.chosen.digest)[:16]}"
        pulled_engine = download_engine(store, located, resolution, download_folder, fetcher)
        if download_folder != folder:
            download_folder.rename(folder)
            sync_folder(self.dest)
        return pulled_engine

    def _point_to(self, name: str) -> str:
        """Point `current` to the folder `name`; return where it pointed before."""
        link, previous_name = self.dest / CURRENT, self.served()
        if previous_name != name:
            if link.is_dir() and not link.is_symlink():
                raise InputError(f"{link} is a folder, not a link that enginesmith made; give another --dest")
            new_link = self.dest / f".enginesmith-link-{secrets.token_hex(8)}"
            new_link.symlink_to(name)
            new_link.replace(link)
            sync_folder(self.dest)
        return previous_name


class AllGenerations(Enum):
    """A value instead of machines: every compute capability that a version has an engine for."""

    ALL = "all"


ALL_GENERATIONS = AllGenerations.ALL


def rank_each(
    store: Store,
    located: Located,
    machines: Sequence[Machine] | AllGenerations,
    policy: Policy,
    layout: Layout,
    *,
    sure: bool = True,
) -> tuple[Located, list[EngineRanking]]:
    """The version, and for each machine the ranking of its engines. sure: as in `rank_located`.

    Raises as `rank_located`, UnknownNameError if all generations are wanted and no engine is for a GPU, and InputError
    for several machines in a layout for one.
    """
    if isinstance(machines, AllGenerations):  # one machine for each capability that a usable engine is built for
        _, entries = judge_located(store, located, policy)
        capabilities = {entry.compute_capability for entry in entries if entry.usable and entry.compute_capability}
        if not capabilities:
            raise UnknownNameError(f"{located.manifest.reference} has no engine for a GPU; name a target")
        machines = [Machine(capability) for capability in sorted(capabilities)]
    if len(machines) > 1 and not layout.several:
        raise InputError("this layout holds the engine of one target; give --layout triton, or name one target")
    rankings = [rank_located(store, located, machine, policy, sure=sure) for machine in machines]
    manifest = rankings[0][0].manifest

    def reject(entry: EngineEntry) -> str | None:
        graphs = pinned_engines(store, manifest, entry) if manifest.graphs and layout.remedy else ()
        reasons = (
            f"graph {graph.name!r}: {reason}" for graph, _, engine in graphs if (reason := layout.reject(engine))
        )
        return layout.reject(entry) or next(reasons, None)

    return rankings[0][0], [ranking.rejecting(reject, layout.remedy) for _, ranking in rankings]
