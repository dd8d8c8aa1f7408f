import threading
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Dim, TensorSpec
from tests.validation.calls.sessions import BUDGET, SEEN, Buffers, Nth, Overwriting, Raising, failed, tried
from tests.validation.fuzz.sessions import DIMS, GOLDEN, SPECS, WEIGHTS, Linear
from validation.calls.checks import CALLS, VALUES_SEED, Allowance, _measure_errors, call_checks, magnitude_checks
from validation.calls.repeated import pool_of
from validation.fuzz.cases import Groups, make, parse_only
from validation.fuzz.run import FuzzSides
from validation.golden.golden_set import GoldenSet, freeze
from validation.limits.budget import Budgets, OutputLimits, StagedLimits

NAMES = {"sizes", "calls repeated", "calls outputs", "calls inputs", "calls refilled"}
FREE = replace(BUDGET, max_rel=None, sqnr_db=30.0, centered_sqnr_db=None, slice_sqnr_db=None)
UNHURRIED = Allowance(None, 0.0, lambda: 0.0, lambda: 0.0)


def rolled(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.roll(y, 1, -1)


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(n, marks=pytest.mark.slow) for n in range(16, 100))])
def test_a_deterministic_session_raises_no_alarm(seed: int) -> None:
    def other_order(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x[:, ::-1] @ WEIGHTS[::-1]).astype(np.float32)

    checks = tried(Linear(other_order), seed=seed, seconds=0.1)
    assert set(checks) == NAMES
    assert failed(checks) == set()
    rng = np.random.default_rng(seed)

    def last_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (y * (1 + rng.normal(scale=1e-7, size=y.shape))).astype(np.float32)

    noisy = tried(Linear(last_bits), seed=seed, seconds=0.06, bits=lambda: False)
    assert failed(noisy) == set()
    assert "within the limits, other bits; later faults are missed" in noisy["calls repeated"].note


@pytest.mark.parametrize(
    ("session", "check", "message"),
    [
        (lambda: Nth(rolled, lambda n: n > 100), "calls repeated", "of y differ in their bits from the first run"),
        (lambda: Nth(lambda x, y: y * np.float32(1 + 1e-7), lambda n: n == 60), "calls repeated", "in their bits"),
        (lambda: Nth(lambda x, y: y * np.nan, lambda n: n == 60), "calls repeated", "in their bits"),
        (lambda: Nth(lambda x, y: y[:-1], lambda n: n == 60), "calls repeated", "outputs are y float32"),
        (lambda: Nth(lambda x, y: y.astype(float), lambda n: n == 60), "calls repeated", "outputs are y float64"),
        (lambda: Raising(ValueError("no")), "calls repeated", "ValueError: no"),
        (lambda: Raising(None), "calls repeated", "answers with a NoneType"),
        (lambda: Raising({"y": [1.0]}), "calls repeated", "does not hold an array per output"),
        (lambda: Buffers(), "calls outputs", "y changed after it was answered"),
        (lambda: Buffers(start=100), "calls outputs", "y changed after it was answered"),
        (lambda: Buffers(count=60), "calls outputs", "y changed after it was answered"),
        (lambda: Overwriting(), "calls inputs", "x was overwritten"),
        (lambda: Overwriting(lambda n: n == 90), "calls inputs", "x was overwritten"),
    ],
)  # fmt: skip
def test_each_fault_fails_its_own_check(session, check, message):
    checks = tried(session())
    assert failed(checks) == {check}
    result = checks[check]
    assert message in result.note
    assert result.value and result.value >= 1 and result.limit == 0
    assert result.case.startswith("call ") and "batch=" in result.case


def test_an_engine_that_caches_by_the_address_of_arrays_fails() -> None:
    answers: dict[object, dict[str, np.ndarray]] = {}

    class ByAddress(Linear):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            key = inputs["x"].ctypes.data, inputs["x"].shape
            return {"y": answers.setdefault(key, super().run(inputs))["y"].copy()}

    checks = tried(ByAddress())
    assert failed(checks) == {"calls refilled"} and "in arrays that were refilled" in checks["calls refilled"].case


