import math
from itertools import islice

import numpy as np
import pytest

from enginesmith.core.reports.proof import CUT_SHORT, UNMEASURED, judge
from enginesmith.core.types import Dim, TensorSpec
from tests.validation.calls.sessions import (
    BUDGET,
    GRID_DIMS,
    GRID_GOLDEN,
    GRID_SPECS,
    SEEN,
    Clock,
    Grid,
    Raising,
    failed,
    tried,
)
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, Fault, Linear
from validation.calls.checks import (
    CALLS,
    MIXTURES,
    MOST_ENUMERATED,
    SIZES,
    VALUES_SEED,
    Allowance,
    Counts,
    Tries,
    call_checks,
    inner_sizes,
    magnitude_checks,
)
from validation.comparison.sessions import golden_drifts
from validation.fuzz.cases import Groups, parse_only
from validation.fuzz.run import FuzzSides, fuzz
from validation.golden.golden_set import GoldenSet, edge_sizes, freeze
from validation.limits.budget import Budgets, StagedLimits, default_budget

GRID_SEEN = freeze(GRID_GOLDEN, GRID_SPECS, GRID_DIMS, Grid().run)
GRID = {"golden": GRID_SEEN, "shapes": (GRID_SPECS, GRID_DIMS)}


def wrong_at(*sizes: int) -> Linear:
    return Linear(lambda x, y: np.roll(y, 1, -1) if len(x) in sizes else y)


@pytest.mark.parametrize("size", [2, 7, 8, 15])
def test_an_answer_that_is_wrong_at_one_inner_size_fails_and_fuzz_repeats_it(size: int) -> None:
    checks = tried(wrong_at(size))
    assert failed(checks) == {"sizes"}
    result = checks["sizes"]
    assert (result.case, result.value, result.limit) == (f"batch={size} values=realistic", 1.0, 0.0)
    assert "of y at" in result.note and "12 of 12 sizes" in result.note
    pair = FuzzSides(Linear(), wrong_at(size), "fp32", StagedLimits.of(BUDGET), BUDGET, usual=golden_drifts(SEEN))
    only_case = parse_only(result.case, DIMS)
    (second_case,) = fuzz([only_case], SPECS, DIMS, GOLDEN, pair, VALUES_SEED, []).cases
    assert second_case.outcome == "failed" and second_case.reason in result.note


def test_inner_sizes_are_multiples() -> None:
    dims = (Dim("height", 64, 96, 192, multiple=32), Dim("batch", 1, 1, 2))
    edges = [tuple(sizes.items()) for sizes in edge_sizes([TensorSpec("x", "float32", ("height", "batch"))], dims)]
    actual = list(inner_sizes(dims, edges, 0))
    assert {sizes["height"] for sizes in actual} == {128, 160} and len(actual) == 4


class Detector(Linear):
    """20 boxes of 0 to 640 with a score of 0 to 1, or logits of 288 to 289, of each sample. at: sizes with a fault."""

    outputs = (TensorSpec("y", "float32", ("batch", 20, 5)),)

    def __init__(self, scale: np.ndarray, offset: float, fault: Fault = lambda x, y: y, *at: int) -> None:
        super().__init__(lambda x, y: fault(x, y) if len(x) in at else y)
        self.scale, self.offset = scale, offset

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        y = np.abs(np.sin(1e3 * x[:, :1] * np.arange(1, 101))).reshape(-1, 20, 5)
        return {"y": self.fault(x, (self.offset + y * self.scale).astype(np.float32))}


BOXES = np.array([640, 640, 640, 640, 1])
SUBTLE = {
    "scores": (BOXES, 0.0, lambda x, y: y * np.where(np.arange(5) == 4, np.sin(7e3 * y), 1), "slice_sqnr_db"),
    "an offset alone": (np.ones(5), 288.0, lambda x, y: 0 * y + 288.5, "centered_sqnr_db"),
}


@pytest.mark.parametrize("size", [2, 7, 15])
@pytest.mark.parametrize("fault", SUBTLE)
def test_one_column_and_an_offset_are_judged_at_inner_sizes_as_at_edges(fault: str, size: int) -> None:
    scale, offset, change, name = SUBTLE[fault]
    right_detector, limits = Detector(scale, offset), Budgets(default_budget("engine", "fp16"))
    entries = {"golden": freeze(GOLDEN, SPECS, DIMS, right_detector.run), "budgets": limits}
    result = tried(Detector(scale, offset, change, size), right_detector, **entries)
    assert failed(result) == {"sizes"}
    assert result["sizes"].note.startswith(f"wrong at batch={size}: engine {name} of y at batch={size} ")
    rounded_detector = Detector(scale, offset, lambda x, y: y * (1 + 1e-5 * np.sin(1e5 * y)), *range(17))
    assert failed(tried(rounded_detector, right_detector, **entries)) == set()


