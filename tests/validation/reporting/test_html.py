import json
import math
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from enginesmith.core.codec import decode, encode_document
from enginesmith.core.reports.proof import Check, Report, unmeasured
from tests.validation.page_data import stage_checks, version_report
from validation.reporting.html import VersionPage, headroom_db, metric_text, templates
from validation.reporting.html import overview as look
from validation.reporting.html import render as draw
from validation.reporting.stages import distributions, format_bound, worst_cases
from validation.reporting.version_document import VersionDocument

HOSTILE = "<script>alert(1)</script>\"'&" + "x" * 300


def render(data: dict) -> str:
    return draw(decode(data, VersionDocument))


def render_texts(data: dict) -> str:
    """The page without the sections that are pictures, which take a second to draw."""
    page = overview(data)
    return templates().get_template("reporting/report.html.j2").render(page=page, **vars(page))


def overview(data: dict, pictures: bool = False) -> VersionPage:
    """pictures: False leaves out the sections that are pictures, which take time to draw."""
    return look(decode(data, VersionDocument), pictures)


@cache
def usual() -> str:
    return render(version_report())


def bare() -> dict:
    """Without the pictures of the quantization and of latency."""
    return {**version_report(), "quantization": {}, "latencies": {}}


class Page(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_the_verdict_comes_first_and_every_engine_is_shown():
    page = Page(usual())
    assert page.text.index("1 engine failed; 3 proven, 21 unproven") < page.text.index("Engines")
    for entry in version_report()["engines"]:
        assert entry["target"] in page.text
        if entry["digest"]:
            assert entry["digest"] in page.text
        assert entry["reason"] in page.text
    rows = {value for name, value in page.attributes if name == "id" and value.startswith("engine-")}
    shown_entries = [entry for entry in version_report()["engines"] if entry["status"] != "refused"]
    assert rows == {f"engine-{entry['target']}-{entry['precision']}-{entry['backend']}" for entry in shown_entries}


def test_no_fuzzing_is_proposed_for_an_ensemble():
    page, commands = overview(bare()), templates().get_template("reporting/version.html.j2").module.commands
    assert "debug fuzz" in commands(page)
    assert "debug fuzz" not in commands(replace(page, manifest=replace(page.manifest, graphs=("encoder",))))


def test_an_engine_that_was_not_run_is_marked():
    text = " ".join(Page(usual()).text.split())
    assert "39 passedtightest: quantization" in text and "26 passed on the graph" in text
    assert [engine.ran for engine in overview(version_report()).engines].count(True) == 3


def test_failures_show_their_log_and_command():
    page = Page(usual())
    assert "--target sm_120 --precision int8" in page.text and "Using PTX of a lower capability" in page.text


def test_the_page_needs_no_network_and_no_scripts():
    page = Page(usual())
    assert not {"script", "iframe", "img", "object", "form"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert addresses and all(value.startswith(("#", "data:,")) for value in addresses)
    assert not re.search(r"url\((?!#)", usual()) and "@import" not in usual()
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes


# Texts that stand for a number, and words of which a document has a fixed choice.
FIXED = ("inf", "nan", "-inf", "few", "runtime", "model")
KEPT = frozenset({
    "finding", "status", "precision", "stage", "name", "verdict", "created_at", "unit", "bound",
    "model", "version", "kind", "target", "backend", "suffix", "dtype", "product", "profiles",
})  # fmt: skip
# Texts that a document's codec takes in one form alone.
DIGEST = re.compile(r"[0-9a-f]{64}")


def hostile(value, keep=KEPT):
    """The same structure with every free text made hostile; of a quantization record, every text."""
    if isinstance(value, dict):
        inner_names = {key: frozenset() if key == "quantization" else keep for key in value}
        return {key: item if key in keep else hostile(item, inner_names[key]) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, keep) for item in value]
    return HOSTILE if isinstance(value, str) and value not in FIXED and not DIGEST.fullmatch(value) else value


def test_everything_is_escaped():
    page = Page(render(hostile(version_report())))
    assert "script" not in page.tags and HOSTILE in page.text
    assert not any(name.startswith("on") for name, _ in page.attributes)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["proven"], "1 engine proven"),
        (["proven", "proven", "refused"], "All 2 engines proven"),
        (["proven", "unproven"], "1 of 2 engines proven, 1 not yet run on their hardware"),
        (["failed", "failed"], "2 engines failed; there is none to pull"),
        (["refused"], "There is no engine to pull"),
    ],
)
def test_the_headline_summarizes_the_engines(statuses, expected):
    engine = version_report()["engines"][0]
    entries = [{**engine, "status": status} for status in statuses]
    assert overview({**version_report(), "engines": entries}).verdict["text"] == expected


