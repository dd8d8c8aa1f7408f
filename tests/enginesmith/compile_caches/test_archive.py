"""The file of a compile cache: what goes in comes out, and nothing else is written. Which model it is for."""

import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecAVX2

from enginesmith.compile_caches.archive import (
    CacheRecipe,
    CompileOptions,
    pack,
    read_recipe,
    record_probes,
    unpack,
    use_probes,
)
from enginesmith.compile_caches.loading import StaleCacheError, WarmStart
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
    assert unpacked(cache.read_bytes(), tmp_path / "out") == RECIPE == read_recipe(cache)
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
def test_a_member_that_leads_elsewhere_is_refused_before_anything_is_written(cache, tmp_path, name):
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


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = torch.nn.Linear(8, width)
    def forward(self, x):
        {comment}
        return self.fc(x){more}
"""


def model(tmp_path: Path, name: str, comment: str = "", more: str = "", **arguments: Any) -> torch.nn.Module:
    (tmp_path / f"{name}.py").write_text(NET.format(comment=comment, more=more))
    sys.path.insert(0, str(tmp_path))
    try:
        built: torch.nn.Module = import_module(name).Net(**arguments)
    finally:
        sys.path.remove(str(tmp_path))
    return built.eval()


@pytest.fixture
def warm(tmp_path: Path) -> WarmStart:
    recipe = CacheRecipe.of_model(model(tmp_path, "recipe_net_first"), CompileOptions(), "cpu")
    return WarmStart(recipe, tmp_path, 0)


@pytest.mark.filterwarnings("ignore")  # of torch about its own modules, as torch.compile imports them
def test_the_same_model_from_another_file_with_another_comment_is_taken(tmp_path: Path, warm: WarmStart) -> None:
    assert callable(warm.compile(model(tmp_path, "recipe_net_same", comment="# said otherwise")))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("source", {"more": " + 1"}, "class Net has other source"),
        ("width", {"width": 5}, r"tensor fc.bias was float32 \[4\] and is float32 \[5\] \(and 1 more\)"),
    ],
)
def test_another_model_is_refused_with_what_differs(tmp_path, warm, name, change, words):
    with pytest.raises(StaleCacheError, match=f"stale: the cache was made from another model: {words}"):
        warm.compile(model(tmp_path, f"recipe_net_{name}", **change))


def test_training_mode_and_another_number_of_threads_are_refused(tmp_path: Path, warm: WarmStart) -> None:
    with pytest.raises(StaleCacheError, match=r"training mode: call model\.eval"):
        warm.compile(model(tmp_path, "recipe_net_train").train())
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(StaleCacheError, match=rf"torch has {before + 1}: torch.set_num_threads\({before}\)"):
            warm.compile(model(tmp_path, "recipe_net_threads"))
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def probe(_self: object, library: str) -> bool:
        made.append(library)
        return "good" in library

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.VecISA._probe_load", probe)
    return made


def test_what_was_probed_is_on_record_whether_it_held_or_not(probed: list[str]) -> None:
    record = record_probes()
    assert [VecAVX2()._probe_load(f"/cache/{name}.so") for name in ("good", "bad")] == [True, False]
    assert record == {"good.so": True, "bad.so": False} and len(probed) == 2


def test_a_probe_on_record_is_not_made_again_wherever_its_library_lies(probed: list[str]) -> None:
    use_probes({"good.so": True, "bad.so": False})
    isa = VecAVX2()
    assert [isa._probe_load(f"/other/{name}.so") for name in ("good", "bad")] == [True, False] and not probed
    assert isa._probe_load("/other/new-good.so") and probed == ["/other/new-good.so"]
