import doctest
import shutil
from importlib import import_module
from pathlib import Path

import pytest

MODULES = (
    "enginesmith", "enginesmith.client", "enginesmith.compile_caches", "enginesmith.core.errors",
    "enginesmith.generation", "enginesmith.recording", "enginesmith.serving", "enginesmith.streams",
    "enginesmith.user_code", "pipeline.api",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_first_call_gives_its_documented_result(
    name: str, built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(built_once, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    text = import_module(name).__doc__ or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert not report, "".join(report)
