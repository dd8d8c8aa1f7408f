from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from enginesmith.core.codec import encode_document
from enginesmith.core.errors import InputError, ModelError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Dim, TensorSpec
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, WEIGHTS, Fault, Linear
from validation.fuzz import cases, run
from validation.fuzz.cases import VALUES, FuzzCase, boundaries, draw, find_masks, just_outside, make, parse_only
from validation.fuzz.run import FuzzedCase, FuzzOutcome, FuzzReport, FuzzSides, _list_sound, excuse_ties, fuzz, shrink
from validation.golden.golden_set import freeze
from validation.limits.budget import Budgets, OutputLimits, StagedLimits, default_budget
from validation.limits.rounding import Decisions

BUDGET, BESIDE_NAN = default_budget("engine", "fp32"), FuzzCase((("batch", 16),), "nan")


def tried(candidate: Linear, seed: int = 0, count: int = 24, reference: Linear | None = None, exact=None) -> FuzzReport:
    pair = FuzzSides(reference or Linear(), candidate, "fp32", StagedLimits.of(BUDGET), BUDGET, exact)
    return fuzz(draw(DIMS, seed, count), SPECS, DIMS, GOLDEN, pair, seed, ["again"])


def failed(report: FuzzReport) -> list[FuzzedCase]:
    return [case for case in report.cases if case.outcome == "failed"]


def test_the_same_seed_draws_the_same_cases_and_the_same_values() -> None:
    assert draw(DIMS, 7, 30) == draw(DIMS, 7, 30)
    assert draw(DIMS, 7, 30) != draw(DIMS, 8, 30) and draw(DIMS, 7, 30)[-2].values == VALUES[29 - 19]
    for case in draw(DIMS, 7, 30):
        first, second_array = (make(case, SPECS, GOLDEN, 7, "fp32")["x"] for _ in range(2))
        assert first.tobytes() == second_array.tobytes()
        assert first.shape == (dict(case.sizes)["batch"], 4) and (case.values != "blank" or not first.any(1).all())
    real = [make(FuzzCase((("batch", 4),), draw=nth_number), SPECS, GOLDEN, 7, "fp32")["x"] for nth_number in (1, 2)]
    assert real[0].tobytes() != real[1].tobytes()


def test_every_bucket_edge_its_neighbours_and_one_step_outside_are_tried() -> None:
    assert {sizes["batch"] for sizes in boundaries(DIMS)} == {1, 2, 3, 4, 5, 6, 15, 16}
    assert [sizes["batch"] for sizes in just_outside(DIMS)] == [17]
    length = Dim("length", 8, 16, 32)
    assert {"batch": 16, "length": 8} in list(boundaries((*DIMS, length)))
    assert {"batch": 4, "length": 7} in list(just_outside((*DIMS, length)))
    assert {case.values for case in draw(DIMS, 0, 0)} == set(VALUES)


def test_sizes_are_multiples_for_dims_of_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    dim = Dim("height", 64, 96, 160, multiple=32)
    assert {sizes["height"] for sizes in boundaries([dim])} == {64, 96, 128, 160}
    assert [sizes["height"] for sizes in just_outside([dim])] == [192, 32, 80]
    drawn_counts = Counter(dict(case.sizes)["height"] for case in draw([dim], 0, 200) if case.draw)
    assert set(drawn_counts) == {64, 96, 128, 160}
    assert parse_only("height=80", [dim]).outside and not parse_only("height=96", [dim]).outside
    tried = []

    def fails(case: FuzzCase) -> FuzzOutcome:
        tried.append(dict(case.sizes)["height"])
        return FuzzOutcome(case, "failed" if tried[-1] > 96 else "ok", "")

    specs, failing = [TensorSpec("x", "float32", (1, "height"))], fails(FuzzCase((("height", 160),)))
    assert shrink(failing, specs, [dim], fails).case == FuzzCase((("height", 128),)) and {*tried} == {64, 96, 128, 160}
    monkeypatch.setattr("validation.fuzz.run.MOST_SHRINKING_S", -1.0)
    assert shrink(failing, specs, [dim], fails) is failing, "its time is over"


