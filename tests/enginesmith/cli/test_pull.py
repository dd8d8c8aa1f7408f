import json
from pathlib import Path

import pytest

from enginesmith.cli.pull import FollowOptions
from enginesmith.client.watching.server import Command, HealthCommand, HealthUrl, Post, ReportUrl
from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.store.base import Store
from tests.enginesmith.cli.commands import run, told
from tests.enginesmith.registries import engine, publish_engines, refusal


@pytest.fixture
def published(empty: Store) -> Store:
    publish_engines(empty, [engine(empty), engine(empty, "l4", "int8", "unproven")], others=[refusal("sm_80")])
    return empty


def test_the_table(published: Store, tmp_path: Path) -> None:
    result = run("pull", "--explain", "digits", "--target", "l4", "--memory", "24", "--driver", "580.65.06")
    assert result.exit_code == 0
    assert "digits@1 on l4 (driver 580.65.06, memory 24.0 GiB)" in result.stdout
    assert "l4 int8 tensorrt-rtx" in result.stdout and "built for sm_80; this is sm_89 (l4)" in result.stdout
    explained_result = run("pull", "digits", "--target", "l4", "--explain", "--dest", str(tmp_path / "out"))
    assert "the GPU's memory is unknown" in explained_result.stdout and not (tmp_path / "out").exists()
    none = run("pull", "--explain", "digits", "--target", "h100", "--json")
    assert none.exit_code == 2 and '"candidates": []' in none.stdout
    for wrong_names in (["--once"], ["--hook", "x"], ["--interval", "3"]):
        assert run("pull", "digits", *wrong_names).exit_code == 2
    both_names = ("--health", "x", "--report", "none")
    assert run("pull", "digits:candidate", "--follow", "--once", "--target", "cpu", *both_names).exit_code == 2


def test_an_explanation_follows_no_channel_and_is_one_document(published: Store) -> None:
    assert run("pull", "--explain", "digits:candidate", "--follow").exit_code == 2
    several = run("pull", "--explain", "digits", "--target", "cpu", "--target", "h100", "--json")
    assert several.exit_code == 2 and [len(result["candidates"]) for result in json.loads(several.stdout)] == [1, 0]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("triton", "Triton does not load tensorrt-rtx engines"),
        ("kserve", "Triton does not load tensorrt-rtx engines"),
        ("ortpackage", "no execution provider of ONNX Runtime opens engines of tensorrt-rtx"),
    ],
)
def test_an_explanation_omits_engines_that_the_layout_cannot_open(published: Store, layout: str, reason: str) -> None:
    assert run("pull", "--explain", "digits", "--target", "l4").exit_code == 0
    result = run("pull", "--explain", "digits", "--target", "l4", "--layout", layout)
    assert result.exit_code == 2 and "rejected" in result.stdout and reason in " ".join(result.stdout.split())
    for targets in (["all"], ["cpu", "--target", "l4"]):
        shown_result = run("pull", "--explain", "digits", "--target", *targets, "--layout", layout, "--json")
        answers = json.loads(shown_result.stdout)
        answers = answers if isinstance(answers, list) else [answers]
        assert any(reason in row["reason"] for answer in answers for row in answer["rejected"])
    opened_result = run("pull", "--explain", "digits", "--target", "cpu", "--layout", layout, "--json")
    assert opened_result.exit_code == 0
    assert [row["unit"] for row in json.loads(opened_result.stdout)["candidates"]] == ["cpu fp32 onnxruntime"]


def test_pull(mixed: Store, tmp_path: Path) -> None:
    text = str(tmp_path / "out")
    fields = told("pull", "digits", "--target", "sm_89", "--dest", text)
    assert (fields["status"], fields["version"]) == ("unproven", "2") and Path(fields["path"]).is_file()
    assert {row["unit"] for row in fields["rejected"]} == {"cpu fp32 onnxruntime", "sm_75 fp32 tensorrt-rtx"}
    assert "is a file" in run("pull", "digits", "--dest", __file__).stderr
    result = run("pull", "digits", "--target", "cpu", "--dest", text)
    assert "digits-2-cpu-fp32.onnx" in result.stdout and "why:    built for cpu" in result.stdout
    assert "not:    sm_89 fp32 tensorrt-rtx: built for sm_89; this is cpu" in result.stdout and result.stderr == ""
    assert "UNPROVEN" in run("pull", "digits", "--target", "sm_89", "--dest", text).stderr
    refused_result = run("pull", "digits", "--target", "sm_89", "--proven-only", "--dest", text)
    assert isinstance(refused_result.exception, UnknownNameError)
    assert isinstance(run("pull", "digits", "--target", "cpu", "--precision", "fp8").exception, UnknownNameError)


def test_a_hook_and_a_health_check_are_commands_or_urls() -> None:
    commands = FollowOptions(hook="reload now", health="check").settings()
    assert commands["hook"] == Command("reload now", 30.0) and commands["health"] == HealthCommand("check")
    urls = FollowOptions(hook="http://x/a", health="https://x/b", report="http://x/c").settings()
    assert urls["hook"] == Post("http://x/a", 30.0) and urls["health"] == HealthUrl("https://x/b")
    assert urls["report"] == ReportUrl("http://x/c") and commands["report"] is True
    assert FollowOptions(report="none").settings()["report"] is False
