"""Whether what was placed for a server still lies there: what somebody deleted or overwrote is found by a few stats."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginesmith.client.layouts.base import Place

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
