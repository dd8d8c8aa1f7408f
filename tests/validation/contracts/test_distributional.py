from typing import Any

import numpy as np
import pytest

from enginesmith.core.codec import decode
from enginesmith.core.errors import InputError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Dim, TensorSpec
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, Fault, Linear
from validation.contracts.repeats import CalibrationSums, Forecasts, as_logits
from validation.contracts.terms import BRIER, ECE, FLIPS, JS, KL, TOP_K, Contract
from validation.contracts.two_sample import contract_checks, holm, p_value
from validation.golden.golden_set import Case, GoldenSet, freeze
from validation.limits.budget import Budgets, default_budget

BUDGETS = Budgets(default_budget("engine", "fp32"))
ALL = {"kl": KL, "js": JS, "flips": FLIPS, "top_k": TOP_K, "ece": ECE, "brier": BRIER}
CLASSES = 12
RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=(400, CLASSES)) * 3).astype(np.float32)
SPEC = (TensorSpec("x", "float32", ("batch", CLASSES)),)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


class Passing:
    """A session that gives its input, through a fault."""

    inputs = outputs = SPEC

    def __init__(self, fault: Any = lambda x: x) -> None:
        self.fault = fault

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": np.asarray(self.fault(inputs["x"]))}


def golden(labels: np.ndarray | None = None, original: Any = lambda x: x) -> GoldenSet:
    cases = [
        Case(f"golden {i}", "golden", {"x": part}, {"y": original(part)})
        for i, part in enumerate((LOGITS[:150], LOGITS[150:]))
    ]
    edge = Case("batch=1", "edge", {"x": LOGITS[:1]}, {"y": original(LOGITS[:1])})
    return GoldenSet((*cases, edge), labels)


def checked(engine: Any, rows: dict[str, Any] = ALL, graph: Any = lambda x: x, **options: Any) -> dict[str, Check]:
    limits = {**dict.fromkeys(("kl", "js", "flips", "top_k", "ece", "brier")), **rows}
    contract = decode({"distributional": {"rows": {"y": limits}}}, Contract)
    actual = contract_checks(contract, Passing(graph), Passing(engine), golden(**options), (SPEC, None), BUDGETS)
    return {check.name.removeprefix("contract "): check for check in actual}


def failed(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if not check.passed]


def one_row(x: np.ndarray) -> np.ndarray:
    y = x.copy()
    if len(y) > 200:
        y[7] = np.roll(y[7], 1)
    return y


def runners_up(x: np.ndarray) -> np.ndarray:
    """Decisions stay; the classes far below them change places."""
    order = np.argsort(-x, axis=1)
    y = x.copy()
    np.put_along_axis(y, order[:, 3:6], np.take_along_axis(x, order[:, [6, 7, 8]], 1), 1)
    np.put_along_axis(y, order[:, 6:9], np.take_along_axis(x, order[:, [3, 4, 5]], 1), 1)
    return y