def test_a_case_is_read_back_as_a_report_writes_it() -> None:
    for case in draw(DIMS, 0, 20):
        assert parse_only(str(case), DIMS) == case
    for text in ("batch=4 values=twos", "values=ones", "batch=0", "batch=4 length=3", "batch=4 ; rm", "batch=4 draw=x"):
        with pytest.raises(InputError):
            parse_only(text, DIMS)


@pytest.mark.parametrize(
    ("name", "mask"),
    [("mask", np.arange(6) < [[3], [0], [4]]), ("tokens", np.arange(6) >= [[2], [3], [4]]),
     ("token_types", np.arange(6) >= [[2], [3], [4]]), ("flags", np.arange(6) < [[2], [3], [4]]),
     ("attention_mask", np.tril(np.ones((3, 6, 6))))],
)  # fmt: skip
def test_a_mask_that_may_mean_the_opposite_or_is_a_triangle_is_left_as_it_is(name: str, mask: np.ndarray) -> None:
    assert not find_masks([{name: mask.astype(np.int64), "ids": np.arange(6)}])


def test_rows_of_one_batch_have_like_numbers_of_tokens() -> None:
    assert [cases.draw_lengths((4, 12), draw) for draw in range(2)] == [[1, 2, 3, 3], [6, 9, 11, 12]]
    assert [cases.draw_lengths((16, 8), draw)[::4] for draw in range(2)] == [[1, 2, 2, 3], [4, 6, 7, 8]]
    assert [cases.draw_lengths(*args, 1) for args in (((1, 13), 7), ((4, 13), 15), ((1, 1), 0))] == [[12], [12], [1]]
    (rows,) = cases.find_masks([{"mask": np.arange(6) >= [[2], [3]], "ids": np.arange(6)}]).values()
    assert rows.cut(np.zeros((2, 6)), 15)[0].tolist() == [0, 1, 1, 1, 1, 1], "as padding, it leaves a token"


def test_a_correct_engine_gives_no_finding_over_50_seeds() -> None:
    def other_order(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x[:, ::-1] @ WEIGHTS[::-1]).astype(np.float32)

    for seed in range(50):
        report = tried(Linear(other_order), seed, count=12)
        assert [item.case + item.reason for item in failed(report)] == []
        assert report.cases[-1].outcome == "ok"  # outside, and answered rightly


def wrong_at(size: int) -> Fault:
    return lambda x, y: np.roll(y, 1, -1) if len(x) == size else y


@pytest.mark.parametrize("size", [1, 3, 5, 15, 16])
def test_an_off_by_one_bucket_is_found_and_its_line_reproduces_it(size: int) -> None:
    report = tried(Linear(wrong_at(size)), count=0)
    assert {item.sizes["batch"] for item in failed(report)} == {size}
    smallest_case = report.smallest[0]
    case = parse_only(smallest_case.case, DIMS)
    pair = FuzzSides(Linear(), Linear(wrong_at(size)), "fp32", StagedLimits.of(BUDGET), BUDGET)
    (second_case,) = fuzz([case], SPECS, DIMS, GOLDEN, pair, 0, []).cases
    assert (second_case.outcome, second_case.reason) == ("failed", smallest_case.reason)
    assert parse_only(smallest_case.from_, DIMS).sizes == case.sizes


def test_a_fault_above_a_size_is_minimized() -> None:
    report = tried(Linear(lambda x, y: np.roll(y, 1, -1) if len(x) >= 6 else y))
    assert {(case.sizes["batch"], case.values) for case in report.smallest} == {(6, "realistic")}
    document = encode_document(report)
    keys = {"sizes", "values", "draw", "case", "outside", "outcome", "reason", "failed", "from", "reproduce"}
    assert document["passed"] is False and document["smallest"][0].keys() == keys
    assert document["smallest"][0]["reproduce"] == "again --only 'batch=6 values=realistic'"


def test_wrong_answers_outside_every_profile_fail_and_refusals_pass() -> None:
    assert [item.outside for item in failed(tried(Linear(wrong_at(17)), count=0))] == [True]
    refusing_report = tried(Linear(most=16), count=0)
    assert (refusing_report.cases[-1].outcome, failed(refusing_report)) == ("refused", [])
    assert [item.sizes for item in failed(tried(Linear(most=15), count=0))] == [{"batch": 16}]

    def breaks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if len(x) > 16:
            raise ModelError("a kernel failed")
        return y

    assert "breaks instead of" in failed(tried(Linear(breaks), count=0))[0].reason


