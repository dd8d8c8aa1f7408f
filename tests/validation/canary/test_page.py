import re
from dataclasses import replace

import numpy as np
import pytest

from tests.validation.canary.reports import report
from tests.validation.canary.sides import side
from tests.validation.reporting.test_html import HOSTILE, Page
from validation.canary.judging.criteria import Criterion, describe, describe_interval
from validation.canary.judging.judge import judge
from validation.canary.judging.thresholds import Thresholds
from validation.canary.page import over_time_svg, render
from validation.canary.report import LatencyCourses, TrafficReplayed
from validation.statistics.rates import CanaryEvidence


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return report(tmp_path_factory.mktemp("canary"), 2500, failing=0.02, slower=0.01)


@pytest.fixture(scope="module")
def drawn(failed):
    return render(failed)


def hostile(document):
    """Everything that somebody may have written, made hostile."""
    seen_view = document.view
    errors = tuple(replace(row, error=HOSTILE) for row in seen_view.errors)
    worst_rows = tuple(replace(row, request=HOSTILE) for row in seen_view.worst)
    sides = {
        side: replace(getattr(document, side), model=HOSTILE, version=HOSTILE, target=HOSTILE, backend=HOSTILE)
        for side in ("candidate", "baseline")
    }
    texts = {"reason": HOSTILE, "notes": (HOSTILE,), "thresholds_from": HOSTILE, "host": {HOSTILE: HOSTILE}}
    view, traffic = replace(seen_view, errors=errors, worst=worst_rows), replace(document.traffic, made=HOSTILE)
    return replace(document, view=view, traffic=traffic, **texts, **sides)


def test_the_verdict_comes_first_on_a_complete_page(failed, drawn):
    text = " ".join(Page(drawn).text.split())
    assert (
        text.index("FAIL: the candidate is worse")
        < text.index("Criteria")
        < text.index("slowdown (90 % confidence interval)")
    )
    for output in ("latency p50", "latency p99", "errors", "answers that differ", "out of memory", "tiny@2 cpu int8"):
        assert output in text
    assert failed.digest in text and "common language effect size" in text and "enginesmith promote" not in text


def test_pictures_are_embedded_and_nothing_is_fetched(failed, drawn):
    page = Page(drawn)
    assert page.tags.count("svg") == 3
    labels = "worse by, in multiples of the margin", "latency, logarithmic"
    assert all(label in page.text for label in labels) and "25 %" in page.text
    assert all(item.name in drawn for item in failed.criteria)
    assert not {"script", "iframe", "img", "object", "form"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert {address for address in addresses if not address.startswith("#")} == {"data:,"}
    assert not re.search(r"url\((?!#)", drawn) and "@import" not in drawn
    for path in re.findall(r' d="([^"]*)"', drawn):
        assert path and "nan" not in path and "inf" not in path


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(299.0, "0 s, 50 s"), (300.0, "0 min, 1 min"), (7199.0, "0 min, 20 min"), (7200.0, "0 h, 0.5 h")],
)
def test_time_axes_have_round_ticks_in_a_fitting_unit(most, ticks):
    course = ((0.0, 0.01, 0.02), (most, 0.01, 0.03))
    texts = re.findall(r"<text[^>]*>([^<]*)<", over_time_svg(LatencyCourses(course, course)))
    assert ", ".join(texts[:2]) == ticks and {"time since the first request", "10 ms", "30 ms"} <= {*texts}


def test_everything_is_escaped(failed):
    page = Page(render(hostile(failed)))
    assert "script" not in page.tags and HOSTILE in page.text
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_a_canary_with_almost_no_requests_has_a_page(tmp_path):
    page = Page(render(report(tmp_path, 3)))
    assert "INSUFFICIENT: this much data decides neither way" in page.text


def test_equal_latencies_are_reported_as_equal(tmp_path):
    """What a clock of coarse steps leaves: no interval, and no '-100 % to +inf %'."""
    other_side = side(np.full(2000, 0.01))
    verdicts = judge(CanaryEvidence(other_side, other_side, True), replicates=50)
    line = (
        "latency p50: +0 % (without bounds), margin +2 %; 2000 requests can show no difference; 2000 of 2000 latencies"
    )
    assert describe(verdicts.criteria[0]) == f"{line} are equal: record them with a finer clock"
    document = report(tmp_path, 60)
    criteria = tuple(item.without_infinities() for item in verdicts.criteria)
    text = " ".join(Page(render(replace(document, criteria=criteria))).text.split())
    assert "+0 % (without bounds)" in text and "inf" not in text.replace("information", "") and "unknown" not in text


def test_an_interval_known_on_one_side_names_the_side():
    item = Criterion("latency p50", "latency", 0.02, "INSUFFICIENT", low=-1.0, high=0.012)
    assert describe_interval(item) == "at most +1.2 %"
    assert describe_interval(replace(item, low=0.03, high=None)) == "at least +3 %"
    assert describe_interval(replace(item, low=0.0)) == "+0 % to +1.2 %"


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "1 request would have shown an equal candidate to be within +97.5 %"),
        (200, "200 requests would have shown +5.64 % or more, and an equal candidate to be within +1.83 %"),
        (1000, "1000 requests would have shown +1.25 % or more, and an equal candidate to be within +0.368 %"),
    ],
)
def test_the_detectable_difference_is_a_sentence(count, message):
    other_side = side(np.ones(count))
    result = judge(CanaryEvidence(other_side, other_side, True), Thresholds({}, 0.001, None), replicates=1).criteria[0]
    assert message in describe(result)


def test_equal_answers_are_not_listed_as_most_different(failed):
    seen_view = failed.view
    rows = tuple(replace(row, sqnr_db=level) for row, level in zip(seen_view.worst, (-999.0, 3.0, 999.0), strict=False))
    text = " ".join(Page(render(replace(failed, view=replace(seen_view, worst=rows)))).text.split())
    assert "nothing in common" in text and "3.0 dB" in text and "999" not in text
    text = Page(render(replace(failed, view=replace(seen_view, worst=rows[2:])))).text
    assert "every answer that was compared is equal" in text


def test_only_replayed_traffic_shows_the_replay_command(failed, drawn):
    command = "enginesmith canary run --candidate tiny@2 --baseline tiny@1 --target cpu --precision int8 --scale 1.0"
    assert f"{command} --traffic TRAFFIC" in Page(drawn).text
    assert "enginesmith canary run" not in Page(render(replace(failed, traffic=TrafficReplayed()))).text
