from typing import Any

import pytest

from tests.pipeline.projects import Project, units

TOP = {"name": "top_k", "output": "logits", "against": "original", "k": 1, "floor": 0.8}
REGRESSION = {"name": "regression", "output": "logits", "against": "original"}
# Limits that no int8 graph and engine keeps.
OUT_OF_REACH = {"int8": {"quantization": {"sqnr_db": 100}, "engine": {"sqnr_db": 150}}}


def build(built: Project, metric: Any) -> dict[str, Any]:
    golden = {"data": "golden.npz", "labels": "label", "metric": metric}
    entries = {"validation": {"limits": OUT_OF_REACH, "attribution": "off"}, "quantization": {"search": "never"}}
    built.change_spec(targets=["cpu"], golden=golden, **entries)
    return built.build().json


def test_a_deciding_metric_replaces_numeric_limits_and_is_reported(built: Project) -> None:
    outcome = build(built, [{**TOP, "decides": True}, {**REGRESSION, "floor": None}])
    assert units(outcome, "status") == {"cpu fp32": "proven", "cpu int8": "proven"}
    reason = units(outcome, "reason")["cpu int8"]
    assert "judged by top_k" in reason and "golden.metric decides" in reason
    assert "not by quantization sqnr_db of logits" in reason and "(limit 100)" in reason
    assert "golden.metric" not in units(outcome, "reason")["cpu fp32"]
    values = units(outcome, "metrics")["cpu int8"]
    assert values.keys() == {"top_k", "r2", "relative_error", "largest_error"} and 0.8 <= values["top_k"] <= 1
    shown_document = built.run("show", "tiny", "--json").json
    assert reason in {engine["reason"] for engine in shown_document["engines"]}
    assert built.run("report", "tiny", "--out", built.folder / "page.html").code == 0
    page = (built.folder / "page.html").read_text()
    assert "limit 100.0 dB not applied" in page and "limit 150.0 dB not applied" in page and "<caption>top_k" in page
    assert "<caption>r2" in page


@pytest.mark.parametrize(
    ("metric", "failed"),
    [
        (TOP, "quantization sqnr_db of logits"),
        ({**TOP, "decides": ["fp16"]}, "quantization sqnr_db of logits"),
        ({**REGRESSION, "relative_error": 1e-9, "decides": True}, "task rel"),
    ],
)
def test_a_failing_or_inapplicable_metric_lifts_nothing(built: Project, metric: Any, failed: str) -> None:
    outcome = build(built, metric)
    assert units(outcome, "status") == {"cpu fp32": "proven", "cpu int8": "failed"}
    assert units(outcome, "reason")["cpu int8"].startswith(failed)
