"""The open loop: planned times, and that a slow receiver hides no latency."""

import time

import numpy as np

from validation.load.arrivals import BurstTerms, PlannedArrivals, plan_poisson
from validation.load.open_loop import send_open_loop
from validation.load.summary import delay_of, memory_of, phases_of


def test_each_request_is_sent_at_its_time_in_order():
    at, seen = np.array([0.0, 0.02, 0.021, 0.06]), []
    found = send_open_loop(seen.append, at)
    assert seen == [0, 1, 2, 3] and not found.interrupted
    assert (found.sent >= at).all()


def test_a_receiver_that_is_held_up_once_delays_those_behind_it_and_all_of_that_counts():
    """Measured from when they were sent, one request of twenty would be slow; from when they were to arrive, most."""
    at = np.arange(20) * 0.005
    done = np.full(20, np.nan)

    def answer(number: int) -> None:
        time.sleep(0.1 if number == 2 else 0.0)
        done[number] = time.perf_counter()

    found = send_open_loop(answer, at)
    latencies = done - found.begun - at
    assert np.count_nonzero(latencies > 0.01) >= 15
    assert np.count_nonzero(done - found.begun - found.sent > 0.01) <= 5
    delay = delay_of(at, found.sent, done - found.begun)
    assert delay.behind and delay.late > 0.5


def test_ctrl_c_keeps_what_was_sent():
    def send(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    found = send_open_loop(send, np.zeros(10))
    assert found.interrupted and len(found.sent) == 4


def test_bursts_and_the_rest_have_latencies_of_their_own():
    plan = plan_poisson(200, 20, BurstTerms(4, 2, 10), 0)
    done = plan.at + np.where(plan.burst, 0.1, 0.01)
    done[0] = np.nan
    quiet, burst = phases_of(plan, done, np.zeros(len(plan), bool))
    assert (quiet.name, burst.name) == ("quiet", "burst")
    assert quiet.unanswered == 1 and burst.unanswered == 0
    assert round(quiet.quantiles[0].value, 4) == 0.01 and round(burst.quantiles[0].value, 4) == 0.1
    assert 700 < burst.offered < 900 and 170 < quiet.offered < 230


def test_a_generator_that_keeps_up_is_not_marked():
    at = np.arange(1000) * 0.001
    assert delay_of(at, at + 0.0001, at + 0.02).behind == ""
    assert delay_of(at, at + 0.01, at + 0.02).behind != ""
    assert delay_of(at, at + 0.0009, at + 0.001).behind == ""


def test_no_requests_of_a_kind_give_no_phase():
    plan = PlannedArrivals(np.zeros(0), np.zeros(0, bool), (1.0, 0.0))
    assert phases_of(plan, np.zeros(0), np.zeros(0, bool)) == ()
    assert delay_of(np.zeros(0), np.zeros(0), np.zeros(0)).behind == "nothing was sent"


def test_memory_that_grows_is_seen_by_the_minute():
    samples = [(at, 100 + at) for at in range(181)]
    found = memory_of(samples)
    assert (found.start, found.peak, found.by_minute) == (100, 280, (159, 219, 279, 280))
    assert found.growth is not None and abs(found.growth - 60) < 1
    assert memory_of(samples[:5]).growth is None