def test_a_nan_that_spreads_over_the_batch_is_found() -> None:
    report = tried(Linear(lambda x, y: y + 0 * x.sum()), count=0)
    assert {item.values for item in failed(report)} == {"nan", "infinite"}
    assert report.smallest[0].sizes == {"batch": 2}
    mask = {"mask": np.array([[0, -np.inf], [np.nan, np.nan]], np.float32)}
    assert _list_sound(FuzzCase((("batch", 2),), "nan"), mask).tolist() == [True, False]
    assert not failed(tried(Linear(lambda x, y: np.nan_to_num(y)), count=12))


def test_an_overflow_that_the_graph_lacks_fails() -> None:
    def half(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return y.astype(np.float16).astype(np.float32)

    assert {item.values for item in failed(tried(Linear(half)))} >= {"extreme"}

    def squared(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return y * y * y * 1e9

    assert not failed(tried(Linear(squared), reference=Linear(squared)))


def test_values_match_their_kind() -> None:
    drawn = {kind: make(FuzzCase((("batch", 4),), kind), SPECS, GOLDEN, 0, "fp32")["x"] for kind in VALUES}
    assert 0 < np.abs(drawn["denormal"]).min() <= np.abs(drawn["denormal"]).max() < np.finfo(np.float32).tiny
    assert np.isfinite(drawn["extreme"] ** 2).all() and np.abs(drawn["extreme"]).min() > 1e19
    assert np.abs(make(FuzzCase((("batch", 4),), "extreme"), SPECS, GOLDEN, 0, "fp16")["x"]).max() < 256
    for kind, is_it in (("nan", np.isnan), ("infinite", np.isinf), ("blank", np.logical_not)):
        assert is_it(drawn[kind]).all(1).sum() == is_it(drawn[kind]).any(1).sum() == 1
    masked_groups = [group | {"mask": np.ones((4, 4), np.float32)} for group in GOLDEN]
    specs = (*SPECS, TensorSpec("mask", "float32", ("batch", 4)))
    for case in (FuzzCase((("batch", 4),), "blank"), FuzzCase((("batch", 4),), "mixed")):
        assert make(case, specs, masked_groups, 0, "fp32")["mask"].all()
    mixed = [make(FuzzCase((("batch", 8),), "mixed", draw=nth), SPECS, GOLDEN, 0, "fp32")["x"] for nth in range(3)]
    real = np.concatenate([group["x"] for group in GOLDEN])
    assert all((real.min(0) <= x).all() and (x <= real.max(0)).all() and np.isin(x, real).mean() < 0.5 for x in mixed)
    assert [(mixed[0] == other_case).all(1).sum() for other_case in mixed[1:]] == [3, 0]
    for sign in (1, -1):
        signed_fields = [{"x": sign * np.abs(group["x"])} for group in GOLDEN]
        assert (sign * make(FuzzCase((("batch", 16),), "stretched"), SPECS, signed_fields, 0, "fp32")["x"] >= 0).all()
    hidden_fields = [{"x": np.where(group["x"] > 0, -np.inf, group["x"])} for group in GOLDEN]
    assert np.isneginf(make(FuzzCase((("batch", 8),), "mixed"), SPECS, hidden_fields, 0, "fp32")["x"]).any()
    assert not np.isnan(make(FuzzCase((("batch", 8),), "mixed"), SPECS, hidden_fields, 0, "fp32")["x"]).any()


def test_denormals_may_be_flushed_to_zero_only() -> None:
    def flushed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(np.abs(y) < np.finfo(np.float32).tiny, 0, y)

    assert not failed(tried(Linear(flushed)))

    def noisy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x).max() < 1e-30, np.float32(1e-3), y).astype(np.float32)

    assert "denormal" in {item.values for item in failed(tried(Linear(noisy)))}


