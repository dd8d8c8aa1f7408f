"""Slow files come first, and whole files and one Ray fleet go to one worker; `make` installs what each target needs."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import scheduling
from tests.scheduling import WholeFiles, key_of, made_once, put_slow_files_first

ROOT = Path(__file__).parents[1]


def item(file: str, *markers: str) -> SimpleNamespace:
    return SimpleNamespace(path=file, get_closest_marker=lambda name: name in markers)


def test_files_with_a_slow_test_come_first_and_stay_whole() -> None:
    quick_item, slow_item, extra_item, server = item("a"), item("b", "slow"), item("b"), item("c", "server")
    items = [quick_item, extra_item, slow_item, server]
    put_slow_files_first(items)
    assert items == [extra_item, slow_item, server, quick_item]


@pytest.mark.parametrize(
    ("test", "scope"),
    [
        ("tests/a/test_b.py::test_c[x::y/z]", "tests/a/test_b.py"),
        ("tests/builders/execution/ray/test_fleet.py::test_c", "tests/builders/execution/ray"),
    ],
)
def test_a_worker_gets_whole_files_and_shared_fleets(test: str, scope: str) -> None:
    assert WholeFiles._split_scope(None, test) == scope


def test_shared_fixtures_are_made_once_per_key_and_expire(tmp_path, monkeypatch):
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        if len(calls) == 1:
            raise OSError("the first worker dies")

    with pytest.raises(OSError, match="dies"):
        made_once("thing", "a", fill, tmp_path)
    (first_path,) = {made_once("thing", "a", fill, tmp_path) for _ in range(2)}
    assert first_path.parent == tmp_path and first_path.is_dir() and len(calls) == 2
    assert made_once("thing", "b", fill, tmp_path) != first_path and len(calls) == 3
    start_time_s = time.time()
    monkeypatch.setattr(scheduling.time, "time", lambda: start_time_s + 3700)
    assert made_once("thing", "a", fill, tmp_path) != first_path and first_path.is_dir(), "a run may still copy it"
    monkeypatch.setattr(scheduling.time, "time", lambda: start_time_s + 11_000)
    made_once("thing", "b", fill, tmp_path)
    assert not first_path.exists()


def test_a_key_depends_on_versions_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scheduling, "ROOT", tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    keys = [key_of(("pytest",), ("code",)), key_of(("pytest",), ("code",)), key_of(("pluggy",), ("code",))]
    (tmp_path / "code" / "a.py").write_text("2")
    keys.append(key_of(("pytest",), ("code",)))
    assert keys[0] == keys[1] and len({*keys}) == 3


def make(target: str) -> str:
    """What make would run, on a machine where nothing was installed."""
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_no_test_tools_and_serves_the_tests_too() -> None:
    assert "'.[full]'" in make("demo") and "[test" not in make("demo")
    assert "'.[test]'" in make("check") and "touch .venv/.runs .venv/.installed" in make("check")


def test_make_check_runs_every_tool() -> None:
    checks = make("check")
    for tool in ("ruff format --check", "ruff check", "mypy", "lint-imports", "--tag links"):
        assert f"/{tool}" in checks or f" {tool}" in checks, tool