def test_a_fault_at_7_by_13_is_found_in_a_grid_that_is_enumerated() -> None:
    checks = tried(Grid((7, 13)), Grid(), **GRID)
    assert failed(checks) == {"sizes"}
    assert checks["sizes"].case in [f"batch={batch} h=7 w=13 values=realistic" for batch in (1, 2)]
    of = 2 * 13 * 13 - len(edge_sizes(GRID_SPECS, GRID_DIMS))
    assert f"{of} of {of} sizes" in checks["sizes"].note
    assert checks["sizes"].value == 2
    assert failed(tried(Grid(), Grid(), **GRID)) == set()


def test_several_wrong_sizes_are_counted_and_the_first_ones_named() -> None:
    result = tried(wrong_at(6, 7, 8))["sizes"]
    assert result.value == 3
    named_case = result.case + result.note
    assert all(f"batch={size}" in named_case for size in (6, 7, 8))


def test_a_size_that_the_graph_cannot_run_is_reported_and_not_a_fault() -> None:
    def odd(height: int) -> bool:
        return height % 2 == 1

    checks = tried(Grid(refuses=odd), Grid(refuses=odd), **GRID)
    assert failed(checks) == set()
    assert "not judged: the graph itself does not run" in checks["sizes"].note
    assert failed(tried(Grid(refuses=odd), Grid(), **GRID)) == {"sizes"}
    empty_grid = Grid(refuses=lambda height: True)
    checks = tried(empty_grid, Grid(refuses=lambda height: True), **GRID)
    assert "sizes" not in checks
    assert "runs at none of the" in checks[UNMEASURED].note


@pytest.mark.parametrize("what", [ValueError("no kernel"), None])
def test_an_exception_at_a_size_is_a_failed_check(what: object) -> None:
    checks = tried(Raising(what, lambda n: n == 11))
    assert failed(checks) == {"sizes"}


def test_new_sizes_come_once_each_in_the_order_of_the_seed() -> None:
    edges = [tuple(sizes.items()) for sizes in edge_sizes(GRID_SPECS, GRID_DIMS)]
    order = [tuple(sizes.items()) for sizes in inner_sizes(GRID_DIMS, edges, 3)]
    assert len(order) == len(set(order)) == 2 * 13 * 13 - len(edges)
    assert not set(order) & set(edges)
    assert order == [tuple(sizes.items()) for sizes in inner_sizes(GRID_DIMS, edges, 3)]
    assert order != [tuple(sizes.items()) for sizes in inner_sizes(GRID_DIMS, edges, 4)]


@pytest.mark.parametrize("seed", range(5))
def test_a_large_grid_covers_each_size_of_each_dim_first(seed: int) -> None:
    dims = (Dim("batch", 1, 4, 8), Dim("length", 1, 32, 512))
    first_items = list(islice(inner_sizes(dims, [], seed), 512))
    assert {sizes["batch"] for sizes in first_items[:8]} == set(range(1, 9))
    assert {sizes["length"] for sizes in first_items} == set(range(1, 513))
    drawn_sizes = list(inner_sizes((*dims, Dim("width", 1, 8, 1 << 40)), [], seed))
    assert MOST_ENUMERATED < len(drawn_sizes) <= 2 * MOST_ENUMERATED
    assert all(1 <= sizes["width"] <= 1 << 40 for sizes in drawn_sizes)


def test_a_model_without_dims_has_no_sizes_and_its_calls_are_repeated() -> None:
    specs = tuple(type(spec)(spec.name, spec.dtype, (4, 4)) for spec in SPECS)
    golden = freeze(GOLDEN, specs, (), Linear().run)
    checks = tried(Linear(), golden=golden, shapes=(specs, ()))
    assert set(checks) == {"calls repeated", "calls outputs", "calls inputs", "calls refilled"}
    assert failed(checks) == set()
    full_report = tried(wrong_at(4), golden=golden, shapes=(specs, ()))
    assert failed(full_report) == set(), "always the same: no business of calls"


def test_the_time_limit_holds_and_the_report_says_what_was_tried() -> None:
    def timed(reference_s: float, candidate_s: float, seconds: float) -> tuple[Clock, str, str]:
        clock = Clock()
        reference = clock.timed(Linear(), "graph", reference_s)
        candidate = clock.timed(Linear(), "engine", candidate_s)
        checks = tried(candidate, reference, seconds=seconds, clock=clock)
        assert failed(checks) == set()
        return clock, checks["sizes"].note, checks["calls repeated"].note

    clock, sizes, calls = timed(1.0, 0.01, seconds=10.0)  # the graph is slow: half of the time is for sizes
    assert sizes.startswith("4 of 12 sizes in 4 s")
    assert clock.calls.count("graph") == 4
    assert clock.now == pytest.approx(10.1, abs=0.05)
    assert "calls with 8 inputs in 6 s" in calls
    clock, sizes, calls = timed(60.0, 60.0, seconds=1.0)  # both are: the least of each
    assert (clock.calls.count("graph"), clock.calls.count("engine")) == (1, 1 + CALLS.least + 5)
    assert f"{CALLS.least} calls" in calls and "1 of 100 calls would be missed with a probability of 0.85" in calls
    clock, sizes, calls = timed(1e-4, 1e-4, seconds=1.0)  # cheap: all sizes, and the rest is for calls
    assert "12 of 12 sizes" in sizes
    assert clock.calls.count("engine") > 9000
    assert clock.now == pytest.approx(1.0, abs=0.01)


