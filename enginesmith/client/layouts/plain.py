"""The plain layout: the link `current` leads to a folder with one engine and its description.

::

    engines/
      3-8a41c0b2d9e7f631/        one folder a description: digits-3-l4-int8.engine and digits-3-l4-int8.json
      current -> 3-8a41c0b2d9e7f631

A swap is one rename over the link. A server that opens `current/...` gets the old engine or the new one; the old folder
stays for servers that have it open.
"""

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from enginesmith.client.fetch import BlobFetcher
from enginesmith.client.layouts.base import Placed
from enginesmith.client.pull import Pulled, download_best, download_engine, folder_name
from enginesmith.client.resolve import EngineRanking, Resolution
from enginesmith.core.errors import InputError
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import reachable, sync_folder
from enginesmith.registry.versions.lookup import Located

CURRENT = "current"
# The file beside `current` that says why what is served is trusted no longer.
MARK = "distrusted"
_LOCK = ".enginesmith-watch.lock"
_HOOKED = ".enginesmith-hooked"
_STAGING = ".enginesmith-staging-"
_FOLDER = re.compile(r".+-[0-9a-f]{16}")


@dataclass(frozen=True)
class Plain:
    """One engine, and the link `current` to it."""

    several: ClassVar[bool] = False

    def reject(self, entry: EngineEntry) -> str | None:  # noqa: ARG002 - see Layout
        """None: whoever opens it chooses what opens it."""
        return None

    def at(self, dest: Path, model: str) -> "PlainPlace":  # noqa: ARG002 - see Layout
        """The folder itself, which is one model's."""
        return PlainPlace(dest)


@dataclass(frozen=True)
class PlainPlace:
    """A folder with the link `current`."""

    dest: Path

    @property
    def lock(self) -> Path:
        """See `Place`."""
        return self.dest / _LOCK

    @property
    def hooked(self) -> Path:
        """See `Place`."""
        return self.dest / _HOOKED

    @property
    def mark(self) -> Path:
        """See `Place`."""
        return self.dest / MARK

    def served(self) -> str:
        """Where the link points, as it was written; '' where there is none."""
        with suppress(OSError):
            return os.readlink(self.dest / CURRENT)  # noqa: PTH115
        return ""

    def description(self) -> Path | None:
        """The JSON behind the link."""
        return min((self.dest / CURRENT).glob("*.json"), default=None)

    def swap(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """See `Place`: one engine alone."""
        with reachable(f"writing {self.dest}"):
            pulled = download_best(rankings[0], lambda found: self._download(store, located, found, fetcher))
            folder = self.dest / folder_name(located, pulled.engine)
            previous = self._point_to(folder.name)
        os.utime(folder)
        self._prune(folder.name, previous, keep)
        before = previous if previous != folder.name else ""
        swapped, whole = previous != folder.name, not pulled.resolution.lost
        return Placed((pulled,), folder, self.dest / CURRENT, before, swapped, folder.name, whole)

    def _download(self, store: Store, located: Located, resolution: Resolution, fetcher: BlobFetcher) -> Pulled:
        """Download an engine to its folder: a new one appears complete, in an old one what is damaged is replaced."""
        folder = self.dest / folder_name(located, resolution.chosen)
        place = folder if folder.is_dir() else self.dest / f"{_STAGING}{str(resolution.chosen.digest)[:16]}"
        pulled = download_engine(store, located, resolution, place, fetcher)
        if place != folder:
            place.rename(folder)
            sync_folder(self.dest)
        return pulled

    def _point_to(self, name: str) -> str:
        """Point `current` to the folder `name`; return where it pointed before."""
        current, before = self.dest / CURRENT, self.served()
        if before != name:
            if current.is_dir() and not current.is_symlink():
                raise InputError(f"{current} is a folder and no link of ours; give another --dest")
            fresh = self.dest / f".enginesmith-link-{secrets.token_hex(8)}"
            fresh.symlink_to(name)
            fresh.replace(current)
            sync_folder(self.dest)
        return before

    def _prune(self, current: str, previous: str, keep: int) -> None:
        """Delete folders that were served before, but the last `keep` of them."""
        found = [path for path in self.dest.iterdir() if path.is_dir() and not path.is_symlink()]
        served = [path for path in found if _FOLDER.fullmatch(path.name) and path.name != current]
        served.sort(key=lambda path: (path.name == previous, path.stat().st_mtime), reverse=True)
        left = [path for path in found if path.name.startswith(_STAGING)]
        for path in served[keep:] + left:
            shutil.rmtree(path, ignore_errors=True)
