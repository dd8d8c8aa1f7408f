"""Which engine is recommended: each rule of docs/reference/backends.md by a case."""

from dataclasses import replace

import pytest

from pipeline.operations.compare import report
from pipeline.operations.compare.run import _compare_alone, recommend

FLEET = ("cpu", "sm_80", "sm_89")


def engine(unit: str, median_s: float = 1e-3, **changes) -> report.EngineFacts:
    backend, precision = unit.split()[-1], "fp32"
    usual = {
        "low_s": 0.95 * median_s,
        "high_s": 1.05 * median_s,
        "load_s": 0.1,
        "memory_bytes": 10 << 20,
        "size_bytes": 1 << 20,
        "build_s": 1.0,
        "sqnr_db": 100.0,
        "covers": ("cpu",),
    }
    return report.EngineFacts(unit, backend, precision, "proven", median_s=median_s, **{**usual, **changes})


def pair(first: str, second: str, verdict: str, ratio: float = 0.9) -> report.PairedComparison:
    return report.PairedComparison(first, second, verdict, ratio, 0.97 * ratio, 1.03 * ratio, 0.04)


SAME = "no difference shown"


def test_the_fastest_is_taken_where_its_lead_was_shown():
    told = recommend([engine("a", 2e-3), engine("b", 1e-3)], [pair("b", "a", "faster", 0.5)], FLEET)
    assert told.unit == "b" and told.ties == ()
    assert told.reason == "the fastest, 1 ms per run; the next, a, takes 2 times as long (95 %: 1.94 to 2.06)"


def test_a_lead_that_no_duel_measured_has_no_interval():
    told = recommend(
        [engine("a", 9e-3), engine("b", 1e-3)], [report.PairedComparison("b", "a", "faster", 1 / 9)], FLEET
    )
    expected = "the fastest, 1 ms per run; the next, a, takes 9 times as long (by the times that each had alone)"
    assert told.reason == expected


@pytest.mark.parametrize(("median_s", "verdict"), [(1.2e-3, "faster"), (1.05e-3, SAME), (0.5e-3, SAME)])
def test_of_engines_that_ran_alone_the_first_is_faster_where_the_intervals_are_apart(median_s, verdict):
    found = _compare_alone(engine("a"), engine("b", median_s))
    assert found == report.PairedComparison("a", "b", verdict, 1e-3 / median_s)
    unknown = _compare_alone(engine("a"), engine("b", median_s, low_s=None))
    assert unknown.verdict == SAME


def test_the_fastest_is_whom_the_duels_say_and_not_the_times_alone():
    facts = [engine("a", 0.9e-3), engine("b", 1e-3)]
    assert report.find_fastest(facts).unit == "a"
    assert recommend(facts, [pair("b", "a", "faster")], FLEET).unit == "b"


@pytest.mark.parametrize(
    ("metric", "worse", "better", "words"),
    [
        ("accuracy", 0.98, 0.99, "accuracy 0.9900"),
        ("character_error", 0.02, 0.01, "character_error 0.0100"),
        ("si_sdr_db", 20.0, 30.0, "si_sdr_db 30.0 dB"),
    ],
)
def test_the_better_value_of_a_task_metric_decides_whichever_side_is_better(metric, worse, better, words):
    engines = [engine("a", metrics={metric: worse}), engine("b", 1.02e-3, metrics={metric: better})]
    told = recommend(engines, [pair("a", "b", SAME)], FLEET)
    assert told.unit == "b" and f"nearer to the original ({words}, SQNR 100 dB)" in told.reason
    near = [engine("a", metrics={"si_sdr_db": 20.0}), engine("b", 1.02e-3, metrics={"si_sdr_db": 21.0})]
    assert recommend(near, [pair("a", "b", SAME)], FLEET).unit == "a"


@pytest.mark.parametrize(
    ("better", "words"),
    [
        ({"covers": FLEET}, "builds for 3 of the fleet's 3 targets"),
        ({"metrics": {"accuracy": 0.99}}, "nearer to the original (accuracy 0.9900, SQNR 100 dB)"),
        ({"sqnr_db": 120.0}, "nearer to the original (SQNR 120 dB)"),
        ({"build_s": 0.4}, "builds in 400 ms"),
    ],
)
def test_between_engines_that_are_as_fast_something_else_decides(better, words):
    slower = engine("b", 1.02e-3, **better)
    told = recommend([engine("a"), slower], [pair("a", "b", SAME)], FLEET)
    assert told.unit == "b" and told.ties == ("a",)
    assert words in told.reason and "no difference in speed shown to a" in told.reason