def test_an_unmeasured_engine_that_ran_is_not_marked_as_never_run():
    report = bare()
    engine = {**report["engines"][0], "status": "unproven"}
    report = {**report, "engines": [engine]}
    blind_document = encode_document(unmeasured("engine", "y", "golden", "the same in all samples"))
    for item in report["reports"]:
        item["checks"] = [*(check for check in item["checks"] if check["passed"]), blind_document]
    page = render_texts(report)
    assert overview(report).verdict["text"] == "0 of 1 engine proven, 1 not measured in full"
    assert "1 not measured in full by the golden data" in page
    assert "never run on their hardware" not in page and "Prove the unproven engines" not in page


def test_a_minimal_version_renders():
    named_fields = {"model": "m", "version": "1", "created_at": "2026-01-01T00:00:00+00:00", "content": "0" * 64}
    page = render({**named_fields, "engines": [], "format": 1})
    assert "There is no engine to pull" in page


def test_a_failed_check_is_the_tightest_and_is_named():
    report = bare()
    broken_documents = [encode_document(check) for check in stage_checks("engine", 3.0, 22.0, passed=False)]
    report["reports"][0]["checks"] += broken_documents
    shown_page = overview(report)
    assert shown_page.engines[0].tightest.value == 3.0
    assert "✕ sqnr_db" in render_texts(report)


@pytest.mark.parametrize("name", ["nonfinite", "max_abs", "contract finite"])
def test_a_zero_check_at_zero_is_not_the_tightest(name):
    report = bare()
    report["reports"][0]["checks"] = [encode_document(Check("export", name, "y", "golden", 0.0, 0.0, True))]
    assert overview(report).engines[0].tightest is None
    report["reports"][0]["checks"] += [encode_document(Check("export", "cosine", "y", "golden", 1.0, 0.99, True))]
    assert overview(report).engines[0].tightest.name == "cosine"


def test_control_characters_are_shown_escaped():
    named_text = "logits\x1b[31m\u202e\x9b\x07"
    document = json.loads(json.dumps(version_report()).replace("logits", json.dumps(named_text)[1:-1]))
    page = render(document)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page)
    assert r"logits\x1b[31m\u202e\x9b\x07" in Page(page).text


def test_non_finite_values_are_shown():
    report = bare()
    for check, value in zip(report["reports"][0]["checks"], ("nan", "inf", "-inf", "inf"), strict=False):
        check["value"] = value
    text = Page(render_texts(report)).text
    assert "NaN" in text and "∞" in text


def test_equal_sets_of_checks_are_shown_once():
    stages = overview(version_report()).stages
    assert [len(group["units"]) for group in stages["export"]] == [24]
    assert stages["engine"][0]["title"] == "cpu fp32 onnxruntime"


def test_headroom_orders_checks_of_different_metrics():
    def check(name, value, limit, passed=True):
        return Check("engine", name, "y", "golden", value, limit, passed)

    assert headroom_db(check("sqnr_db", 30.0, 24.0)) == 6.0
    assert headroom_db(check("max_rel", 0.001, 0.01)) == pytest.approx(20)
    assert headroom_db(check("cosine", 0.999, 0.99)) == pytest.approx(20)
    assert headroom_db(check("sqnr_db", 3.0, 24.0, passed=False)) == float("-inf")
    assert headroom_db(check("contract finite", 0.0, 0.0)) == float("inf")


def test_values_have_units():
    assert metric_text(23.61, "sqnr_db") == "23.6 dB"
    assert metric_text(0.98333, "accuracy") == "0.9833"


def with_tasks(*checks: Check) -> dict:
    """The usual version whose engines have these task metrics, and their graphs the same values."""
    data = bare()
    for report in data["reports"]:
        kept_checks = [check for check in report["checks"] if check["stage"] != "task"]
        report["checks"] = kept_checks + [encode_document(check) for check in checks]
    values = {check.name: check.value for check in checks if check.case.startswith("golden")}
    return {**data, "metrics": dict.fromkeys(data["metrics"], values)}


