import re
from pathlib import Path

import pytest
from junitparser import JUnitXml

from pipeline.regressions.findings import Finding
from pipeline.regressions.reports import describe_ratio, list_rows, to_commands, to_junit, to_markdown
from tests.pipeline.regressions.samples import UNIT, sample, times

HOSTILE = "a\x1b[31m\x00 <script>&]]> ::error:: 100%\r\n| `x` \u202e"


def test_junit_has_a_case_per_check_and_a_failure_per_regression() -> None:
    (suite,) = JUnitXml.fromstring(to_junit(sample()).decode())
    assert (suite.tests, suite.failures) == (6, 1)
    assert {case.classname for case in suite} == {UNIT, "cpu fp16 onnxruntime"}
    failed_cases = [case for case in suite if not case.is_passed]
    assert [case.name for case in failed_cases] == [f"latency at batch=8 against {UNIT}"]
    assert "2.0 times" in failed_cases[0].result[0].text
    noisy = next(case for case in suite if "batch=32" in case.name)
    assert noisy.is_passed and "warning" in noisy.system_out


def test_workflow_commands_are_one_line_each_and_escaped() -> None:
    commands = to_commands(sample())
    assert commands[0].startswith("::error file=digits.yaml,line=17,title=enginesmith latency::cpu int8 onnxruntime at")
    assert "100 %25" in commands[0] and commands[2].startswith("::notice file=digits.yaml,title=enginesmith coverage::")
    assert "%0A" in commands[2] and not any("\n" in command for command in commands)


def test_a_spec_is_named_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spec, path in (
        (str(tmp_path / "models" / "a b.yaml"), "models/a b.yaml"),
        ("s3://bucket/digits.yaml", "s3%3A//bucket/digits.yaml"),
        ("/elsewhere/digits.yaml", "/elsewhere/digits.yaml"),
    ):
        assert to_commands(sample(spec))[0].startswith(f"::error file={path},")


def test_markdown_has_the_verdict_the_findings_and_the_table() -> None:
    text = to_markdown(sample())
    assert text.startswith("### enginesmith check: digits: 1 regression against digits@3 (channel stable)")
    assert "**regression** (latency)" in text and "slower: 2.000 times (1.900 to 2.100)" in text
    assert describe_ratio(times(0.8, 0.9, 1.01), 0.03) == "at most 3 % slower: 0.900 times (0.800 to 1.010)"
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(list_rows(sample()))
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {7}


def test_texts_of_models_are_escaped_in_every_format() -> None:
    hostile = sample(findings=(Finding("failed", "error", HOSTILE, UNIT, "", 3),))
    (suite,) = JUnitXml.fromstring(to_junit(hostile).decode())
    assert suite.failures == 1
    assert "<script>" not in to_markdown(hostile).replace("\\<script\\>", "") and "\x1b" not in to_markdown(hostile)
    (command,) = to_commands(hostile)
    assert command.count("\n") == 0 and "\x1b" not in command and "%25" in command
