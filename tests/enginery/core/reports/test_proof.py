"""Reports: they survive JSON, judge honestly, and only `approve` makes an Approved."""

import copy
import json
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginery.core.codec import decode, encode_document
from enginery.core.errors import IntegrityError
from enginery.core.reports.proof import Approved, Check, Report, Spread, Worst, approve, describe, judge

GOOD = Check("engine", "sqnr_db", "logits", "golden", 41.0, 22.0, True)
BAD = replace(GOOD, value=12.0, passed=False)
REPORT = Report(
    unit="sm_89 int8 tensorrt-rtx",
    target="sm_89",
    precision="int8",
    backend="tensorrt-rtx",
    engine="a" * 64,
    golden="b" * 64,
    checks=(GOOD,),
    verdict="proven",
    reason="1 checks passed",
    created_at="2026-01-01T00:00:00Z",
    host={"cpu": "x"},
    versions={"onnxruntime": "1"},
)


@given(st.none() | st.floats(), st.none() | st.floats())
def test_checks_survive_json_without_bare_nan(value, limit):
    check = replace(GOOD, value=value, limit=limit)
    text = json.dumps(encode_document(check), allow_nan=False)
    back = decode(json.loads(text), Check)
    for one, other in ((back.value, value), (back.limit, limit)):
        assert one == other or (math.isnan(one) and math.isnan(other))


def test_reports_survive_json():
    assert Report.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT
    assert Report.from_json(REPORT.to_json()).digest == REPORT.digest
    assert replace(REPORT, golden="c" * 64).digest != REPORT.digest


def test_spreads_survive_json():
    worst = Worst("golden 0", 3, (3, 1), 1.0, math.nan, math.nan)
    spread = Spread("engine", "logits", 6, 3, 1, 1, (0.0, 0.25), (20.0, math.inf), (worst,))
    report = replace(REPORT, spreads=(spread,))
    text = json.dumps(report.to_json(), allow_nan=False)
    back = Report.from_json(json.loads(text))
    assert back.digest == report.digest and back.spreads[0].sqnr_db == (20.0, math.inf)


@pytest.mark.parametrize("change", [{"more": 1}, {"verdict": "fine"}])
def test_a_report_with_other_fields_or_verdicts_is_refused(change):
    with pytest.raises(IntegrityError):
        Report.from_json({**REPORT.to_json(), **change})
    with pytest.raises(IntegrityError, match=r"checks\[0\].name is missing"):
        Report.from_json({**REPORT.to_json(), "checks": [{"joint": "engine"}]})


def test_approve_gives_what_publish_accepts():
    assert approve(REPORT).report is REPORT
    assert approve(replace(REPORT, verdict="unproven", checks=())) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "failed"},
        {"checks": (GOOD, BAD)},
        {"verdict": "unproven", "checks": (BAD,)},
        {"checks": ()},
        {"engine": None},
    ],
    ids=["failed", "lying", "unproven with a failure", "proven by nothing", "no engine"],
)
def test_approve_refuses(change):
    assert approve(replace(REPORT, **change)) is None


def test_an_approved_cannot_be_made_or_changed_otherwise():
    with pytest.raises(TypeError, match="approve"):
        Approved(REPORT)
    approved = approve(REPORT)
    with pytest.raises(AttributeError):
        approved.report = replace(REPORT, verdict="failed")
    with pytest.raises((AttributeError, TypeError)):
        pickle.loads(pickle.dumps(approved))
    with pytest.raises((AttributeError, TypeError)):
        copy.copy(approved)


def test_judge():
    assert judge([GOOD]) == ("proven", "1 check passed")
    assert judge([GOOD], "no sm_89 here") == ("unproven", "no sm_89 here")
    assert judge([BAD, BAD], "no sm_89 here")[0] == "failed"
    assert judge([]) == ("failed", "nothing was checked; give golden data")


def test_describe_says_what_where_and_how_much():
    assert describe(BAD) == "engine sqnr_db of logits at golden: 12, limit 22"
    assert (
        describe(Check("engine", "runs", "", "batch=1", None, None, False, "died")) == "engine runs at batch=1 (died)"
    )
