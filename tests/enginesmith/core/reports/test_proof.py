import copy
import json
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.codec import decode, encode_document
from enginesmith.core.errors import IntegrityError
from enginesmith.core.reports.proof import (
    RANDOM_INPUTS,
    Approved,
    Check,
    Report,
    Spread,
    Worst,
    approve,
    describe,
    judge,
    name_task_checks,
    unmeasured,
)

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
    restored_value = decode(json.loads(text), Check)
    for one_value, other_value in ((restored_value.value, value), (restored_value.limit, limit)):
        assert one_value == other_value or (math.isnan(one_value) and math.isnan(other_value))


def test_reports_survive_json():
    assert Report.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT
    assert replace(REPORT, golden="c" * 64).digest != REPORT.digest
    worst_row = Worst("golden 0", 3, (3, 1), 1.0, math.nan, math.nan)
    spread = Spread("engine", "logits", 6, 3, 1, 1, (0.0, 0.25), (20.0, math.inf), (worst_row,))
    report = replace(REPORT, spreads=(spread,))
    text = json.dumps(report.to_json(), allow_nan=False)
    decoded_report = Report.from_json(json.loads(text))
    assert decoded_report.digest == report.digest and decoded_report.spreads[0].sqnr_db == (20.0, math.inf)


@pytest.mark.parametrize("change", [{"more": 1}, {"verdict": "fine"}])
def test_a_report_with_other_fields_or_verdicts_is_refused(change):
    with pytest.raises(IntegrityError):
        Report.from_json({**REPORT.to_json(), **change})
    with pytest.raises(IntegrityError, match=r"checks\[0\].name is missing"):
        Report.from_json({**REPORT.to_json(), "checks": [{"stage": "engine"}]})


def test_approve_accepts_a_publishable_report():
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


def test_an_approved_cannot_be_created_or_changed_directly():
    with pytest.raises(TypeError, match="approve"):
        Approved(REPORT)
    approved_report = approve(REPORT)
    with pytest.raises(AttributeError):
        approved_report.report = replace(REPORT, verdict="failed")
    with pytest.raises((AttributeError, TypeError)):
        pickle.loads(pickle.dumps(approved_report))
    with pytest.raises((AttributeError, TypeError)):
        copy.copy(approved_report)


def test_judge():
    assert judge([GOOD]) == ("proven", "1 check passed")
    assert judge([GOOD], "no sm_89 here") == ("unproven", "no sm_89 here")
    assert judge([BAD, BAD], "no sm_89 here")[0] == "failed"
    assert judge([]) == ("failed", "nothing was checked; give golden data")


def test_limits_lifted_by_a_task_metric_are_in_the_reason_and_the_json():
    lifted_check = replace(BAD, passed=True, limit=None, waived=22.0)
    tasks = [Check("task", "top_k", "logits", f"{case}, engine", 1.0, 0.9, True) for case in ("golden", "edges")]
    verdict, reason = judge([GOOD, lifted_check, *tasks])
    assert verdict == "proven" and reason.startswith("4 checks passed; judged by top_k 1 (golden.metric decides), ")
    assert reason.endswith("not by engine sqnr_db of logits 12 (limit 22)")
    assert judge([GOOD, lifted_check, tasks[0], replace(tasks[1], passed=False)])[0] == "failed"
    report = replace(REPORT, checks=(GOOD, lifted_check))
    good_check, other_check = report.to_json()["checks"]
    assert good_check["waived"] is None and other_check["waived"] == 22.0
    assert Report.from_json(report.to_json()) == report


def test_task_checks_are_named_by_value_and_by_output_where_two_have_it():
    def task(name, output, value, case="golden, engine"):
        return Check("task", name, output, case, value, None, True)

    graph, engine = task("r2", "y", 0.5, "golden, graph"), task("r2", "y", 0.7)
    assert name_task_checks([GOOD, graph, engine, task("r2", "y", 0.1, "edges, engine")]) == {"r2": engine}
    second_engines = [engine, task("r2", "z", 0.2), task("accuracy", "z", 0.3)]
    assert list(name_task_checks(second_engines)) == ["r2 of y", "r2 of z", "accuracy"]


def test_describe_names_stage_check_and_value():
    assert describe(BAD) == "engine sqnr_db of logits at golden: 12, limit 22"
    assert (
        describe(Check("engine", "runs", "", "batch=1", None, None, False, "died")) == "engine runs at batch=1 (died)"
    )


def test_an_unmeasured_check_is_never_proven():
    unknown_check = unmeasured("export", "y", "golden", "the same in all 8 golden samples")
    assert judge([GOOD, unknown_check]) == ("unproven", "not measured: y: the same in all 8 golden samples")
    assert judge([GOOD, unknown_check], "no GPU here")[1].startswith("no GPU here; not measured: y")
    assert judge([BAD, unknown_check])[0] == "failed"
    report = replace(REPORT, checks=(GOOD, unknown_check))
    assert report.counts == {"passed": 1, "failed": 0, "not_measured": 1}
    assert approve(report) is None
    assert approve(replace(report, verdict="unproven")) is not None
    assert Report.from_json(report.to_json()) == report
    assert name_task_checks([replace(unknown_check, stage="task")]) == {}


def test_a_proof_on_random_inputs_has_its_own_status():
    drawn_check = Check("export", RANDOM_INPUTS, "", "golden", None, None, True)
    verdict, reason = judge([GOOD, drawn_check])
    assert verdict == "proven on random inputs" and "golden.data" in reason
    assert judge([BAD, drawn_check])[0] == "failed" and judge([GOOD, drawn_check], "no GPU here")[0] == "unproven"
    assert approve(replace(REPORT, verdict=verdict)) is not None
    assert approve(replace(REPORT, verdict=verdict, checks=())) is None
