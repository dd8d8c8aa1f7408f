"""The file of a compile cache: what goes in comes out, and nothing else is written anywhere."""

import zipfile
from pathlib import Path

import pytest

from enginesmith.compile_caches.archive import pack, unpack
from enginesmith.compile_caches.recipe import CacheRecipe, CompileOptions
from enginesmith.core.errors import IntegrityError

RECIPE = CacheRecipe(CompileOptions(dynamic={"x": (0,)}), "cpu", 2, {"Net": "a" * 64}, {"w": "float32 [2]"})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "inductor"
    for name in ("ab/kernel.main.so", "fxgraph/cd/key/graph", "locks/kernel.lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    pack(folder, RECIPE, tmp_path / "net.cache")
    return tmp_path / "net.cache"


def unpacked(data: bytes, folder: Path) -> CacheRecipe:
    folder.mkdir()
    return unpack(data, folder)


def test_what_is_packed_comes_out_without_locks(cache: Path, tmp_path: Path) -> None:
    assert unpacked(cache.read_bytes(), tmp_path / "out") == RECIPE
    files = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert files == {"ab/kernel.main.so", "fxgraph/cd/key/graph"}


def test_equal_folders_are_equal_files(cache: Path, tmp_path: Path) -> None:
    unpacked(cache.read_bytes(), tmp_path / "out")
    pack(tmp_path / "out", RECIPE, tmp_path / "again.cache")
    assert (tmp_path / "again.cache").read_bytes() == cache.read_bytes()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_file_is_refused(cache: Path, tmp_path: Path, share: float) -> None:
    data = cache.read_bytes()
    with pytest.raises(IntegrityError, match="it is no compile cache"):
        unpacked(data[: int(share * len(data))], tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["files/../../evil", "/etc/evil", "files//evil", "evil.py", "files/.hidden", "files/a\\b"]
)
def test_a_member_that_leads_elsewhere_is_refused_before_anything_is_written(
    cache: Path, tmp_path: Path, name: str
) -> None:
    with zipfile.ZipFile(cache, "a") as archive:
        archive.writestr(name, "x")
    with pytest.raises(IntegrityError, match="which no compile cache does"):
        unpacked(cache.read_bytes(), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir()) and not (tmp_path / "evil").exists()


def test_a_file_without_a_recipe_or_with_one_twice_is_refused(cache: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bare.cache", "w") as archive:
        archive.writestr("files/a/b", "x")
    with pytest.raises(IntegrityError, match="no recipe"):
        unpacked((tmp_path / "bare.cache").read_bytes(), tmp_path / "one")
    with zipfile.ZipFile(cache, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("recipe.json", "{}")
    with pytest.raises(IntegrityError, match="a file twice"):
        unpacked(cache.read_bytes(), tmp_path / "two")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_whose_compressed_bytes_are_damaged_is_refused(tmp_path: Path, method: int) -> None:
    file = tmp_path / "damaged.zip"
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("recipe.json", "{" + "0" * 1000)
    data = bytearray(file.read_bytes())
    start = 30 + len("recipe.json")
    data[start : start + 8] = b"\xff" * 8
    with pytest.raises(IntegrityError, match="no compile cache"):
        unpack(bytes(data), tmp_path / "out")