FAULTS: dict[str, tuple[Any, set[str]]] = {
    "like": (lambda x: x + np.float32(1e-3) * np.sin(x * 99), set()),
    "a constant added to the logits": (lambda x: x + 5, set()),
    "overconfident": (lambda x: x * 1.5, {"kl", "js", "ece", "brier"}),
    "one row of 400": (one_row, {"js", "kl"}),
    "the runners-up": (runners_up, {"top_k", "kl", "js"}),
    "NaN": (lambda x: np.where(np.arange(len(x))[:, None] == 1, np.nan, x), set(ALL) - {"flips", "top_k"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_its_own_limits(fault: str) -> None:
    engine, meant_fault = FAULTS[fault]
    assert set(failed(checked(engine))) == meant_fault


def test_decisions_that_flip_are_counted() -> None:
    def flip(x: np.ndarray) -> np.ndarray:
        y = x.copy()
        y[::20] = -y[::20]
        return y

    checks = checked(flip, {"flips": FLIPS, "top_k": 0.5})
    assert failed(checks) == ["flips"]
    assert checks["flips"].value == pytest.approx(21 / 400) and "21 of 400" in checks["flips"].note


def test_the_worst_row_and_its_case_are_named() -> None:
    js = checked(one_row)["js"]
    assert (js.case, js.note.split(",")[0]) == ("golden 1", "row 7")
    single_checks = checked(lambda x: -x if len(x) == 1 else x)
    assert failed(single_checks) == ["js"] and single_checks["js"].case == "batch=1"


def test_a_violation_by_the_graph_is_attributed_to_the_graph() -> None:
    engine_only, check = checked(lambda x: x * 1.5)["kl"], checked(lambda x: x * 1.5, graph=lambda x: x * 1.5)["kl"]
    assert "the graph alone has 0" in engine_only.note and "it is the graph's" not in engine_only.note
    assert not check.passed and check.note.endswith("so it is the graph's")


def test_probabilities_and_their_logits_give_equal_figures() -> None:
    logits = checked(lambda x: x * 1.2)
    rows = {"values": "probabilities", **ALL}
    inputs = checked(lambda x: softmax(x * 1.2), rows, graph=softmax, original=softmax)
    for name in ALL:
        assert inputs[name].value == pytest.approx(logits[name].value, rel=1e-3, abs=1e-6)
    assert not failed(checked(lambda x: softmax(x).astype(np.float16), rows, graph=softmax, original=softmax))
    checks = checked(
        lambda x: softmax(x * 4).astype(np.float16),
        rows,
        graph=lambda x: softmax(x * 4),
        original=lambda x: softmax(x * 4),
    )
    assert not failed(checks) and 0 <= (checks["kl"].value or 0) < 1e-3, "what fp16 rounds to 0 is not impossible"
    negative_checks = checked(lambda x: softmax(x) - 0.01, rows, graph=softmax, original=softmax)
    assert np.isnan(negative_checks["kl"].value or 0) and "kl" in failed(negative_checks)


def test_a_class_masked_on_one_side_only_breaks_the_contract() -> None:
    def mask(x: np.ndarray) -> np.ndarray:
        return np.where(np.arange(CLASSES) == 3, -np.inf, x)

    assert not failed(checked(mask, graph=mask, original=mask))
    assert {"kl", "js"} <= set(failed(checked(mask)))
    assert np.isnan(as_logits(np.array([[np.nan, -np.inf]]), "logits")[0, 0])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (lambda x: x[:, :5], "the original has the shape"),
        (lambda x: x.astype(np.int64), "no distribution"),
        (lambda x: x[:, :1], "holds no distribution"),
    ],
)
def test_an_output_that_is_not_a_distribution_fails(engine: Any, message: str) -> None:
    like_engine = engine if message == "holds no distribution" else lambda x: x
    checks = checked(engine, graph=like_engine, original=like_engine)
    assert failed(checks) == ["output"] and message in checks["output"].note


def test_calibration_errors_match_their_definitions() -> None:
    p = softmax(LOGITS)
    # Right where the model doubts, wrong where it does not: bins of other widths would cancel that.
    labels = np.where(p.max(1) < 0.6, p.argmax(1), RNG.integers(0, CLASSES, len(p)))
    confidence, flag = p.max(1), p.argmax(1) == labels
    bins = np.ceil(confidence * 15) - 1
    ece = sum(abs(flag[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins))
    sums = CalibrationSums()
    for part in (slice(0, 100), slice(100, None)):
        sums.add(Forecasts(p[part]), labels[part])
    assert sums.ece == pytest.approx(ece)
    assert sums.brier == pytest.approx(np.square(p - np.eye(CLASSES)[labels]).sum(1).mean())


def test_calibration_may_improve_with_labels_and_may_not_change_without() -> None:
    labels = np.array([RNG.choice(CLASSES, p=row) for row in softmax(LOGITS / 2)])  # the original is overconfident
    only_fields = {"ece": ECE, "brier": BRIER}
    assert not failed(checked(lambda x: x / 2, only_fields, labels=labels))
    assert failed(checked(lambda x: x / 2, only_fields)) == ["ece", "brier"]
    worse_checks = checked(lambda x: x * 2, only_fields, labels=labels)
    assert failed(worse_checks) == ["ece", "brier"] and "by labels" in worse_checks["ece"].note
    assert "by the original's decisions" in checked(lambda x: x, only_fields, labels=labels[:7])["ece"].note


NOISE = (*SPECS, TensorSpec("noise", "float32", ("batch", 3)), TensorSpec("seed", "int64", ()))


class Drawing(Linear):
    """Linear, plus noise of its own, of the noise input, or of a generator with the seed input."""

    def __init__(self, of: str, scale: float = 1.0, fault: Fault = lambda x, y: y) -> None:
        super().__init__(fault)
        self.of, self.scale, self.rng = of, scale, np.random.default_rng(int(scale * 100))

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        y = super().run(inputs)["y"]
        noise = inputs["noise"]
        if self.of == "seed":
            noise = np.random.default_rng(int(inputs["seed"])).normal(size=y.shape)
        elif self.of == "run":
            noise = self.rng.normal(size=y.shape)
        return {"y": (y + self.scale * noise).astype(np.float32), "still": y, "token": np.asarray(noise > 0)}


class Nudged(Drawing):
    """The same, but its constant output has other last bits."""

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        result = super().run(inputs)
        return {**result, "still": np.nextafter(result["still"], np.float32(9))}


def drawn(of: str, vary: str | None, candidate: Any, outputs: tuple[str, ...] = ("y",)) -> list[Check]:
    items = [{**item, "noise": np.zeros((4, 3), np.float32), "seed": np.int64(0)} for item in GOLDEN]
    golden = freeze(items, NOISE, DIMS[:0], Drawing("noise").run)
    contract = {"distributional": {"seeds": {"outputs": list(outputs), "vary": vary, "draws": 40, "alpha": 0.01}}}
    batch: Dim | None = None
    return list(contract_checks(decode(contract, Contract), Drawing(of), candidate, golden, (NOISE, batch), BUDGETS))


@pytest.mark.parametrize(("of", "vary"), [("noise", "noise"), ("seed", "seed"), ("run", None)])
def test_draws_of_different_distributions_are_distinguished(of: str, vary: str | None) -> None:
    (same_draw,) = drawn(of, vary, Drawing(of))
    (wider_draw,) = drawn(of, vary, Drawing(of, 2.0))
    (shifted_draw,) = drawn(of, vary, Drawing(of, 1.0, lambda x, y: y + np.float32(0.6)))
    assert same_draw.passed and (same_draw.value or 0) >= 0.01 and same_draw.name == "contract seeds"
    assert not wider_draw.passed and not shifted_draw.passed


def test_samples_that_cannot_be_compared_fail() -> None:
    still_draw, none, y = drawn("noise", "noise", Drawing("noise"), ("still", "none", "y"))
    assert not still_draw.passed and "the graph gives the same output in every draw" in still_draw.note
    # Rounded otherwise, a constant is another constant: no draw was tested, and the note must not give a p-value.
    (near_draw,) = drawn("noise", "noise", Nudged("noise"), ("still",))
    assert not near_draw.passed and near_draw.value is None and near_draw.note == still_draw.note
    (stuck_draw,) = drawn("noise", "noise", Drawing("noise", 0.0), ("y",))
    assert not stuck_draw.passed and "the engine gives the same output in every draw" in stuck_draw.note
    assert not none.passed and "no such output" in none.note
    assert y.passed
    (nan,) = drawn("noise", "noise", Drawing("noise", 1.0, lambda x, y: y * np.float32(np.nan)))
    assert not nan.passed and nan.note == "the engine gave a number that is not finite"
    with pytest.raises(InputError, match=r"seeds.vary: 'sead' is not an input; known: x, noise, seed"):
        drawn("noise", "sead", Drawing("noise"))


def test_tokens_of_another_distribution_fail() -> None:
    assert drawn("noise", "noise", Drawing("noise"), ("token",))[0].passed
    biased_draw = Drawing("noise")
    biased_draw.run = lambda inputs: {"token": inputs["noise"] > 1}  # type: ignore[method-assign]
    assert not drawn("noise", "noise", biased_draw, ("token",))[0].passed


def test_the_rate_of_false_alarms_is_alpha() -> None:
    rng = np.random.default_rng(0)
    items = [p_value(rng.normal(size=(20, 3)), rng.normal(size=(25, 3)), 199) for _ in range(300)]
    # Binomial(300, 0.1): 45 or more has a probability of 0.4 %.
    assert sum(p < 0.1 for p in items) < 45
    assert 0.4 < np.mean(items) < 0.6


def test_equal_samples_have_the_p_value_one_and_holm_corrects_step_by_step() -> None:
    a = np.random.default_rng(0).normal(size=(20, 2))
    assert p_value(a, a, 99) == 1.0
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}, 3) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