def test_each_task_metric_has_a_section_with_its_limit_on_its_side():
    actual = with_tasks(
        Check("task", "equal_texts", "y", "golden, engine", 0.97, 0.9, True),
        Check("task", "character_error", "y", "golden, engine", 0.02, 0.01, False),
        Check("task", "si_sdr_db", "z", "golden, engine", 41.26, None, True),
        Check("task", "si_sdr_db", "z", "edges, engine", 3.0, None, True),
    )
    texts, errors, ratio = overview(actual).tasks
    assert (texts["title"], texts["limit"], texts["side"]) == ("equal_texts", 0.9, "floor")
    assert (errors["title"], errors["limit"], errors["side"]) == ("character_error", 0.01, "ceiling")
    assert all(point["passed"] for point in (*texts["points"], *ratio["points"]))
    assert not any(point["passed"] for point in errors["points"])
    assert {point["kind"] for point in texts["points"]} == {"graph", "engine"}
    assert ratio["limit"] is None and {point["value"] for point in ratio["points"]} == {41.26}
    page = Page(render_texts(actual)).text
    assert "character_error, ceiling 0.01" in page and "equal_texts, floor 0.9" in page and "41.3 dB" in page


def test_a_limit_lifted_by_a_task_metric_is_marked():
    data = bare()
    for report in data["reports"]:
        for check in report["checks"]:
            if check["stage"] == "engine" and check["name"] == "sqnr_db":
                check |= {"limit": None, "waived": 45.0, "value": 41.0}
    assert "limit 45.0 dB not applied" in Page(render_texts(data)).text


def test_joints_are_side_by_side_and_name_the_place_of_drift():
    rows = {row.title: row for row in overview(version_report()).beside}
    int8 = rows["cpu int8 onnxruntime"]
    values = {stage: cell.worst.value for stage, cell in int8.cells.items()}
    assert values == {"export": 127.3, "quantization": 23.6, "engine": 35.6}
    assert int8.cause == "nearly all at quantization" and rows["int8"].more == "5 units"
    assert rows["fp32"].cells["engine"] is None


def test_a_failure_names_its_stage_and_comes_first():
    report = bare()
    broken_documents = [encode_document(check) for check in stage_checks("engine", 3.0, 22.0, passed=False)]
    report["reports"][0]["checks"] += broken_documents
    report["reports"][1]["checks"].append(
        encode_document(Check("engine", "runs", "", "all", None, None, False, "it died"))
    )
    rows = overview(report).beside
    assert [row.cause for row in rows[:2]] == ["fails at engine"] * 2 and rows[2].cause != "fails at engine"
    text = " ".join(Page(render_texts(report)).text.split())
    assert "every output" in text and "✕ 3.0 dB" in text


def test_a_broken_contract_keeps_nearness_green_and_shows_the_failure():
    report = bare()
    report["reports"] = report["reports"][:1]
    promises = [("contract kl", 3.0, 0.01), ("contract seeds", 1e-4, 1e-3), ("contract batch size", 20.0, 80.0)]
    checks = [Check("engine", name, "logits", "golden", *numbers, False, "the graph's") for name, *numbers in promises]
    report["reports"][0]["checks"] += [encode_document(check) for check in checks]
    (row,) = overview(report).beside
    assert row.cause == "fails at engine" and row.cells["engine"].worst.name == "contract kl"
    page = render(report)
    text = " ".join(Page(page).text.split())
    assert "✕ 3 contract kl ≤ 0.01" in text and "What failed" in text and text.index("✕ contract seeds") > 0
    drift = page[page.index('id="drift-title"') : page.index("<h2>Distribution")]
    assert 'class="level failed"' not in drift and drift.count('class="level proven"') == 3


def test_a_limit_is_shown_as_its_bound():
    cases = [("contract kl", 3.0, 0.01, False, "≤"), ("contract seeds", 1e-4, 1e-3, False, "≥")]
    cases += [("max_rel", 0.1, 0.6, True, "≤"), ("sqnr_db", 99.0, 80.0, True, "≥"), ("nonfinite", 0.0, 0.0, True, "≤")]
    cases += [("agreement", 1.0, 1.0, True, "≥"), ("sqnr_db", math.nan, 80.0, False, "≥")]
    for name, value, limit, is_passed, sign in cases:
        assert format_bound(Check("engine", name, "y", "golden", value, limit, is_passed)) == sign, name
    for name, sign in (("equal_texts", "≥"), ("character_error", "≤")):
        assert format_bound(Check("task", name, "y", "golden", 0.5, 0.5, True)) == sign


