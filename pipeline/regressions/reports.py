"""Findings in the formats of others: JUnit, Markdown, annotations of GitHub Actions."""

import os
from collections.abc import Iterator
from pathlib import Path

from junitparser import Failure, JUnitXml, TestCase, TestSuite

from enginesmith.core.text import format_metric, visible
from pipeline.regressions.findings import RULES, BucketTimes, EnginePair, Finding, RegressionCheck, Rule
from validation.plotting import seconds_text

# A check as JUnit XML, by junitparser: a test case for each thing that was looked at, a failure for each regression.
#
# Warnings and notes are no failures; they are the output of their case.


def to_junit(check: RegressionCheck) -> bytes:
    """One suite, named after the model."""
    suite = TestSuite(f"enginesmith check {check.model}")
    suite.timestamp = check.created_at
    open_findings = list(check.findings)
    for unit, name, rules, bucket in _list_cases(check):
        unit_findings = [
            finding
            for finding in open_findings
            if finding.unit == unit and finding.rule in rules and finding.bucket in (bucket, "")
        ]
        open_findings = [finding for finding in open_findings if finding not in unit_findings]
        suite.add_testcase(_case(unit, name, unit_findings))
    for finding in open_findings:
        bucket_text = f" at {finding.bucket}" if finding.bucket else ""
        suite.add_testcase(_case(finding.unit or check.model, RULES[finding.rule].rstrip(".") + bucket_text, [finding]))
    xml = JUnitXml("enginesmith check")
    xml.add_testsuite(suite)
    return bytes(xml.tostring())  # type: ignore[no-untyped-call]


def _list_cases(check: RegressionCheck) -> Iterator[tuple[str, str, tuple[Rule, ...], str]]:
    """The test cases of the report: unit, name, rules of its findings, bucket."""
    for unit, status in check.statuses.items():
        yield unit, f"proof: {status}", ("failed",), ""
    for pair in check.pairs:
        for metric in pair.metrics:
            yield pair.unit, f"{metric.name} against {pair.against}", ("metric",), ""
        for drift in pair.drift:
            yield pair.unit, f"answers at {drift.case} against {pair.against}", ("drift",), drift.case
        for times in pair.times:
            yield pair.unit, f"latency at {times.bucket} against {pair.against}", ("latency", "too-noisy"), times.bucket
        if pair.same:
            yield pair.unit, f"same bytes as {pair.against}", (), ""


def _case(unit: str, name: str, findings: list[Finding]) -> TestCase:
    case = TestCase(name, classname=unit)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        texts = [visible(finding.text) for finding in errors]
        case.result = [Failure(texts[0].splitlines()[0], errors[0].rule)]
        case.result[0].text = "\n".join(texts)
    if other_texts := [f"{finding.level}: {visible(finding.text)}" for finding in findings if finding.level != "error"]:
        case.system_out = "\n".join(other_texts)
    return case


COLUMNS = ("engine", "against", "measured", "new", "served", "verdict")
MARKS = {"error": "regression", "warning": "warning", "note": "note"}


def list_rows(check: RegressionCheck) -> list[list[str]]:
    """Rows of COLUMNS: for each pair its metrics, its answers and its times."""
    return [row for pair in check.pairs for row in _list_rows_of(check, pair)]


def _list_rows_of(check: RegressionCheck, pair: EnginePair) -> list[list[str]]:
    first_cells = [pair.unit + (" (pulled here)" if pair.pulled else ""), pair.against]
    if pair.same:
        return [[*first_cells, "bytes", "", "", "equal"]]
    broken_rules = {
        (finding.rule, finding.bucket)
        for finding in check.findings
        if finding.unit == pair.unit and finding.level == "error"
    }
    rows = [
        [
            *first_cells,
            metric.name,
            *["" if value is None else format_metric(metric.name, value) for value in (metric.new, metric.served)],
            "worse" if ("metric", "") in broken_rules else "not worse",
        ]
        for metric in pair.metrics
    ]
    failed_drifts = [drift for drift in pair.drift if not drift.passed]
    if pair.drift:
        answer_text = (
            f"different in {len(failed_drifts)} of {len(pair.drift)} cases"
            if failed_drifts
            else f"within limits in {len(pair.drift)} cases"
        )
        rows.append([*first_cells, "outputs", "", "", answer_text])
    for times in pair.times:
        time_texts = [seconds_text(times.new_s), seconds_text(times.served_s)]
        rows.append([*first_cells, f"latency at {times.bucket}", *time_texts, describe_ratio(times, check.slower)])
    return rows


def describe_ratio(times: BucketTimes, slower: float) -> str:
    """'slower: 1.41 times (1.38 to 1.44)'. slower: the threshold, as a share."""
    if times.ratio is None or times.low is None or times.high is None:
        return "too few runs"
    verdict = "faster" if times.high < 1 else f"at most {100 * slower:g} % slower"
    verdict = "slower" if times.low > 1 + slower else "too noisy" if times.high > 1 + slower else verdict
    return f"{verdict}: {times.ratio:.3f} times ({times.low:.3f} to {times.high:.3f})"


def to_markdown(check: RegressionCheck) -> str:
    """A heading with the verdict, the findings, and a table of what was measured."""
    lines = [f"### enginesmith check: {_plain(check.verdict)}", ""]
    for finding in check.findings:
        lines.append(f"- **{MARKS[finding.level]}** ({finding.rule}): {_plain(finding.text)}")
    if check.findings:
        lines.append("")
    if rows := list_rows(check):
        lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [*(f"| {' | '.join(map(_plain, row))} |" for row in rows), ""]
    status_text = ", ".join(f"{unit} {status}" for unit, status in check.statuses.items())
    if status_text:
        lines += [f"Units: {_plain(status_text)}.", ""]
    lines.append(
        f"On {_plain(str(check.machine))}, {check.created_at}. Slower: the lower end of the 95 % interval of the ratio "
        f"is over {1 + check.slower:.3g}; {check.seconds:g} s of interleaved runs for each bucket."
    )
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """A text in one line, with Markdown and HTML escaped."""
    for char in "\\`*_[]<>|":
        text = text.replace(char, f"\\{char}")
    return " ".join(visible(text).split())


_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def to_commands(check: RegressionCheck) -> list[str]:
    """A workflow command for each finding, as in '::error file=digits.yaml,line=20,title=latency::...'.

    The spec's path is below the current folder; what is no file of this folder stays as it is.
    """
    is_file = "://" not in check.spec and not check.spec.startswith("registered:")
    relative_path = Path(os.path.relpath(check.spec)) if is_file else None
    path = check.spec if relative_path is None or relative_path.parts[:1] == ("..",) else relative_path.as_posix()
    lines = []
    for finding in check.findings:
        line_text = f",line={finding.line}" if finding.line else ""
        properties = f"file={_escape_property(path)}{line_text},title={_escape_property(f'enginesmith {finding.rule}')}"
        lines.append(f"::{_COMMANDS[finding.level]} {properties}::{_escape(visible(finding.text))}")
    return lines


def _escape(text: str) -> str:
    """As the runner reads the data of a command (actions/toolkit, packages/core)."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
