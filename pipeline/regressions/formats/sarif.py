"""Findings as SARIF 2.1.0 (OASIS Standard, 2020), which code scanning shows at the lines of the spec."""

import json
from importlib.metadata import version

from pipeline.regressions.findings import RULES, Finding, RegressionCheck
from pipeline.regressions.formats.places import fingerprint, uri_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(check: RegressionCheck) -> str:
    """A log with one run: the rules, and a result for each finding."""
    names = list(RULES)
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()]
    driver = {"name": "enginesmith", "version": version("enginesmith"), "rules": rules}
    results = [_result(check, found, names.index(found.rule)) for found in check.findings]
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=True) + "\n"


def _result(check: RegressionCheck, found: Finding, index: int) -> dict[str, object]:
    place: dict[str, object] = {
        "artifactLocation": {"uri": uri_of(check.spec)},
        "region": {"startLine": found.line or 1},
    }
    return {
        "ruleId": found.rule,
        "ruleIndex": index,
        "level": found.level,
        "message": {"text": found.text},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"enginesmith/v1": fingerprint(check.model, found)},
    }
