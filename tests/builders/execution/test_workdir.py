import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from builders.backends.aotinductor import AotInductor
from builders.backends.iree import Iree
from builders.execution.local import remove_left_behind, workdir
from enginesmith.core.errors import UnavailableError
from tests.builders import graphs

HOLD = "from builders.execution.local import workdir\nwith workdir() as folder: print(folder, flush=True); input()"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold() -> tuple[subprocess.Popen, Path]:
    """Another process inside a workdir."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return holder, Path(holder.stdout.readline().strip())


def end(holder: subprocess.Popen) -> None:
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()


def test_the_folder_is_deleted_also_after_a_failure():
    with pytest.raises(RuntimeError), workdir() as folder:
        (folder / "file").write_text("x")
        raise RuntimeError
    assert not folder.exists()


def test_a_folder_in_use_stays_and_a_dead_one_is_deleted(temporary_folder):
    holder, live_holder = hold()
    with workdir() as own_path:
        assert live_holder.exists() and own_path.exists()
        remove_left_behind(temporary_folder)
        assert live_holder.exists() and own_path.exists()
    end(holder)
    assert live_holder.exists()
    with workdir():
        assert not live_holder.exists()


def test_folders_of_others_are_not_changed(temporary_folder):
    other_path = temporary_folder / "enginesmith-notes"
    other_path.mkdir()
    with workdir():
        pass
    assert other_path.exists()


def test_a_full_disk_is_reported_with_the_remedy(temporary_folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder / "missing"))
    with pytest.raises(UnavailableError, match="TMPDIR"), workdir():
        pass


@pytest.mark.parametrize("backend", [AotInductor(), Iree()])
def test_compilers_whose_linkers_split_paths_refuse_a_folder_with_a_space(backend, tmp_path):
    (folder := tmp_path / "a b").mkdir()
    with pytest.raises(UnavailableError, match="set TMPDIR to a folder without one"):
        backend.build(graphs.request("cpu", backend=backend.name), graphs.mlp(tmp_path / "model.onnx"), folder)
