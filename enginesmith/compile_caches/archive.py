"""The file of a compile cache: a zip with the recipe and the files of a cache folder of Inductor.

The files hold code: pickles, Python and shared libraries. Nothing here reads them; `unpack` writes them to a folder.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from enginesmith.compile_caches.recipe import CacheRecipe
from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import IntegrityError
from enginesmith.core.text import DAMAGED, check_compression

SUFFIX = ".cache"
MOST_BYTES = 4 << 30
_MOST_MEMBERS = 100_000
_RECIPE, _FILES = "recipe.json", "files/"
_MEMBER = re.compile(rf"{_RECIPE}|{_FILES}(?:[\w-][\w.+-]*/){{0,8}}[\w-][\w.+-]*")
# Locks of running processes.
_LEFT_OUT = "locks"
_DATE = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path, recipe: CacheRecipe, path: Path) -> None:
    """Write the files of a cache folder and the recipe to the zip `path`; equal files give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_member(_RECIPE), json.dumps(encode(recipe), sort_keys=True))
        for file in sorted(_list_files(folder)):
            archive.writestr(_member(f"{_FILES}{file.relative_to(folder).as_posix()}"), file.read_bytes())


def _member(name: str) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name, _DATE)
    found.compress_type = zipfile.ZIP_DEFLATED
    return found


def _list_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and _LEFT_OUT not in file.relative_to(folder).parts:
            yield file


def unpack(data: bytes, folder: Path) -> CacheRecipe:
    """The recipe of a cache file, whose cached files are written into the empty `folder`.

    Raises IntegrityError for what is no such file: a cut one, other members, a path that leads elsewhere, too large.
    """
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            check_compression(archive)
            _check_members(archive)
            recipe = decode(parsing.load_json(archive.read(_RECIPE)), CacheRecipe)
            for item in archive.infolist():
                if item.filename != _RECIPE:
                    place = folder / item.filename.removeprefix(_FILES)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(item))
    except DAMAGED as error:
        raise IntegrityError(f"it is no compile cache: {error}; pull it again, or build it again") from error
    return recipe


def _check_members(archive: zipfile.ZipFile) -> None:
    items = archive.infolist()
    names = [item.filename for item in items]
    if wrong := next((name for name in names if not _MEMBER.fullmatch(name)), None):
        raise IntegrityError(f"it holds {wrong[:80]!r}, which no compile cache does; do not load it")
    if _RECIPE not in names or len({*names}) != len(names) or len(names) > _MOST_MEMBERS:
        raise IntegrityError("it has no recipe, a file twice, or too many files; do not load it")
    if sum(item.file_size for item in items) > MOST_BYTES:
        raise IntegrityError(f"its files take more than {MOST_BYTES >> 30} GiB; do not load it")
