import json
from pathlib import Path

import pytest

from enginesmith.compile_caches.loading import MeasuredStart, pack
from enginesmith.core.requirements import Cpu
from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run, said, told
from tests.enginesmith.registries import engine, publish_engines


@pytest.fixture
def words(empty: Store, tmp_path: Path) -> Path:
    publish_engines(empty, [engine(empty)], channel="stable")
    (tmp_path / "words.txt").write_text("one two")
    return tmp_path / "words.txt"


def test_a_file_is_attached_shown_and_pulled(words: Path, tmp_path: Path) -> None:
    arguments = ("registry", "attach", "digits:stable", words, "--kind", "vocabulary", "--note", "of the tokenizer")
    assert said(*arguments).startswith("attached: words.txt to digits@1")
    assert said(*arguments).startswith("already attached: words.txt")
    (item,) = told("show", "digits")["attachments"]  # type: ignore[index]
    assert (item["name"], item["kind"], item["size_bytes"], item["note"]) == (
        "words.txt", "vocabulary", 7, "of the tokenizer",
    )  # fmt: skip
    assert "attachments" in said("show", "digits") and "words.txt" in said("show", "digits")
    (pulled_attachment,) = told("pull", "digits", "--dest", tmp_path / "dest")["attachments"]  # type: ignore[index]
    assert Path(pulled_attachment["path"]).read_text() == "one two" and pulled_attachment["digest"] == item["digest"]
    assert json.loads(Path(pulled_attachment["description"]).read_bytes()) == item


def test_attachments_for_other_targets_are_left_out_with_the_reason(words: Path, tmp_path: Path) -> None:
    assert "l4" in str(told("registry", "attach", "digits", words, "--kind", "vocabulary", "--target", "l4"))
    result = said("pull", "digits", "--dest", tmp_path / "dest")
    assert "not:    attachment words.txt: built for l4" in result and "with:" not in result


def test_a_compile_cache_states_its_requirements_and_is_measured(words, tmp_path, monkeypatch):
    cache = tmp_path / "net.cache"

    def measure(entry_point: str, file: Path) -> MeasuredStart:
        assert entry_point == "net:build"
        (tmp_path / "files").mkdir()
        pack(tmp_path / "files", (Cpu("cpu", "arm64"),), file)
        return MeasuredStart(10.0, 2.0, 9.0, float("nan"), 0)

    monkeypatch.setattr("enginesmith.compile_caches.loading.measure_start", measure)
    arguments = ("registry", "attach", "digits", cache, "--kind", "torch-compile-cache")
    assert "is not a file; --measure MODULE:FUNCTION creates it" in str(run(*arguments).exception)
    result = told(*arguments, "--measure", "net:build", "--target", "cpu")
    assert result["measured"] == {  # type: ignore[index]
        "cold_cpu_s": 10, "warm_cpu_s": 2, "cold_s": 9, "compiled_again": 0, "warm_of_cold": 0.2,
    }  # fmt: skip
    assert [item["only"] for item in result["requires"]] == ["arm64", ""]  # type: ignore[index]
    assert "warm_of_cold 0.2" in said("show", "digits")


def test_invalid_attachments_are_refused_with_the_reason(words: Path) -> None:
    for arguments, reason in [
        (("digits", words, "--kind", "Two Words"), "words.txt cannot be attached: kind"),
        (("digits", words, "--kind", "torch-compile-cache"), "words.txt is not a compile cache"),
        (("digits", words, "--kind", "vocabulary", "--target", "l5"), "target 'l5' is not known"),
        (("digits@7", words, "--kind", "vocabulary"), "no version of digits '7'"),
    ]:
        result = run("registry", "attach", *arguments)
        assert result.exit_code != 0 and reason in str(result.exception), result.exception
    result = run("registry", "attach", "digits", words, "--kind", "vocabulary", "--measure", "net:build")
    assert result.exit_code == 2 and "--measure works only with --kind torch-compile-cache" in result.output
