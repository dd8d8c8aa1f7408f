"""A check as JUnit XML, by junitparser: a test case for each thing that was looked at, a failure for each regression.

Warnings and notes are no failures; they are the output of their case.
"""

from collections.abc import Iterator

from junitparser import Failure, JUnitXml, TestCase, TestSuite

from enginesmith.core.text import visible
from pipeline.regressions.findings import RULES, Finding, RegressionCheck, Rule


def to_junit(check: RegressionCheck) -> bytes:
    """One suite, named after the model."""
    suite = TestSuite(f"enginesmith check {check.model}")
    suite.timestamp = check.created_at
    left = list(check.findings)
    for unit, name, rules, bucket in _list_cases(check):
        mine = [found for found in left if found.unit == unit and found.rule in rules and found.bucket in (bucket, "")]
        left = [found for found in left if found not in mine]
        suite.add_testcase(_case(unit, name, mine))
    for found in left:
        where = f" at {found.bucket}" if found.bucket else ""
        suite.add_testcase(_case(found.unit or check.model, RULES[found.rule].rstrip(".") + where, [found]))
    xml = JUnitXml("enginesmith check")
    xml.add_testsuite(suite)
    return bytes(xml.tostring())  # type: ignore[no-untyped-call]


def _list_cases(check: RegressionCheck) -> Iterator[tuple[str, str, tuple[Rule, ...], str]]:
    """What was looked at: unit, name, the rules of its findings, bucket."""
    for unit, status in check.statuses.items():
        yield unit, f"proof: {status}", ("failed",), ""
    for pair in check.pairs:
        for metric in pair.metrics:
            yield pair.unit, f"{metric.name} against {pair.against}", ("metric",), ""
        for item in pair.drift:
            yield pair.unit, f"answers at {item.case} against {pair.against}", ("drift",), item.case
        for times in pair.times:
            yield pair.unit, f"latency at {times.bucket} against {pair.against}", ("latency", "too-noisy"), times.bucket
        if pair.same:
            yield pair.unit, f"same bytes as {pair.against}", (), ""


def _case(unit: str, name: str, findings: list[Finding]) -> TestCase:
    case = TestCase(name, classname=unit)
    errors = [found for found in findings if found.level == "error"]
    if errors:
        texts = [visible(found.text) for found in errors]
        case.result = [Failure(texts[0].splitlines()[0], errors[0].rule)]
        case.result[0].text = "\n".join(texts)
    if others := [f"{found.level}: {visible(found.text)}" for found in findings if found.level != "error"]:
        case.system_out = "\n".join(others)
    return case
