import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.compile.closure import code
from pipeline.compile.closure.code import find_code, remember_reach
from pipeline.compile.closure.definitions import SourceFiles

ROOTS = ("toy.start:run",)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy").mkdir()
    files = {"__init__": "", "start": "from toy.deep import deep\ndef run():\n    return deep()\n"}
    for name, text in {**files, "deep": "def deep():\n    return 1\n", "far": "def far():\n    return 1\n"}.items():
        (tmp_path / "toy" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The roots that were computed, and not recalled."""
    items: list[tuple[str, ...]] = []
    real_reach = code._reach

    def noted(roots: tuple[str, ...], sources: SourceFiles) -> code.Closure:
        items.append(roots)
        return real_reach(roots, sources)

    monkeypatch.setattr(code, "_reach", noted)
    return items


def ask() -> code.Closure:
    return remember_reach(ROOTS, SourceFiles({"toy"}))


def test_a_closure_is_computed_once_and_again_after_a_change(toy, computed):
    first_answer = ask()
    assert ask() == first_answer and computed == [ROOTS]
    (toy / "toy" / "far.py").write_text("def far():\n    return 2\n")
    assert ask() == first_answer and computed == [ROOTS]
    (toy / "toy" / "deep.py").write_text("def deep():\n    return 2\n")
    assert ask().digest != first_answer.digest and computed == [ROOTS, ROOTS]
    (toy / "toy" / "deep.py").write_text("# a comment\ndef deep():\n    return 2\n")
    assert ask().digest == ask().digest and len(computed) == 3


def test_a_new_module_is_noticed(toy: Path, computed: list[tuple[str, ...]]) -> None:
    (toy / "toy" / "start.py").write_text("def run():\n    from toy import late\n    return late.f()\n")
    answer_before = ask()
    (toy / "toy" / "late.py").write_text("def f():\n    return 1\n")
    assert ask().digest != answer_before.digest and len(computed) == 2


def test_another_algorithm_version_counts(toy, computed, monkeypatch):
    ask()
    real = SourceFiles.digest
    changed_text = "pipeline.compile.closure.definitions"
    monkeypatch.setattr(SourceFiles, "digest", lambda self, name: "other" if name == changed_text else real(self, name))
    ask()
    assert len(computed) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"modules": 1, "packages": [], "read": {}}'])
def test_a_damaged_file_is_computed_again(toy: Path, computed: list[tuple[str, ...]], damage: bytes) -> None:
    first_answer = ask()
    (cache_files,) = (toy / "cache" / "code").iterdir()
    cache_files.write_bytes(damage)
    assert ask() == first_answer and len(computed) == 2
    assert json.loads(cache_files.read_bytes())["modules"] == first_answer.modules


def test_an_unwritable_or_disabled_cache_costs_only_time(toy, computed, monkeypatch):
    (toy / "cache").write_text("a file where a folder belongs")
    first_answer = ask()
    monkeypatch.setenv("ENGINESMITH_CACHE_BYTES", "0")
    assert ask().digest == first_answer.digest and len(computed) == 2


def test_concurrent_threads_wait_for_one_computation(toy, computed, monkeypatch):
    """Two threads in `ast.parse` at once make CPython 3.11 fail."""
    monkeypatch.setenv("ENGINESMITH_CACHE_BYTES", "0")
    code._find.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(lambda _: find_code(*ROOTS), range(32)))
    assert len({closure.digest for closure in result}) == 1 and computed == [ROOTS]