def test_what_was_too_noisy_to_tell_is_not_as_fast_and_the_answer_says_so():
    """An engine that may take 26 times as long is not taken because it serves more of the fleet."""
    noisy = report.PairedComparison("a", "b", SAME, 0.26, 0.039, 1.737, 12.0)
    told = recommend([engine("a"), engine("b", 37e-3, covers=FLEET)], [noisy], FLEET)
    assert told.unit == "a" and told.ties == ()
    assert told.reason == "the least median, 1 ms per run; the runs were too noisy to tell whether b may be as fast"
    assert report.describe_pair(noisy).startswith("too noisy to tell: a against b: 0.260 times the time")
    assert report.describe_pair(noisy).endswith("a difference of 1,200 % would have been shown")


def test_the_axes_come_in_their_order():
    """Fleet before accuracy before rebuilds."""
    worst = engine("a")
    ladder = [{"build_s": 0.1}, {"sqnr_db": 150.0}, {"covers": FLEET}]
    for index, better in enumerate(ladder[1:], 1):
        below = replace(worst, unit="below", **ladder[index - 1])
        above = replace(worst, unit="above", **better)
        duels = [pair("a", "below", SAME), pair("a", "above", SAME)]
        assert recommend([worst, below, above], duels, FLEET).unit == "above", better


def test_differences_too_small_to_matter_decide_nothing():
    near = engine("b", 1.01e-3, sqnr_db=104.0, build_s=0.7, metrics={})
    told = recommend([engine("a"), near], [pair("a", "b", SAME)], FLEET)
    assert told.unit == "a" and "use either" in told.reason and told.ties == ("b",)


def test_a_faster_engine_beats_every_other_axis():
    other = engine(
        "b",
        2e-3,
        covers=FLEET,
        sqnr_db=140.0,
        metrics={"accuracy": 0.99},
        build_s=0.25,
        load_s=0.01,
        memory_bytes=1 << 20,
    )
    fast = engine("a", 1e-3, metrics={"accuracy": 0.98}, build_s=10.0)
    assert recommend([fast, other], [pair("a", "b", "faster", 0.5)], FLEET).unit == "a"


def test_what_failed_or_is_unproven_is_never_taken_however_fast_or_good():
    bad = replace(engine("b", 1e-6, covers=FLEET), status="failed", reason="SQNR")
    unproven = replace(engine("c", 1e-6), status="unproven", reason="no sm_89 GPU")
    told = recommend([engine("a"), bad, unproven], [], FLEET)
    assert told.unit == "a" and told.reason.startswith("the only engine that is proven here")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([], "no installed backend builds for this target"),
        ([report.EngineFacts("u", "b", "fp32", "failed", "SQNR is 3 dB")], "no engine passed: u: SQNR is 3 dB"),
        ([report.EngineFacts("u", "b", "fp32", "refused", "no FP8")], "no engine passed: u: no FP8"),
        (
            [report.EngineFacts("u", "b", "fp32", "unproven", "no sm_89 GPU")],
            "nothing runs here: u: no sm_89 GPU; compare on a node",
        ),
    ],
)
def test_with_nothing_to_take_the_reason_says_why(facts, words):
    told = recommend(facts, [], FLEET)
    assert told.unit is None and words in told.reason


def test_a_leader_that_is_still_beaten_is_no_more_than_as_fast():
    """After two rounds the duels may form a circle: then nothing was shown."""
    told = recommend([engine("a"), engine("b", covers=FLEET)], [pair("a", "b", "slower", 1.05)], FLEET)
    assert told.unit == "b"


def test_a_pair_swapped_says_the_same():
    swapped = report.PairedComparison("a", "b", "faster", 0.5, 0.4, 0.8, 0.1).swap()
    assert swapped == report.PairedComparison("b", "a", "slower", 2.0, 1.25, 2.5, 0.1)
    assert report.PairedComparison("a", "b", SAME).swap() == report.PairedComparison("b", "a", SAME)


def test_engines_are_ranked_by_their_runtimes_where_all_of_them_can_be_and_by_the_sessions_else():
    own = report.RuntimeMedian(4e-4, 3e-4, 5e-4)
    first, second = engine("cpu fp32 a", 1e-3, runtime=own), engine("cpu fp32 b", 9e-4)
    failed = report.EngineFacts("cpu int8 a", "a", "int8", "failed", "why")
    assert [item.timed for item in report.rank_alike([first, second, failed])] == ["session"] * 3
    alone = report.rank_alike([first, failed])
    assert (alone[0].timed, alone[0].median_s, alone[0].low_s) == ("runtime", 4e-4, 3e-4)
    both = report.rank_alike([first, engine("cpu fp32 b", 9e-4, runtime=replace(own, median_s=8e-4))])
    assert report.find_fastest(both) == both[0]
