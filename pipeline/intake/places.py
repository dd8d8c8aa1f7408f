"""Folders and `s3://` prefixes that people put files into: specs of a catalog, recorded traffic.

No registries: nothing here writes, and nothing is promised about what lies there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from builders.execution.workdir import workdir
from enginery.core.errors import InputError, UnavailableError
from enginery.core.names import inside
from enginery.registry.store.atomic_write import make_folder, reachable, start_atomic_write
from pipeline.intake.bundle import MOST_BYTES

MOST_OBJECTS = 100_000


class Place(Protocol):
    """A place whose files can be had as local ones."""

    @property
    def folder(self) -> Path:
        """Where they are."""
        ...

    def refresh(self) -> None:
        """Make `folder` hold what the place holds now. Raises UnavailableError, InputError for too much."""
        ...

    def has(self, name: str) -> bool:
        """Whether a file is there now; none is fetched for that. Raises UnavailableError."""
        ...


@dataclass(frozen=True)
class Here:
    """A folder of this machine, used as it is."""

    folder: Path

    def refresh(self) -> None:
        """Look that it is there. Raises UnavailableError."""
        if not self.folder.is_dir():
            raise UnavailableError(f"{self.folder} is not a folder, or not there; make it, or name another one")

    def has(self, name: str) -> bool:
        """See `Place.has`."""
        self.refresh()
        return (self.folder / name).is_file()


@dataclass
class Bucket:
    """A copy of what lies under an `s3://` prefix. Only what changed is fetched again."""

    uri: str
    folder: Path
    most_bytes: int = MOST_BYTES
    _known: dict[str, str] = field(default_factory=dict)

    def refresh(self) -> None:
        """Fetch what is new, delete what is gone."""
        from enginery.registry.store.s3.listing import objects_below
        from enginery.registry.store.s3.place import parse_place

        place = parse_place(self.uri)
        found = {item.name: item for item in objects_below(place) if _good(item.name)}
        size = sum(item.size for item in found.values())
        if len(found) > MOST_OBJECTS or size > self.most_bytes:
            raise InputError(
                f"{place.locator('')} holds {len(found)} objects with {size} bytes; at most {MOST_OBJECTS} with "
                f"{self.most_bytes} are copied: name a prefix of its own for the specs"
            )
        for name in self._known.keys() - found.keys():
            (self.folder / name).unlink(missing_ok=True)
            del self._known[name]
        for name, item in found.items():
            if self._known.get(name) != item.tag:
                self._fetch(name)
                self._known[name] = item.tag

    def has(self, name: str) -> bool:
        """See `Place.has`."""
        from enginery.registry.store.s3.listing import objects_below
        from enginery.registry.store.s3.place import parse_place

        return any(item.name == name for item in objects_below(parse_place(self.uri)))

    def _fetch(self, name: str) -> None:
        from enginery.registry.store.s3.place import parse_place
        from enginery.registry.store.s3.reading import stream_blob
        from enginery.registry.store.s3.retries import Declined

        path = self.folder / name
        with reachable(f"writing {path}"):
            make_folder(path.parent)
            with start_atomic_write(path.parent) as file:
                try:
                    stream_blob(parse_place(self.uri), name, file.stream)
                except Declined as error:
                    raise UnavailableError(f"{self.uri}: {name} went away while it was read; look again") from error
                file.commit(path)


@contextmanager
def place_at(text: str) -> Iterator[Place]:
    """The place that a path, `file://` or `s3://` URI names; a copy is gone afterwards. Raises InputError."""
    if text.startswith("s3://"):
        with workdir() as folder:
            yield Bucket(text, folder / "copy")
        return
    if "://" not in text:
        yield Here(Path(text).expanduser())
        return
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"{text[:200]!r} is not a place; give a folder, file:///folder or s3://bucket/prefix")
    yield Here(Path(unquote(parts.path)))


def files_below(folder: Path) -> Iterator[Path]:
    """Regular files in a folder and below, sorted; hidden files and folders are left out."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


def _good(name: str) -> bool:
    """Whether an object's name can be a file below a folder; what cannot is passed over."""
    try:
        inside(name)
    except ValueError:
        return False
    return not name.endswith("/")
