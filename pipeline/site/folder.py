"""The folder that a site is written into: pages that changed, each as a whole, and what is known of those that lie
there.

Beside the pages lies `.enginery-site/`: for each model the digest of what its pages were drawn from. A page is drawn
again when that digest changed, and written when its bytes did. Pages are deleted last, so that a run that is killed
leaves links that lead somewhere; the next run goes on from what was noted.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import InputError
from enginery.registry.store.files import reachable, write_whole

STATE = ".enginery-site"
_OVERVIEW = "registry.json"
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
        with reachable(f"reading {root}"):
            if root.exists() and not root.is_dir():
                raise InputError(f"{root} is no folder; give one for the site")
            if root.is_dir() and any(root.iterdir()) and not (root / STATE).is_dir():
                raise InputError(f"{root} holds other files and no site of Enginery; give an empty or a new folder")

    def read_overview(self) -> dict[str, dict[str, object]]:
        """What the last run noted of each model; empty where there is nothing that can be read."""
        found = self._read_state(_OVERVIEW)
        models = found.get("models") if found.get("format") == FORMAT else None
        return models if isinstance(models, dict) else {}

    def write_overview(self, models: Mapping[str, Mapping[str, object]]) -> None:
        """Note what is known of each model."""
        self._write_state(_OVERVIEW, {"format": FORMAT, "models": models})

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
                write_whole(self.root / page.path, data)
                self.done.written += 1
            after[page.path] = [page.key, digest]
        gone = [path for path in before if path not in after]
        # Those that are to be deleted stay noted until they are.
        if after != before:
            self._write_state(f"{group}.json", {"format": FORMAT, "pages": {**before, **after}})
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
        if left:
            self._write_state(f"{group}.json", {"format": FORMAT, "pages": left})
        else:
            (self.root / STATE / f"{group}.json").unlink(missing_ok=True)

    def _keys(self, group: str) -> dict[str, list[str]]:
        found = self._read_state(f"{group}.json")
        pages = found.get("pages") if found.get("format") == FORMAT else None
        if not isinstance(pages, dict):
            return {}
        return {path: known for path, known in pages.items() if _is_inside(path) and isinstance(known, list)}

    def _read_state(self, name: str) -> dict[str, object]:
        path = self.root / STATE / name
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write_state(self, name: str, document: Mapping[str, object]) -> None:
        write_whole(self.root / STATE / name, json.dumps(document, separators=(",", ":")).encode())


def _is_inside(path: str) -> bool:
    """Whether a noted path leads to nowhere outside of the site."""
    return all(part not in ("", "..", ".") for part in path.split("/"))