def test_a_time_limit_shortens_the_order_and_does_not_change_it() -> None:
    def order(seconds: float) -> list[tuple[bytes, int]]:
        seen_data: list[tuple[bytes, int]] = []

        class Watched(Linear):
            def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                seen_data.append((inputs["x"].tobytes(), len(inputs["x"])))
                return super().run(inputs)

        tried(Watched(), seconds=seconds, seed=5)
        return seen_data[20:-4]  # after the first calls and the sizes, before arrays are refilled

    short_order, long_order = order(0.1), order(0.4)
    assert len(short_order) < len(long_order)
    assert long_order[: len(short_order)] == short_order
    assert len({size for _, size in short_order}) == 4 and len({data for data, _ in short_order}) == 8


def count_tries(
    counts: Counts, each_s: float, compared_s: float = 0.0, busy: float = 1.0, done: int = 0
) -> tuple[int, bool]:
    """Tries made in so much CPU time, and whether time ended them. busy: CPU time. done: tries before, of no time."""
    clock, wall = Clock(), Clock()
    tries = Tries(counts, Allowance(None, compared_s, clock, wall), done=done)
    while tries.more(done):
        done += 1
        clock.now, wall.now = clock.now + each_s, wall.now + each_s * busy
    return done, tries.is_cut


@pytest.mark.parametrize("counts", [SIZES, CALLS])
def test_cheap_tries_are_limited_by_number_and_costly_ones_by_cpu_time(counts: Counts) -> None:
    cheap_s = counts.seconds / counts.most
    for busy_number in (1, 7):
        assert count_tries(counts, cheap_s, busy=busy_number) == count_tries(counts, 1.4 * cheap_s, 1.0, busy_number)
        assert count_tries(counts, cheap_s, busy=busy_number) == (counts.most, False)
        assert count_tries(counts, 100.0, busy=busy_number) == (counts.least, False)
        dear_counts = {count_tries(counts, each_s, 6400 / counts.share, busy_number) for each_s in (80, 100, 120)}
        assert dear_counts == {(64, False)}, "a step of two hides what differs between machines"
    assert count_tries(counts, cheap_s, busy=50)[1], "a machine that is busier than that is told of"
    assert count_tries(MIXTURES, MIXTURES.seconds / 100) == (3 * 32, False)
    dear_s = CALLS.seconds / 14
    assert [count_tries(CALLS, dear_s, done=done)[0] for done in (0, 8, 18)] == [16, 16, 19], "those before cost none"


def test_tries_that_the_time_limit_ended_are_in_the_report_and_the_verdict() -> None:
    wall = Clock()
    pair = FuzzSides(Linear(), wall.timed(Linear(), "", 60.0), "fp32", StagedLimits.of(BUDGET), BUDGET)
    allowance = Allowance(None, 0.0, lambda: 0.0, wall)
    other_check = magnitude_checks(pair, (SPECS, DIMS), SEEN, allowance)
    checks = list(call_checks(pair, (SPECS, DIMS), SEEN, 0, allowance, lambda: True, others=other_check))
    assert [check.case for check in checks if check.name == CUT_SHORT] == ["mixed samples", "sizes", "repeated calls"]
    assert all("busy" not in check.note for check in checks), "which was not measured"
    note = "not judged: mixed samples after 41, sizes after 1, repeated calls after 16"
    assert judge(checks) == ("proven", f"{len(checks)} checks passed; {note}")


def test_groups_of_a_stored_golden_set_are_read_on_demand(tmp_path) -> None:
    many_fields = [{"x": np.full((4, 4), index, np.float32)} for index in range(40)]
    stored_golden = freeze(many_fields, SPECS, DIMS, Linear().run)
    stored_golden.save(tmp_path / "golden.safetensors")
    groups = Groups(GoldenSet.load(tmp_path / "golden.safetensors"))
    assert len(groups) == 32
    assert [float(groups[index]["x"][0, 0]) for index in (0, 31, -1)] == [0, 31, 31]
    assert groups[3] is groups[3]
    assert math.prod(groups[0]["x"].shape) == 16
