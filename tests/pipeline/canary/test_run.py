"""`enginesmith traffic record` and `enginesmith canary run` on a real engine; interrupted, it leaves observations to be
judged."""

import numpy as np
import pytest

from enginesmith.core.hardware.machine import target_named
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from pipeline.canary.engines import choose
from pipeline.canary.run import CanaryExecution, CanaryRun
from tests.validation.canary.simulated import Engine, Ticking, traffic
from validation.canary.judging.thresholds import Thresholds
from validation.canary.observations import read_observations
from validation.canary.replay import ReplayPace


@pytest.mark.parametrize(("fault", "looks"), [("swapped", 1), ("", 4)])
def test_it_stops_at_the_look_that_decides(built, tmp_path, fault, looks):
    """Engines of a simulated clock, through the whole of the run: a swapped output is found at the first look."""
    store = open_store(built.registry)
    reference, target = parse_reference("tiny@1"), target_named("cpu")
    wanted = CanaryRun(reference, reference, target, tmp_path, tmp_path / "out", pace=ReplayPace(), looks=4)
    ticking, said = Ticking(), []
    engines = [Engine(ticking, np.random.default_rng(seed), kind) for seed, kind in enumerate((fault, ""))]
    sides = [choose(store, reference, target, None)] * 2
    limits = Thresholds({"p50": 0.005}, error_rate=None) if not fault else Thresholds()
    written = CanaryExecution(wanted, sides, limits, "a test", traffic(1200), said.append).run(
        *engines, ticking.clock()
    )
    assert len(said) == len(written.report.looks.requests) == looks
    assert written.report.verdict == ("FAIL" if fault else "INSUFFICIENT")
    assert len(read_observations(tmp_path / "out/candidate.jsonl")) == 300 * looks
