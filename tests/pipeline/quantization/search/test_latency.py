"""What int8 does not make faster is left in float: the decision on injected times, and one race of real engines."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from onnx import ModelProto

from builders.backends.onnxruntime import OnnxRuntime
from enginesmith.core.types import BuildRequest, Target
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.search.latency import FEWEST, PATIENCE, ROUNDS, EngineTiming, Timing, benchmark_until_decided
from tests.pipeline.quantization.search.outlier_nets import all_ranges, choose, runs
from tests.pipeline.quantization.small_nets import CPU, attention_net, sentences


def rounds(int8: float, plain: float, jitter: float = 0.0) -> Iterator[tuple[float, float]]:
    """Endless rounds whose two sides are hit by the same slow moments, and by some jitter of their own."""
    for index in itertools.count():
        slow_value = 5.0 * (index % 3)
        yield int8 + slow_value + jitter * (index % 5 - 2), plain + slow_value - jitter * (index % 7 - 3)


@pytest.mark.parametrize(("int8", "plain", "pays"), [(10, 11, True), (11, 10, False), (10, 10.001, False)])
def test_a_group_pays_when_it_saves_more_than_the_margin(int8: float, plain: float, pays: bool) -> None:
    result = benchmark_until_decided(rounds(int8, plain))
    assert result.lost is not pays and result.rounds == (FEWEST if pays else PATIENCE)


def test_groups_within_noise_stay_in_int8_after_the_last_round() -> None:
    result = benchmark_until_decided(rounds(10.1, 10, jitter=2))
    assert not result.won and not result.lost and result.rounds == ROUNDS


def test_bad_luck_over_many_rounds_drops_nothing() -> None:
    """int8 is faster, but in three rounds of four something else held it up."""
    unlucky = ((9.0, 10.0) if index % 4 == 0 else (15.0, 10.0) for index in itertools.count())
    result = benchmark_until_decided(unlucky)
    assert result.saving_ms < 0 and not result.lost


class Scripted:
    """A race that knows a graph's time by which of its MatMuls are in int8."""

    def __init__(self, slow: str) -> None:
        self.slow, self.races = slow, 0

    def __call__(self, first: ModelProto, second: ModelProto) -> Iterator[tuple[float, float]]:
        self.races += 1
        return rounds(self._ms(first), self._ms(second))

    def _ms(self, model: ModelProto) -> float:
        quantized_names = [n.name for n in model.graph.node if n.op_type == "MatMul" and "dequantized" in n.input[0]]
        return 20 - sum(-3 if name == self.slow else 1 for name in quantized_names)


def chosen(race: Scripted, **options):
    model, samples = attention_net(), sentences(64)
    return choose(model, all_ranges(model, samples), CPU, runs(samples), race=race, **options)


@pytest.fixture(scope="module")
def last() -> str:
    """A node that is a group of its own."""
    rows = chosen(Scripted("")).rows
    return next(row.nodes[0] for row in rows if len(row.nodes) == 1)


def test_a_slower_group_stays_in_float_with_its_times_as_the_reason(last: str) -> None:
    race = Scripted(last)
    result = chosen(race)
    assert list(result.left) == [last] and "int8 is not faster here: the model takes" in result.left[last]
    assert race.races == len(result.rows)
    row = next(row for row in result.rows if last in row.nodes)
    assert not row.kept and row.int8_ms is not None and row.float_ms is not None and row.int8_ms > row.float_ms
    assert all(other.kept and other.int8_ms < other.float_ms for other in result.rows if other is not row)
    assert result.document(None).groups[0].int8_ms is not None and result.point.share == pytest.approx(1 - row.share)


def test_real_engines_are_raced_and_closed(tmp_path: Path) -> None:
    model, samples = attention_net(), sentences(16)
    written_model = quantize_int8(model, all_ranges(model, samples), CPU)[0]
    request = BuildRequest("0" * 64, "int8", Target("cpu"), "onnxruntime", (), (), ())
    with EngineTiming(OnnxRuntime(), request, samples, tmp_path) as race:
        result = Timing.of(list(itertools.islice(race(written_model, model), 4)))
        second_value = Timing.of(list(itertools.islice(race(written_model, written_model), 2)))
        assert len(list(tmp_path.iterdir())) == 1  # the engine that both races had is kept, the other is gone
    assert result.int8_ms > 0 and result.float_ms > 0 and second_value.rounds == 2
    assert list(tmp_path.iterdir()) == []
