"""The folder that a site is written into: pages that changed, each as a whole, and what is known of those that lie
there.

Beside the pages lies `.enginesmith-site/`: for each model the digest of what its pages were drawn from. A page is drawn
again when that digest changed, and written when its bytes did. Pages are deleted last, so that a run that is killed
leaves links that lead somewhere; the next run goes on from what was noted.

A page is renamed into its place and not synced, since it can be drawn again. `keep` syncs all of them together and then
writes what is noted of them: after a loss of power nothing is noted of a page that the disk does not have.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.errors import InputError
from enginesmith.core.names import is_path
from enginesmith.registry.store.files import reachable, start_atomic_write, sweep, sync_folder

STATE = ".enginesmith-site"
_OVERVIEW = "registry.json"
_HALF_WRITTEN = "new"
_MOST_SYNCED = 64
FORMAT = 1


@dataclass(frozen=True)
class Page:
    """A file of the site. path: relative to the site's folder.  key: digest of all that it is drawn from; '' draws it
    each time.  draw: makes its bytes."""

    path: str
    key: str
    draw: Callable[[], bytes]


@dataclass
class Written:
    """What a run did. written: files whose bytes changed.  drawn: pages that were drawn.  deleted: files."""

    written: int = 0
    drawn: int = 0
    deleted: int = 0


class SiteFolder:
    """The folder of a site. Raises InputError for one that holds other things."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done = Written()
        # Notes that are not on disk yet, by file name; None: to be deleted.
        self._notes: dict[str, Mapping[str, object] | None] = {}
        self._unsynced: list[Path] = []
        with reachable(f"reading {root}"):
            if root.exists() and not root.is_dir():
                raise InputError(f"{root} is no folder; give one for the site")
            if root.is_dir() and any(root.iterdir()) and not (root / STATE).is_dir():
                raise InputError(f"{root} holds other files and no site of Enginesmith; give an empty or a new folder")

    def read_overview(self) -> dict[str, dict[str, object]]:
        """What the last run noted of each model; empty where there is nothing that can be read."""
        found = self._read_state(_OVERVIEW)
        models = found.get("models") if found.get("format") == FORMAT else None
        known = models.items() if isinstance(models, dict) else ()
        return {name: note for name, note in known if isinstance(note, dict) and isinstance(note.get("key"), str)}

    def sweep(self) -> None:
        """Delete what killed runs left half written."""
        with reachable(f"reading {self.root}"):
            sweep(self.root / STATE / _HALF_WRITTEN)

    def keep(self, models: Mapping[str, Mapping[str, object]]) -> None:
        """Sync the pages that were written, then note them, and what is known of each model."""
        notes = {**self._notes, _OVERVIEW: {"format": FORMAT, "models": models}}
        new = {name: json.dumps(found, separators=(",", ":")).encode() for name, found in notes.items() if found}
        changed = {name: data for name, data in new.items() if data != self._read_bytes(name)}
        if changed:
            _sync(self._unsynced)
        for name, data in changed.items():
            self._write(f"{STATE}/{name}", data)
        with reachable(f"deleting notes in {self.root / STATE}"):
            for name in notes.keys() - new.keys():
                (self.root / STATE / name).unlink(missing_ok=True)
        self._notes, self._unsynced = {}, []

    def update(self, group: str, pages: Iterable[Page]) -> list[str]:
        """Draw the pages of a group whose key changed, write those whose bytes did, and return the paths of the group's
        pages that are no longer among them, for `delete`."""
        before = self._keys(group)
        after: dict[str, list[str]] = {}
        for page in pages:
            known = before.get(page.path)
            if known and page.key and known[0] == page.key and (self.root / page.path).is_file():
                after[page.path] = known
                continue
            data = page.draw()
            self.done.drawn += 1
            digest = digest_of_bytes(data)
            if not known or known[1] != digest or not (self.root / page.path).is_file():
                self._write(page.path, data)
                self.done.written += 1
                self._unsynced.append(self.root / page.path)
            after[page.path] = [page.key, digest]
        gone = [path for path in before if path not in after]
        # Those that are to be deleted stay noted until they are.
        if after != before:
            self._notes[f"{group}.json"] = {"format": FORMAT, "pages": {**before, **after}}
        return gone

    def pages_of(self, group: str) -> list[str]:
        """The paths of a group's pages."""
        return list(self._keys(group))

    def delete(self, group: str, paths: Iterable[str]) -> None:
        """Delete pages of a group, and forget them; folders that become empty, too."""
        gone = set(paths)
        with reachable(f"deleting pages of {self.root}"):
            for path in gone:
                place = self.root / path
                place.unlink(missing_ok=True)
                self.done.deleted += 1
                for folder in place.parents:
                    if folder == self.root or any(folder.iterdir()):
                        break
                    folder.rmdir()
        left = {path: known for path, known in self._keys(group).items() if path not in gone}
        self._notes[f"{group}.json"] = {"format": FORMAT, "pages": left} if left else None

    def _keys(self, group: str) -> dict[str, list[str]]:
        found = self._read_state(f"{group}.json")
        pages = found.get("pages") if found.get("format") == FORMAT else None
        if not isinstance(pages, dict):
            return {}
        return {path: known for path, known in pages.items() if is_path(path) and isinstance(known, list)}

    def _read_state(self, name: str) -> Mapping[str, object]:
        if name in self._notes:
            return self._notes[name] or {}
        try:
            found = json.loads(self._read_bytes(name) or b"")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, path: str, data: bytes) -> None:
        """Write a file that appears whole or not at all, without a sync. What a killed run leaves of one lies beside
        the notes, where no copy of the site takes it along."""
        half_written, place = self.root / STATE / _HALF_WRITTEN, self.root / path
        with reachable(f"writing {place}"):
            if not half_written.is_dir():
                half_written.mkdir(parents=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            with start_atomic_write(half_written) as file:
                file.stream.write(data)
                file.stream.flush()
                file.path.replace(place)

    def _read_bytes(self, name: str) -> bytes | None:
        try:
            return (self.root / STATE / name).read_bytes()
        except OSError:
            return None


def _sync(paths: Sequence[Path]) -> None:
    """Sync files to the disk: few one by one, many by one sync of everything, which waits for other programs' too."""
    if len(paths) > _MOST_SYNCED:
        os.sync()
        return
    with reachable("syncing pages"):
        for path in paths:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        for folder in {path.parent for path in paths}:
            sync_folder(folder)