def test_where_float32_is_wrong_the_engine_is_not_judged() -> None:
    def root(x: np.ndarray, y: np.ndarray) -> np.ndarray:  # overflows in between
        return (y / np.sqrt((1e3 * y.astype(np.float32) ** 2).sum(-1, keepdims=True))).astype(np.float32)

    def careful(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        wide_values = y.astype(np.float64)
        return (wide_values / np.sqrt((1e3 * wide_values**2).sum(-1, keepdims=True))).astype(np.float32)

    def exact(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": careful(inputs["x"], inputs["x"].astype(np.float64) @ WEIGHTS)}

    judged_report = tried(Linear(careful), reference=Linear(root), exact=exact)
    assert {item.values for item in failed(tried(Linear(careful), reference=Linear(root)))} >= {"extreme"}
    assert not failed(judged_report)
    assert {item.values for item in judged_report.cases if item.outcome == "not judged"} >= {"extreme"}
    wrong_module = Linear(lambda x, y: np.roll(careful(x, y), 1, -1))
    assert "realistic" in {item.values for item in failed(tried(wrong_module, reference=Linear(root), exact=exact))}

    report = tried(Linear(lambda x, y: 3 * y), exact=lambda inputs: {"y": 2 * inputs["x"].astype(np.float64) @ WEIGHTS})
    assert {item.values for item in failed(report)} >= {"realistic", "nan"}
    assert {item.values for item in report.cases if item.outcome == "not judged"} >= {"ones", "extreme"}


def test_integers_stay_within_the_golden_datas_range() -> None:
    specs = (TensorSpec("ids", "int64", ("batch", 3)),)
    golden = [{"ids": np.array([[5, 6, 7]] * 4)}, {"ids": np.array([[8, 9, 6]] * 4)}]
    drawn_ids = {kind: make(FuzzCase((("batch", 16),), kind), specs, golden, 0, "fp32")["ids"] for kind in VALUES}
    assert set(drawn_ids["extreme"].flat) == {5, 9}
    assert set(drawn_ids["ones"].flat) == {1}
    assert set(drawn_ids["denormal"].flat) <= {5, 6, 7, 8, 9}
    assert set(drawn_ids["mixed"].flat) <= {5, 6, 7, 8, 9} and 5 in drawn_ids["mixed"][:, 1:]
    assert {value.dtype for value in drawn_ids.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("changed", "precision"), [(2, "int8"), (3, "int8"), (2, "fp32")])
def test_integers_at_an_edge_pass_if_rounding_changes_as_many(changed, precision) -> None:
    class Ids(Linear):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            ids = super().run(inputs)["y"].argmax(-1)
            return {"y": ids + (np.arange(len(ids)) < (changed if self.most and len(ids) == 16 else 0))}

    golden = freeze(GOLDEN, SPECS, DIMS, Ids().run)
    limits = OutputLimits(Budgets(BUDGET, decisions={"y": Decisions(0, 16)}))
    sides = FuzzSides(Ids(), Ids(most=16), precision, StagedLimits(limits), BUDGET, case_limits=lambda _: limits)
    check = Check("engine", "agreement", "y", "batch=16", 0.8, 1.0, False)
    other_checks = replace(check, case="golden"), replace(check, name="sqnr_db")
    passed_flags = [item.passed for item in excuse_ties([check, *other_checks], golden, sides)]
    assert passed_flags == [(changed, precision) == (2, "int8"), False, False]


def test_limits_measured_on_all_samples_hold_for_those_beside_nan() -> None:
    def own_limits(inputs: dict[str, np.ndarray]) -> OutputLimits:
        sqnr_db = 10 * np.log10(np.square(inputs["x"] @ WEIGHTS).mean() / 0.1**2) - 0.1
        return OutputLimits(Budgets(replace(default_budget("task", "fp32"), sqnr_db=sqnr_db, argmax_agreement=0.93)))

    inputs, limits = make(BESIDE_NAN, SPECS, GOLDEN, 0, "int8"), StagedLimits.of(BUDGET)
    ids, other_ids = (Linear(lambda x, y, by=by: y.argmax(-1) + by * (y == y[0]).all(1)) for by in (0, 1))
    for pair in ((Linear(), Linear(lambda x, y: y + np.float32(0.1))), (ids, other_ids)):
        sides = FuzzSides(*pair, "int8", limits, BUDGET, case_limits=own_limits)
        assert run.try_case(BESIDE_NAN, inputs, sides).verdict == "ok"