@pytest.mark.parametrize("fault", ["order", "read-only", "gaps", "odd address", "after an error"])
def test_an_engine_that_misreads_strided_arrays_fails(fault: str) -> None:
    class Misread(Linear):
        failed = False

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            self.failed = self.failed or "x" not in inputs
            x = inputs["x"]
            right_field = {
                "order": x.flags.c_contiguous, "read-only": x.flags.writeable, "odd address": x.flags.aligned,
                "gaps": min(x.strides) == x.itemsize, "after an error": not self.failed,
            }[fault]  # fmt: skip
            return {"y": (x if right_field else x.ravel("K").reshape(x.shape) + (fault != "order")) @ WEIGHTS}

    checks = tried(Misread())
    assert failed(checks) == {"calls refilled"}
    assert ("refilled" if fault == "after an error" else "Fortran") in checks["calls refilled"].case


def test_a_scalar_is_not_tried_in_other_memory_orders() -> None:
    class Scaled(Linear):
        inputs = (*SPECS, TensorSpec("s", "float32", ()))

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            if inputs["s"].shape:
                raise EnginesmithError("'s' is a number")
            return {"y": super().run(inputs)["y"] * inputs["s"]}

    numbers = [{**arrays, "s": np.array(2, np.float32)} for arrays in GOLDEN]
    golden = freeze(numbers, Scaled.inputs, DIMS, Scaled().run)
    assert failed(tried(Scaled(), Scaled(), golden=golden, shapes=(Scaled.inputs, DIMS))) == set()

    class ByOrder(Scaled):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"y": super().run(inputs)["y"] + (next(iter(inputs), "x") != "x")}

    assert failed(tried(ByOrder(), Scaled(), golden=golden, shapes=(Scaled.inputs, DIMS))) == {"calls refilled"}


def test_a_fault_after_many_calls_of_one_size_is_found() -> None:
    class Captured(Linear):
        size, row = 0, 0

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            self.row = self.row + 1 if self.size == len(inputs["x"]) else 1
            self.size = len(inputs["x"])
            return {"y": super().run(inputs)["y"] + (self.row > 20)}

    assert failed(tried(Captured())) == {"calls repeated"}


@pytest.mark.parametrize("fault", ["overlap", "second thread", "another size"])
def test_threads_call_a_session_that_declares_thread_safety(fault: str) -> None:
    lock, inner_numbers, first_id, sizes = threading.Barrier(3, timeout=10), [0], threading.get_ident(), set[int]()

    class Shared(Linear):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            answer = super().run(inputs)
            if threading.get_ident() == first_id:
                return answer
            inner_numbers[0] += 1
            sizes.add(len(inputs["x"]))
            lock.wait()  # the three calls overlap
            field = {"second thread": True, "overlap": inner_numbers[0] % 2 == 0, "another size": len(sizes) > 1}[fault]
            return {"y": answer["y"] + 1} if field else answer

    checks = tried(Shared(), shared=True)
    assert failed(checks) == {"calls threads"} and "of 12 calls" in checks["calls threads"].note
    assert "calls threads" not in tried(Linear()) and tried(Linear(), shared=True)["calls threads"].passed


def test_a_repeated_fault_is_counted_and_its_first_call_is_named() -> None:
    checks = tried(Nth(rolled, lambda n: n > 12 and n % 50 == 0))
    check = checks["calls repeated"]
    call_count = int(check.note.partition(" of ")[2].partition(" calls")[0].rpartition(" ")[2])
    assert check.case.startswith("call 38, ")  # twelve sizes come before
    assert check.value == (12 + call_count) // 50
    assert f"; {check.value:.0f} of {call_count} calls with 8 inputs" in check.note


@pytest.mark.parametrize("wrong", [lambda n: n % 300 == 0, lambda n: n >= 500], ids=["each 300th", "from 500 on"])
def test_the_calls_that_a_fast_engine_gets_by_default_show_rare_faults(wrong) -> None:
    def calls_of(candidate: object) -> Check:
        pair = FuzzSides(Linear(), candidate, "fp32", StagedLimits.of(BUDGET), BUDGET)  # type: ignore[arg-type]
        checks = call_checks(pair, (SPECS, DIMS), SEEN, 0, UNHURRIED, lambda: True, sizes=False)
        return next(check for check in checks if check.name == "calls repeated")

    assert calls_of(Linear()).passed and f"{CALLS.most} calls" in calls_of(Linear()).note
    assert not calls_of(Nth(rolled, wrong)).passed


