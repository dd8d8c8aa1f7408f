import json
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.recording.recorder import ObservationLog
from enginesmith.recording.traffic import EQUAL_DB
from pipeline.canary.engines import isolate
from pipeline.canary.run import in_flight_of
from tests.pipeline.canary.busy import opened
from tests.pipeline.canary.test_isolated import manifests, replayed
from tests.validation.canary.simulated import Engine, Ticking, traffic
from validation.canary import replay
from validation.canary.observations import read_both
from validation.canary.replay import ReplayPace, TrafficSegment, replay_concurrently
from validation.canary.report import read_report

__all__ = ["manifests"]  # a fixture
AUTO = ReplayPace(in_flight=None)


def found(seen, pace=AUTO, observed=None, seconds=0.01):
    ticking_clock = Ticking()
    engine = Engine(ticking_clock, np.random.default_rng(0), seconds=seconds)
    return in_flight_of(seen, pace, observed, engine, ticking_clock.clock())


def test_the_recorded_number_of_requests_is_in_flight(tmp_path: Path) -> None:
    seen = traffic(100, 0.01)
    assert found(seen).count == 1 and "s, as the baseline's do by themselves" in found(seen).source
    assert found(seen, seconds=0.025).count == 3, "what would overlap if each took what the baseline takes alone"
    assert found(seen, replace(AUTO, scale=4.0)).count == 4, "denser: more at once"
    slow_traffic = replace(seen, requests=tuple(replace(request, latency=0.045) for request in seen.requests))
    assert found(slow_traffic).count == 5 and "latencies in the traffic" in found(slow_traffic).source
    with ObservationLog(tmp_path / "stable.jsonl") as log:
        for index in range(50):
            log.append(0.095, time_s=index * 0.01)
        log.append(9.0, ok=False, time_s=1.0)
    assert found(slow_traffic, observed=tmp_path / "stable.jsonl").count == 10
    assert found(slow_traffic, replace(AUTO, in_flight=7)).count == 7
    many_findings = found(seen, seconds=1.0)
    assert many_findings.count == 32 and "is 99; at most 32 are replayed" in many_findings.source


def test_traffic_without_times_is_sent_one_by_one() -> None:
    untimed_traffic = replace(traffic(10, 0.0), timed=False)
    assert found(untimed_traffic).count == 1 and "no times" in found(untimed_traffic).source
    for pace in (ReplayPace(in_flight=4), ReplayPace(duration=3.0)):
        with pytest.raises(InputError, match="no times"):
            found(untimed_traffic, pace)


@pytest.mark.parametrize("safe", [True, False])
def test_threads_share_a_session_that_allows_it_and_open_their_own_otherwise(safe: bool) -> None:
    inputs = {"x": np.ones((1, 4), np.float32)}
    with isolate("candidate", partial(opened, 3), safe) as session:
        session.prepare(3, [])
        answers = list(session.serve_segment(TrafficSegment([0.0] * 6, [inputs] * 6)))
    rows = [answer.served.outputs["y"][0] for answer in answers if answer.served.outputs is not None]
    assert len(rows) == 6 and all(row[0] == 3 for row in rows), "three were running at once, each time"
    assert {row[1] for row in rows} == ({1} if safe else {2, 3, 4}), "which session ran it, in the order of opening"
    assert all(row[2] == 1 for row in rows) or safe, "each by the thread that opened it"


@pytest.mark.slow
def test_large_answers_are_compared_one_by_one_within_the_limit(monkeypatch) -> None:
    bound_number, answer, count = 4 << 20, 2 << 20, 60
    monkeypatch.setattr(replay, "HELD_BYTES", bound_number)
    opener = partial(opened, 1, answer=answer)
    with isolate("candidate", opener, True) as candidate, isolate("baseline", opener, True) as baseline:
        for session in (candidate, baseline):
            session.prepare(4, [])
        tracemalloc.start()
        try:
            pairs = list(replay_concurrently(candidate, baseline, traffic(count, 1e-4), ReplayPace(), 4))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert [pair.request for pair in pairs] == list(range(count))
    assert all(pair.difference and pair.difference.sqnr_db == EQUAL_DB for pair in pairs)
    # One side's answers, and one more with its copies: pickled, as 64-bit floats, and their difference.
    assert peak <= bound_number + 4 * answer + 10 * answer, f"{peak / answer:.0f} answers were held at once"


def test_an_engine_that_cannot_open_that_often_gives_a_remedy() -> None:
    opener = partial(opened, 2, most=2)
    with isolate("candidate", opener) as session, pytest.raises(EnginesmithError, match=r"out of memory.*--in-flight"):
        session.prepare(2, [])


def test_an_in_flight_canary_compares_each_request(tmp_path, manifests) -> None:
    pace = ReplayPace(warmup=2, in_flight=3)
    replay = replayed(tmp_path, manifests, partial(opened, 1), partial(opened, 1), 400, pace, True)
    seen = read_both(*(tmp_path / f"out/{side}.jsonl" for side in ("candidate", "baseline")))
    assert seen[0].request == seen[1].request == list(range(400)) and all(seen[0].ok) and seen[0].time == seen[1].time
    assert replay.report.traffic.in_flight == 3 and "requests in flight: 3; as was asked for" in replay.report.notes
    assert read_report(replay.json.read_bytes()) == replay.report
    assert "--in-flight 3" in replay.page.read_text()


@pytest.mark.parametrize(("how", "words"), [("exit", "exit status 3"), ("sys.exit", "exit status 4")])
def test_a_candidate_that_dies_in_flight_is_not_promoted(tmp_path, manifests, how, words) -> None:
    pace = ReplayPace(warmup=2, in_flight=3)
    dying_open = partial(opened, 1, how=how, at=205)
    written_replay = replayed(tmp_path, manifests, dying_open, partial(opened, 1), 400, pace, True)
    assert written_replay.report.verdict == "FAIL"
    assert f"the candidate's engine ended its process: {words}, among requests" in written_replay.report.reason
    seen_tables = read_both(*(tmp_path / f"out/{side}.jsonl" for side in ("candidate", "baseline")))
    assert seen_tables[0].ok[:100] == [True] * 100 and len(seen_tables[0].ok) <= 210 and {*seen_tables[1].ok} == {True}
    assert json.loads(written_replay.json.read_text())["verdict"] == written_replay.report.verdict
