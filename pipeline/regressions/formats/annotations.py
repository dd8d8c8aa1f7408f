"""Findings where a run of continuous integration shows them: workflow commands of GitHub Actions, and the JSON of
GitLab's code quality."""

import json

from enginesmith.core.text import visible
from pipeline.regressions.findings import RegressionCheck
from pipeline.regressions.formats.places import fingerprint, path_of

# GitHub's word for a level, and GitLab's.
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_SEVERITIES = {"error": "major", "warning": "minor", "note": "info"}


def to_commands(check: RegressionCheck) -> list[str]:
    """A workflow command for each finding, as in '::error file=digits.yaml,line=20,title=latency::...'."""
    lines = []
    for found in check.findings:
        at = f",line={found.line}" if found.line else ""
        place = (
            f"file={_escape_property(path_of(check.spec))}{at},title={_escape_property(f'enginesmith {found.rule}')}"
        )
        lines.append(f"::{_COMMANDS[found.level]} {place}::{_escape(visible(found.text))}")
    return lines


def _escape(text: str) -> str:
    """As the runner reads the data of a command (actions/toolkit, packages/core)."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")


def to_code_quality(check: RegressionCheck) -> str:
    """GitLab's code quality report: a list of issues with path, line, severity and fingerprint."""
    issues = [
        {
            "description": found.text,
            "check_name": found.rule,
            "fingerprint": fingerprint(check.model, found),
            "severity": _SEVERITIES[found.level],
            "location": {"path": path_of(check.spec), "lines": {"begin": found.line or 1}},
        }
        for found in check.findings
    ]
    return json.dumps(issues, indent=2, ensure_ascii=True) + "\n"