def test_bits_are_compared_on_request_and_otherwise_the_limits_of_drift_apply() -> None:
    requests: list[bool] = []

    def bits() -> bool:
        requests.append(True)
        return False

    assert failed(tried(Linear(), seconds=0.3, bits=bits)) == set() and not requests
    small_error = Nth(lambda x, y: y * np.float32(1 + 1e-6), lambda n: n > 60)
    assert failed(tried(small_error, seconds=0.3, bits=bits)) == set() and requests
    results = tried(Nth(lambda x, y: y * np.float32(1.01), lambda n: n > 60), seconds=0.3, bits=bits)
    assert failed(results) == {"calls repeated"}
    assert "against the first answer, engine max_rel of y at batch=" in results["calls repeated"].note
    assert "limit 0.001" in results["calls repeated"].note


def test_a_stochastic_model_whose_limits_are_lifted_is_not_failed() -> None:
    rng = np.random.default_rng(0)

    def noise(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return rng.normal(size=y.shape).astype(np.float32)

    budgets = Budgets(replace(BUDGET, **dict.fromkeys(("max_rel", "sqnr_db", "centered_sqnr_db", "slice_sqnr_db"))))
    assert failed(tried(Linear(noise), seconds=0.3, bits=lambda: False, budgets=budgets)) == set()
    assert "calls repeated" in failed(tried(Linear(noise), seconds=0.3, bits=lambda: False))


def test_a_single_sample_is_mixed_with_half_of_itself() -> None:
    golden = freeze([{"x": GOLDEN[0]["x"][:1].repeat(4, 0)}], SPECS, DIMS, Linear().run)
    checks = tried(Linear(), golden=golden)
    assert failed(checks) == set()
    assert "calls with 8 inputs" in checks["calls repeated"].note
    assert failed(tried(Buffers(shared=True), golden=golden)) == {"calls outputs"}
    vector = (TensorSpec("x", "float32", ("batch",)),)
    assert len(pool_of(Linear(), vector, DIMS, [{"x": np.ones(4, np.float32)}], "fp32")) == 8
    shapes = {"x": ("batch", 4), "mask": ("batch", 4), "scales": (2,)}
    specs = [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]
    group = {"x": np.full((4, 4), 3.0), "mask": np.ones((4, 4)), "scales": np.array([1.0, 2])}
    groups = [{name: array.astype(np.float32) for name, array in group.items()}]
    _, half_input_ = pool_of(Linear(), specs, DIMS, groups, "fp32")[:2]
    assert [float(half_input_.arrays[name].max()) for name in shapes] == [1.5, 1, 2]


def test_half_precision_inputs_get_the_dtype_of_the_session() -> None:
    class Half(Linear):
        inputs = tuple(replace(spec, dtype="float16") for spec in SPECS)

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            assert inputs["x"].dtype == np.float16
            result = super().run({"x": inputs["x"].astype(np.float32)})
            inputs["x"] *= 2
            return result

    assert failed(tried(Half(), budgets=Budgets(FREE))) == {"calls inputs"}


def moved(candidate: object, **changes: object) -> list[Check]:
    pair = replace(FuzzSides(Linear(), candidate, "fp32", StagedLimits.of(BUDGET), BUDGET), **changes)  # type: ignore[arg-type]
    return list(magnitude_checks(pair, (SPECS, DIMS), SEEN, UNHURRIED))


@pytest.mark.parametrize("where", [6, 100, "negative"])
def test_an_engine_that_is_wrong_at_other_magnitudes_or_signs_fails(where: int | str) -> None:
    def fault(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if where == "negative":
            return np.roll(y, 1, -1) if (x < 0).all() else y
        return np.clip(x, -where, where) @ WEIGHTS

    assert all(np.abs(group["x"]).max() < 6 for group in GOLDEN)
    (check,) = moved(Linear(fault))
    assert not check.passed and ("negative" if where == "negative" else "times_") in check.case
    peak = max(np.abs(array).max() for array in Groups(SEEN)[0].values())
    right_field = {6: 2, 100: 8, "negative": 0}[where]
    assert (f"right up to |x| = {right_field * peak:.3g}" in check.note) is bool(right_field)
    assert ("65504" in moved(Linear(fault), precision="fp16")[0].note) is bool(right_field)
    (clean,) = moved(Linear(lambda x, y: y * np.float32(1 + 1e-6)))
    assert clean.passed and "times 64" in clean.note and "negative" in clean.note and "blank, flat" in clean.note


def test_answers_cached_by_the_first_row_and_wrong_answers_for_small_values_fail() -> None:
    def stored_by(row: int, batch: int) -> Linear:
        answers: dict[bytes, np.ndarray] = {}
        return Linear(lambda x, y: answers.setdefault(x[row].tobytes(), y) if len(x) == batch else y)

    by_first_row, by_last_row = stored_by(0, 4), stored_by(-1, 16)
    by_first_row.run(SEEN.cases[0].inputs)
    small_module = Linear(lambda x, y: np.where(np.abs(x).max(-1, keepdims=True) < 0.01, 0, y).astype(np.float32))
    cases = [moved(module)[0].case for module in (by_first_row, by_last_row, small_module)]
    assert [case.partition("values=")[2].partition(" ")[0] for case in cases] == ["repeated", "mixed", "small"]


def test_a_rare_fault_fails_and_the_odds_of_missing_a_rarer_one_are_reported() -> None:
    def rare(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        hits = np.array([len(x) > 4 and crc32(row.tobytes()) % 50 == 1 for row in x])
        return np.where(hits[:, None], y * np.float32(1.1), y)

    (check,) = moved(Linear(rare))
    assert not check.passed and "values=mixed" in check.case
    x = make(parse_only(check.case, DIMS), SPECS, Groups(SEEN), VALUES_SEED, "fp32")["x"]
    assert (rare(x, x @ WEIGHTS) != x @ WEIGHTS).any(), "the case that the check names has the fault"
    note = moved(Linear())[0].note
    count = int(note.partition(" mixed samples: ")[0].rpartition(" ")[2])
    assert 200 < count <= 256 and f"1 of 1,000 inputs would be missed with a probability of {0.999**count:.2g}" in note


@pytest.mark.parametrize("values", ["mixed", "repeated", "times_64"])
def test_new_values_that_break_the_limits_are_judged_by_honest_rounding_on_them(values: str) -> None:
    off_module, far_module = (Linear(lambda x, y, by=by: y * np.float32(1 + by * is_new(x))) for by in (2e-3, 0.18))
    is_new = {
        "mixed": lambda x: len(x) == DIMS[0].max, "repeated": lambda x: (x == x[0]).all(),
        "times_64": lambda x: 60 < np.abs(x).max() < np.inf,
    }[values]  # fmt: skip
    assert f"values={values}" in moved(off_module)[0].case
    for engine in (off_module, far_module):  # of 54 and 15 dB, where honest rounding gives 36
        assert moved(engine, case_limits=lambda inputs: OutputLimits.of(FREE))[0].passed is (engine is off_module)


@pytest.mark.parametrize(
    ("hides", "first", "later"),
    [("form", 0, -0.5), ("values", 3e-5, -0.5), ("margin", [0, 0, 9e-4], 1.2e-3), ("excuse", [0, 0, 1e-2], 5e-3)],
)
def test_no_mixture_hides_a_fault_of_a_later_mixture(hides: str, first: object, later: float) -> None:
    batches, units = list[np.ndarray](), np.array([1e5, 1e5, 1], np.float32)

    def late(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        batches.extend([x] * (len(x) == DIMS[0].max))
        if len(batches) == 1:
            return np.concatenate([y, y[:1]]) if hides == "form" else y * units * (1 + np.float32(first))
        return y * units * np.array([1, 1, 1 + later * (len(batches) > 8)], np.float32)

    def own(_: object) -> OutputLimits:
        is_excused = hides == "excuse" and len(batches) == 1
        return OutputLimits.of(replace(BUDGET, slice_sqnr_db=0.0) if is_excused else BUDGET)

    assert moved(Linear(late), reference=Linear(lambda x, y: y * units), case_limits=own)[0].case.endswith("draw=6")


def test_a_batch_is_measured_by_its_worst_element_too(recwarn: pytest.WarningsRecorder) -> None:
    value, none = np.ones((4, 64), np.float32), np.zeros((1, 0, 4), np.float32)
    even, spiked_errors = (_measure_errors({"y": value}, {"y": value + 1e-3 + by * np.eye(4, 64)}) for by in (0, 3e-3))
    assert even and spiked_errors and [key[1] for key in even if (spiked_errors[key] > 2 * even[key]).any()] == ["peak"]
    assert _measure_errors({"y": none}, {"y": none}) and not recwarn.list, "an output without elements"


def test_only_new_samples_count_as_mixed() -> None:
    pair, notes = FuzzSides(Linear(), Linear(), "fp32", StagedLimits.of(BUDGET), BUDGET), []
    for specs, dims in ((SPECS, (Dim("batch", 1, 2, 3),)), ((TensorSpec("x", "float32", (4, 4)),), ())):
        golden = freeze(GOLDEN if dims else GOLDEN[:1], specs, dims, Linear().run)
        notes.append(next(magnitude_checks(pair, (specs, dims), golden, UNHURRIED)).note)
    count = int(notes[0].partition(" mixed samples: ")[0].rpartition(" ")[2])
    assert 200 < count < 258 and "mixed" not in notes[1], "some are mixed with themselves, and one sample always is"


@pytest.mark.parametrize("spoiled", [np.isnan, np.isinf], ids=["NaN", "infinities"])
def test_effects_of_a_non_finite_sample_on_others_and_on_later_calls_fail(spoiled) -> None:
    hurt_items: list[bool] = []

    def poisoned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        hurt_items.append(spoiled(x).any())
        return y + (any(hurt_items) and np.isfinite(x).all())

    leaking_sides = moved(Linear(lambda x, y: y + spoiled(x).any()))[0]
    assert not leaking_sides.passed and leaking_sides.case.endswith("nan" if spoiled is np.isnan else "infinite")
    assert not moved(Linear(poisoned))[0].passed

    def dropped(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(x).all(1, keepdims=True), y, 0).astype(np.float32)

    dropping = Linear(lambda x, y: y - np.fmax.reduce(y))
    assert moved(Linear(lambda x, y: y - np.max(y, 0)), reference=dropping)[0].passed, "the graph mixes samples"

    def widened(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.tile(y[:, :1], (1, 3 + int(np.abs(np.nan_to_num(x, posinf=0, neginf=0)).max() > 6)))

    module = Linear(lambda x, y: widened(x, y) + spoiled(x).any())
    assert moved(module, reference=Linear(widened))[0].passed, "the form of the graph's answer depends on all samples"

    message = moved(Linear(dropped))[0]
    assert message.passed and "values=nan: 3 elements of y are finite in graph or engine alone" in message.note
    for reads_nan in (False, True):
        (other,) = moved(Linear(), reference=Linear(dropped), reads_nan=reads_nan)
        assert other.passed is not reads_nan, "a graph that asks for NaN says what its answer is"


@pytest.mark.parametrize("kind", ["float32", "int64", "bool"])
@pytest.mark.parametrize(
    ("name", "counts", "is_left"),
    [("mask", (4, 4), False), ("mask", (2, 3), False), ("mask", (2, 3), True), ("attention", (2, 3), True),
     ("padding_mask", (2, 3), False)],
)  # fmt: skip
def test_masks_of_lengths_that_the_golden_data_lacks_are_tried(kind, name: str, counts, is_left: bool) -> None:
    specs = (*SPECS, TensorSpec(name, kind, SPECS[0].shape))

    def mask_of(x: np.ndarray) -> np.ndarray:
        is_token = np.arange(4)[:: -1 if is_left else 1] < np.resize(counts, (len(x), 1))
        return (is_token != (name == "padding_mask")).astype(kind)

    class Masked(Linear):
        inputs = specs

        def __init__(self, wrong: int, undefined: int = 0) -> None:
            super().__init__()
            self.wrong, self.undefined = wrong, undefined

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            is_token = inputs[name].astype(bool) != (name == "padding_mask")
            y, count = super().run({"x": inputs["x"] * is_token})["y"], is_token.sum(1, keepdims=True)
            return {"y": np.where(count == self.undefined, np.nan, y * (1 + 0.1 * (count == self.wrong)))}

    golden = GoldenSet([replace(case, inputs={**case.inputs, name: mask_of(case.inputs["x"])}) for case in SEEN.cases],
                       noise=SEEN.noise)  # fmt: skip

    def check_of(*faults: int) -> Check:
        pair = FuzzSides(Masked(0, *faults[1:]), Masked(*faults), "fp32", StagedLimits.of(BUDGET), BUDGET)
        return next(magnitude_checks(pair, (specs, DIMS), golden, UNHURRIED))

    reach = f"{min(counts)} to {max(counts)} in golden data"
    if (name, is_left) == ("mask", True):  # or ones are padding
        assert f"; 1, 2, 3 ones in a row of mask ({reach})" in check_of(0).note
        return
    assert check_of(0).passed and f"; 1, 2, 3, 4 tokens in a row of {name} ({reach})" in check_of(0).note
    for wrong in {1, 4} - {*counts}:
        assert not check_of(wrong).passed and check_of(wrong).note.startswith("wrong for masks of other lengths: ")
    undefined = check_of(0, 1)
    assert undefined.passed and f"; 2, 3, 4 tokens in a row of {name} ({reach})" in undefined.note
    assert not check_of(4, 1).passed, "the graph's NaN at one length leaves the others judged"


@pytest.mark.parametrize("values", ["negative", "positive", "blank", "flat", "nan"])
def test_a_quantized_engine_is_judged_at_other_values_by_honest_rounding_alone(values: str) -> None:
    def fault(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        is_flat = (x == x[:, :1]).all(1, keepdims=True)
        is_hit = {"negative": (x < 0).all(), "positive": (x > 0).all(), "nan": np.isnan(x).any(),
                  "blank": is_flat & (x[:, :1] == 0), "flat": is_flat & (x[:, :1] != 0)}[values]  # fmt: skip
        return ((y + 1) * np.where(is_hit, 1.1, 1)).astype(np.float32)

    low, high = (replace(FREE, sqnr_db=sqnr_db) for sqnr_db in (15.0, 49.0))
    sides = {"precision": "int8", "documented": low, "limits": StagedLimits.of(high)}
    (check,) = moved(Linear(fault), reference=Linear(lambda x, y: y + 1), **sides)
    assert f"values={values}" in check.case and "limit 49" in check.note.partition(";")[0]
    sides["case_limits"] = lambda _: OutputLimits.of(low)
    assert moved(Linear(fault), reference=Linear(lambda x, y: y + 1), **sides)[0].passed


def test_limits_of_edges_never_loosen_those_of_moved_values_and_a_lifted_one_stays_lifted() -> None:
    low, high, edge, lifted = (replace(FREE, sqnr_db=sqnr_db) for sqnr_db in (15.0, 49.0, 3.0, None))
    sides = {"precision": "int8", "documented": low}
    limits = StagedLimits.of(Budgets(low, {("y", "golden"): high, ("y", "edge"): edge}))
    off_module = Linear(lambda x, y: y * np.float32(1.5 if (x < 0).all() else 1))
    assert "values=negative: 6.021, limit 8.9" in moved(off_module, limits=limits, **sides)[0].note
    module = Linear(lambda x, y: np.where(60 < np.abs(x).max() < np.inf, np.inf, y).astype(np.float32))
    assert [moved(module, limits=StagedLimits.of(item), **sides)[0].passed for item in (low, lifted)] == [0, 1]


def test_ill_conditioned_and_non_finite_rows_are_not_judged() -> None:
    class Wild(Linear):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"y": np.sin(1e12 * super().run(inputs)["y"]).astype(np.float32)}

    class Other(Wild):
        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            x, mixed_max = inputs["x"], DIMS[0].max
            is_right = len(x) == mixed_max or (x == x[:1]).all() or not np.isfinite(x).all()
            return super().run({"x": x * np.float32(1 if is_right else 1 + 1e-6)})

    assert "golden data repeated, nan, infinite, mixed, stretched;" in moved(Other(), reference=Wild())[0].note
    assert not moved(Linear(lambda x, y: y + 1))[0].passed, "what is well-conditioned is judged"
    module = Linear(lambda x, y: y + 9 * (x != x[:, :1]).any(1, keepdims=True))
    assert "blank, repeated" in moved(Linear(lambda x, y: y + 9 * x.any(1, keepdims=True)), reference=module)[0].note
    classes = Linear(lambda x, y: y.argmax(-1))
    assert moved(classes, reference=classes)[0].note.startswith("golden data repeated, mixed, stretched;")
