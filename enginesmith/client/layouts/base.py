"""What a layout is: where the engines of a model lie for a server, and how it is made to open others.

A layout is a value that a caller gives (`Plain()`, `Triton(...)`); `at` binds it to a folder and a model, and the
`Place` that comes of it swaps what is served there. Whatever fails before the last rename changes nothing that a server
reads."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from enginesmith.client.fetch import BlobFetcher
from enginesmith.client.pull import Pulled
from enginesmith.client.resolve import EngineRanking
from enginesmith.core.errors import UnavailableError
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import make_folder, reachable
from enginesmith.registry.versions.lookup import Located


@dataclass(frozen=True)
class Placed:
    """What a server finds. pulled: an engine, or one for each machine.  folder: of the engines.  current: what leads to
    it.  previous: name of the folder before.

    swapped: whether it is another one than before.  identity: differs wherever a server has to open something anew.
    whole: whether each engine is the best that fits, and none of those is lost.
    """

    pulled: tuple[Pulled, ...]
    folder: Path
    current: Path
    previous: str
    swapped: bool
    identity: str
    whole: bool


class Place(Protocol):
    """A model in a folder. lock: the file that its one writer holds.  hooked: tells for what the hook has succeeded.

    mark: is there while what is served is trusted no longer.
    """

    @property
    def lock(self) -> Path: ...  # noqa: D102 - see above
    @property
    def hooked(self) -> Path: ...  # noqa: D102
    @property
    def mark(self) -> Path: ...  # noqa: D102

    def served(self) -> str:
        """The name of what is served; '' for nothing."""
        ...

    def description(self) -> Path | None:
        """The JSON description of what is served; None for nothing, or where it is gone."""
        ...

    def swap(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """Bring the best engine of each ranking, have it served, and delete what was served before but the last `keep`.

        Raises IntegrityError, UnavailableError, UnknownNameError where nothing fits, InputError.
        """
        ...


class Layout(Protocol):
    """How engines lie on disk."""

    several: ClassVar[bool]

    def reject(self, entry: EngineEntry) -> str | None:
        """why a server of this layout cannot open an engine; None if it can."""
        ...

    def at(self, dest: Path, model: str) -> Place:
        """The place of a model in the folder `dest`."""
        ...


def without_rejected(found: EngineRanking, layout: Layout) -> EngineRanking:
    """The ranking without engines that a server of this layout cannot open."""
    reasons = [(item, layout.reject(item.entry)) for item in found.candidates]
    return found.rejecting({str(item.entry.digest): reason for item, reason in reasons if reason})


@contextmanager
def hold(place: Place) -> Iterator[None]:
    """Be the one process that writes at a place. Raises UnavailableError where another one is."""
    folder = place.lock.parent
    with reachable(f"writing {folder}"):
        make_folder(folder)
        lock = place.lock.open("ab")
    with lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"another process watches into {folder}; give another --dest") from error
        yield


# Inode, size in bytes, and the time in ns of the last change of content.
_Facts = tuple[int, int, int]


@dataclass(frozen=True)
class PlacedFiles:
    """The files of what is served, as they were when it was placed. served: its name at that place."""

    served: str
    files: tuple[tuple[Path, _Facts], ...]

    def are_there(self, place: Place) -> bool:
        """Whether the place serves the same, and no file is gone or another. Files that came later do not count."""
        with suppress(OSError):
            return place.served() == self.served and all(_facts(path) == facts for path, facts in self.files)
        return False


def placed_files(place: Place, folder: Path) -> PlacedFiles:
    """What lies in the folder of what a place serves. Raises OSError where that is gone already."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return PlacedFiles(place.served(), tuple((path, _facts(path)) for path in files))


def _facts(path: Path) -> _Facts:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