def test_worst_cases_name_sample_place_expected_and_actual():
    text = " ".join(Page(usual().replace("<td", " <td").replace("<span", " <span")).text.split())
    assert "int8 graph logits golden 2, sample 17 14.6 dB [17, 3] 4.218443 4.813067 0.595" in text
    assert "batch=32" in text
    rows = worst_cases(decode(version_report(), VersionDocument).reports)
    assert [row.worst.sample for row in rows] == [17] * 7 + [5] * 7, "the worst of each comes first"
    assert all(
        upper_row.worst.badness >= lower_row.worst.badness
        for upper_row, lower_row in pairwise(rows)
        if upper_row.worst.sample == lower_row.worst.sample
    )


def test_the_axes_of_each_picture_have_ticks_and_names():
    pictures = re.findall(r'<svg(?! class="level).*?</svg>', usual(), re.DOTALL)
    shares = "0 %, 25 %, 50 %, 75 %, 100 %"
    expected = [
        ("SQNR of a sample; further left is worse", "125 dB", shares),
        ("absolute error, logarithmic; further right is worse", "1e−9", shares),  # noqa: RUF001
        ("latency of a run, logarithmic", "1 ms", shares),
        ("share of the multiplications in int8", shares, "10 dB"),
    ]
    for picture, words in zip(pictures, expected, strict=False):
        texts = ", ".join(re.findall(r"<text[^>]*>([^<]*)<", picture))
        assert all(word in texts for word in words), texts


def test_reports_without_spreads_have_no_distributions():
    report = bare()
    for item in report["reports"]:
        item["spreads"] = []
    page = render(report)
    assert "Distribution of errors" not in page and "Worst cases" not in page and "Drift by stage" in page


def test_zero_and_non_finite_errors_are_drawn_and_reported():
    report = bare()
    first_spread, spread = report["reports"][0]["spreads"]
    report["reports"] = report["reports"][:1]
    first_spread |= {"abs_error": [0.0] * 101, "sqnr_db": ["inf"] * 60, "worst": []}
    spread["worst"][0] |= {"actual": "nan", "sqnr_db": "nan"}
    text = " ".join(Page(render(report)).text.split())
    assert "Equal in every bit: export." in text and "not finite" in text and "NaN" in text
    spread |= {"abs_error": [], "sqnr_db": [], "worst": [{**spread["worst"][0], "sqnr_db": None, "unequal": 3}]}
    assert "3 unequal" in render(report)


def test_failures_have_their_repeating_command():
    report = bare()
    report["engines"][0] |= {"status": "failed"}
    text = render_texts(report)
    commands = ("validate digits@14 --target cpu", "debug attribute digits@14 --target cpu --precision fp32")
    assert "\n".join(f"enginesmith {command}" for command in commands) in text
    report["reports"][0]["checks"].append(encode_document(stage_checks("engine", 3.0, 22.0, passed=False)[3]))
    report["engines"][0] |= {"digest": None}
    assert "enginesmith build SPEC.yaml --target cpu --precision fp32 --backend onnxruntime" in render_texts(report)


def test_an_engine_has_its_graphs_colour_and_graphs_have_unique_names():
    report = bare()
    int8 = [item for item in report["reports"] if item["precision"] == "int8"]
    int8[-1]["spreads"][1] |= {"samples": 59}
    curves = curves_of(distributions([Report.from_json(item) for item in int8])[0]["pictures"][0])
    assert list(curves) == ["export", "int8 onnxruntime, int8 tensorrt-rtx graph", "int8 tensorrt-rtx graph", ENGINE]
    assert curves[ENGINE] == curves["int8 onnxruntime, int8 tensorrt-rtx graph"] != curves["int8 tensorrt-rtx graph"]


ENGINE = "cpu int8 onnxruntime"


def curves_of(picture: str) -> dict[str, str]:
    lines = ElementTree.fromstring(picture).findall(".//g[@class='curve']")
    return {item.find("title").text: re.search(r"stroke: ([^;]*)", item.find("path").get("style"))[1] for item in lines}


def test_joints_that_are_both_exact_have_no_drift():
    report = bare()
    report["reports"] = report["reports"][:1]
    for check in report["reports"][0]["checks"]:
        check["value"] = "inf" if check["name"] == "sqnr_db" else check["value"]
    assert overview(report).beside[0].cause == ""
