"""Each reported fault of a compiler is near what its thread reports, and the same engine without it passes the proof.

That the proof fails the faulty one and blames its node, `test_faults.py` shows, as of every planted fault.
"""

from pathlib import Path

import pytest

from tests.faults.compilers import REPORTS, Report
from tests.scheduling import slow_after_first


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_a_planted_error_is_as_large_as_its_source_reports(report: Report) -> None:
    low, high = report.near
    assert low <= report.measure() <= high


@pytest.mark.parametrize("report", slow_after_first(REPORTS), ids=lambda report: report.name)
def test_the_same_engine_without_the_fault_passes(report: Report, tmp_path: Path) -> None:
    checks = report.engine(tmp_path / "twin", wrong=False).checks()
    assert [check for check in checks if not check.passed] == []
    assert len(checks) > 10
