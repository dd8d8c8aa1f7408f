"""A part of `make proof`: each fault is caught where it shows, and blamed on its node; and no false alarm."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.types import Precision
from pipeline.quantization.schemes.write import write
from tests.faults.bench import Bench
from tests.faults.campaign import Alarms, Outcome, Subject, noise_of
from tests.faults.families import FAMILIES
from tests.faults.plants import PLANTS
from tests.faults.proof_table import END, START, Honest, alarm_rows, fault_rows, missed, with_tables
from tests.faults.sessions import ONLY, SESSIONS, use_steady_clock
from tests.pipeline.quantization.small_nets import CPU, build
from tests.scheduling import slow_after_first
from tests.validation.attribution.planted import with_names, with_weight

# Where each fault must be caught: a family, and the precisions of it that it is planted in.
WHERE: dict[str, tuple[str, tuple[Precision, ...]]] = {
    "two channels of a weight swapped": ("conv", ("fp32", "fp16", "int8", "int8-dynamic")),
    "a bias dropped": ("recurrent", ("fp32", "fp16", "int8", "int8-dynamic")),
    "epsilon 1e-3 for 1e-5": ("encoder", ("fp32",)),
    "tanh for erf in GELU": ("encoder", ("fp32",)),
    "weights of 10 bits (TF32)": ("far", ("fp32",)),
    "the least channel dead": ("detector", ("fp32", "fp16", "int8")),
    "one column x1.02": ("mlp", ("fp32", "fp16")),
    "the scores of a detector halved": ("detector", ("fp16", "int8")),
    "a constant answer": ("far", ("fp32", "fp16", "int8")),
    "zero point +1": ("conv", ("int8",)),
    "zero point +4": ("mlp", ("int8",)),
    "zero point +8": ("encoder", ("int8",)),
    "all scales x1.2": ("recurrent", ("int8",)),
    "one channel's scale x1.5": ("mlp", ("int8",)),
    "one weight's scale flipped": ("conv", ("int8",)),
    "sums of pairs saturate at 16 bits": ("encoder", ("int8",)),
    "a long sum carried in fp16": ("wide", ("fp16",)),
}


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """One subject for each family; a fault changes an engine of it, and not the subject."""
    return cache(lambda family: Subject(tmp_path_factory.mktemp(family), FAMILIES[family], 1))


@pytest.mark.parametrize("plant", slow_after_first(PLANTS), ids=lambda plant: plant.name)
def test_a_fault_is_caught_in_every_precision_and_blamed_on_its_node(plant, subject_of) -> None:
    family, precisions = WHERE[plant.name]
    result = {precision: subject_of(family).plant(plant, precision) for precision in precisions}
    assert {name: bool(item and item.by) for name, item in result.items()} == dict.fromkeys(precisions, True)
    assert {name for name, item in result.items() if item and item.right is False} == set()


def test_a_class_that_fp16_never_predicts_fails_whatever_sqnr_a_spec_allows(tmp_path: Path) -> None:
    data = (np.eye(8)[np.arange(200) % 8] + 0.05 * np.random.default_rng(0).normal(size=(200, 8))).astype(np.float32)
    most, low = (np.where(np.arange(10) == 3, cap, 6e4) for cap in (6e4, 0.1))
    texts = ("float[batch,8] x", "float[batch,10] logits", "all = MatMul(x, w)\nlogits = Min(all, most)")
    bench = Bench(tmp_path / "bench", with_names(build(*texts, {"w": 4 * np.eye(8, 10), "most": most})), {"x": data})
    saturated_model = with_weight(write(bench.canonical(), "fp16", CPU, {})[0], "most_fp16", low)
    limits = {"sqnr_db": 1.0, "max_rel": 2.0, "centered_sqnr_db": 1.0, "quartile_sqnr_db": 1.0, "cosine": 0.1}
    failed_names = {item.name for item in bench.graph_checks(saturated_model, "fp16", limits) if not item.passed}
    assert "max_classes_lost" in failed_names and "sqnr_db" not in failed_names


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    use_steady_clock(monkeypatch)


@pytest.mark.usefixtures("steady_clock")
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_with_errors_that_vary_between_calls_is_caught(name: str, subject_of) -> None:
    assert subject_of(ONLY.get(name, "mlp")).misbehave(name, seconds=2.0 if name in ONLY else 0.5).by


def test_a_bf16_graph_that_is_too_coarse_is_caught(subject_of) -> None:
    assert subject_of("far").coarse().by


@pytest.mark.parametrize("family", slow_after_first(FAMILIES))
def test_correct_kernels_raise_no_alarm(family: str, tmp_path: Path) -> None:
    subject = Subject(tmp_path / family, FAMILIES[family], 7000)
    items = [message for precision in ("fp32", "int8") for message in subject.alarms(precision)]
    assert [item for item in items if item.failed] == []


def test_missed_faults_and_false_alarms_are_reported() -> None:
    honest_alarms = [Alarms("mlp", "int8", seed, "other", (), (1e-6, 1e-6)) for seed in range(3)]
    large_outcome = Outcome("a", "mlp", "int8", 0, (), None, (1e-4, 0.0))
    small_outcome = Outcome("a", "mlp", "int8", 1, (), None, (1e-6, 1e-6))
    outcome = Outcome("a", "mlp", "int8", 2, ("sqnr_db",), False, (1e-2, 0.0))
    assert Honest(honest_alarms).ratio(large_outcome) == pytest.approx(10)
    assert [line.partition(":")[0] for line in missed([large_outcome, small_outcome, outcome], honest_alarms)] == [
        "not caught",
        "another node blamed",
    ]
    assert missed([], [*honest_alarms, Alarms("mlp", "int8", 9, "other", ("x",))])
    assert "1 of 2; 0 of 1 smaller" in fault_rows([large_outcome, small_outcome, outcome], Honest(honest_alarms))
    table = alarm_rows(honest_alarms)
    page = with_tables(f"before{START}old{END}after", table)
    assert "| mlp | other |" in table and page == f"before{START}{table}{END}after"
    with pytest.raises(ValueError, match="must be on the page"):
        with_tables(f"before{START}after", table)


def test_the_noise_of_a_slice_is_its_own() -> None:
    expected = np.ones((4, 3))
    assert noise_of(expected, expected + np.array([0, 0, 0.3])) == pytest.approx((0.03, 0, 0, 0.09))
