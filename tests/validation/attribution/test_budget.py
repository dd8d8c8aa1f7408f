from pathlib import Path

import pytest

from pipeline.compile.steps.attributions import Clock
from tests.pipeline.quantization.small_nets import x_net, x_values
from tests.validation.attribution.planted import golden_of, graph, weight, with_names, with_weight
from validation.attribution.cuts import reduce
from validation.attribution.result import (
    MORE_TIME,
    Attribution,
    Proposal,
    describe_attribution,
    describe_proposal,
    summarize,
)
from validation.attribution.sweep import Size, attribute
from validation.limits.budget import default_budget

TEXT = " ".join(f"u{i} = MatMul(u{i - 1}, w) t{i} = Tanh(u{i})" for i in range(1, 7)).replace("u0", "x")
NET = with_names(x_net(f"{TEXT} y = Add(t6, t1)"))
WINDOW = Size(window_bytes=1)  # one segment in each


def stopped_after(runs: int, folder: Path) -> Attribution:
    """Attribution that is asked to stop when it has asked so often whether it should."""
    asked_iterator = iter([False] * runs)
    faulty_model = with_weight(NET, "w", weight(NET, "w") * 1.1)
    pair = graph(NET, folder, "clean"), graph(faulty_model, folder, "faulty")
    texts, limits = ("engine sqnr_db",), default_budget("engine", "fp32")
    return attribute(
        "engine", "fp32", *pair, golden_of(x_values()), limits, texts, WINDOW, stop=lambda: next(asked_iterator, True)
    )


def test_the_segments_measured_in_time_are_ranked(tmp_path: Path) -> None:
    whole_attribution, early_attribution, none = (stopped_after(runs, tmp_path / str(runs)) for runs in (1000, 4, 0))
    assert whole_attribution.complete and "time" not in summarize(whole_attribution)
    for result in (early_attribution, none):
        assert not result.complete and 0 < result.segments < whole_attribution.segments
        assert summarize(result).endswith("(the time limit ended before the whole model was ranked)")
        assert any(MORE_TIME in line for line in describe_attribution(result))
    assert len(none.cases) == 1 and none.segments < early_attribution.segments


def test_a_proposal_that_ran_out_of_time_is_not_reported_as_impossible() -> None:
    spent_total = reduce([1, 2], lambda _: False, 10, lambda: True)
    assert spent_total.items is None and spent_total.spent
    assert not reduce([1, 2], lambda _: False, 10).spent
    (message,) = describe_proposal(Proposal(2, 0, False, None, ended_early=True))
    assert message.startswith("no proposal yet: 0 graphs were run") and MORE_TIME in message


def test_the_clock_leaves_time_to_store_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    current_values = [100.0]
    monkeypatch.setattr("pipeline.compile.steps.attributions.time.monotonic", lambda: current_values[0])
    clock = Clock(300)
    current_values[0] = 200.0
    assert clock.left(0.5) == 50 and clock.left(0.8) == 140
