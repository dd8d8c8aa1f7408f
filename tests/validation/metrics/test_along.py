import math
from dataclasses import replace

import numpy as np

from validation.metrics.tally import Along, StepSpreads


def pair(steps: int, at: int, size: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of steps, which differ in their decision from step `at` on."""
    expected = np.tile(np.array([[[2.0, 1.0]]], np.float32), (steps, 1, 1))
    actual = expected.copy()
    actual[at:, :, 1] += size
    return expected, actual


def test_the_worst_sequence_and_the_first_other_decision_are_named() -> None:
    axis_texts = Along()
    for name, number in (("sequence 0", 12), ("sequence 1", 16), ("sequence 2", 4), ("sequences side by side", 4)):
        axis_texts.add("y", name, True, pair(16, number), 16)
    (result,) = axis_texts.at("engine")
    assert [item.first for item in result.sequences] == [12, None, 4, 4]
    assert result.worst.case == "sequence 2" and result.decides
    assert result.decisions == (
        "decisions first differ at step 4 (sequence 2; median of the sequences: step 4); "
        "1 of 3 sequences without a difference"
    )
    assert result.starts == tuple(range(0, 16, 2))
    assert result.free_db[:2] == (math.inf, math.inf) and result.free_db[2] > result.free_db[7]
    axis_texts.add("n", "sequence 0", True, pair(9, 0), 9)
    assert axis_texts.at("engine")[1].starts == (0, 2, 4, 6, 8), "at most eight parts"


def test_drift_of_single_steps_depends_on_their_place() -> None:
    axis_texts = Along()
    axis_texts.add("y", "sequence 0", True, pair(16, 16), 16)
    spreads = StepSpreads(axis_texts, {"golden 0": (0, 1, 15), "golden 1": (14,)})
    expected = np.ones((3, 2), np.float32)
    spreads.add("y", "golden 0", True, (expected, expected + np.float32([[0], [0], [1]])), 3)
    spreads.add("y", "golden 1", True, (expected[:1], expected[:1]), 1)
    spreads.add("y", "edge", False, (expected, expected * 2), 3)
    (result,) = axis_texts.at("engine")
    assert result.single_db[0] == math.inf and result.single_db[-1] == round(10 * math.log10(2), 2)
    assert all(math.isnan(level) for level in result.single_db[1:-1])
    assert spreads.at("engine")[0].samples == 4
    assert result.course == "inf dB at the beginning, inf dB at the end (step by step: inf dB and 3 dB)"
    assert replace(result, single_db=(math.nan,) * 8).course == "inf dB at the beginning, inf dB at the end"


def test_outputs_without_decisions_have_no_first_difference() -> None:
    axis_texts = Along()
    axis_texts.add("p", "sequence 0", True, (np.ones((8, 1, 1)), np.zeros((8, 1, 1))), 8)
    axis_texts.add("left", "sequence 0", True, (np.ones((1, 1, 9)), np.zeros((1, 1, 9))), 1)
    (result,) = axis_texts.at("export")
    assert not result.decides and result.decisions == "" and result.sequences[0].first is None
    axis_texts.add("n", "sequence 0", True, (np.ones((8, 1), int), np.eye(8, 1, dtype=int)), 8)
    assert axis_texts.at("export")[1].sequences[0].first == 1
    axis_texts.add("i", "sequence 0", True, (np.ones((2, 1, 1)), np.full((2, 1, 1), np.inf)), 2)
    assert axis_texts.at("export")[2].text.startswith("worst sequence 0, nan dB"), "an infinity is a difference"
