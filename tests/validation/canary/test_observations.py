import json

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from validation.canary.judging.pairing import evidence_of
from validation.canary.observations import MOST_LINE_BYTES, EngineIdentity, read_head, read_observations

DIGEST = "ab" * 32
HEAD = {"format": 1, "kind": "enginesmith-observations", "model": "tiny", "version": "2", "manifest": DIGEST}


def line(number=0, **changes):
    result = {"time": float(number), "latency": 0.01, "ok": True, "request": number, "output": DIGEST} | changes
    return json.dumps({key: value for key, value in result.items() if value is not None})


def written(tmp_path, *lines, name="candidate.jsonl", end="\n"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + end)
    return path


def test_good_lines_are_read(tmp_path):
    table = read_observations(written(tmp_path, json.dumps(HEAD), line(0, more="ignored"), "", line(1, ok=False)))
    assert table.ok == [True, False] and table.identity.manifest == DIGEST and not table.cut
    assert read_head(table.path) == table.identity and len(table.digest) == 64
    assert read_head(written(tmp_path, line(0))) == EngineIdentity()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(1).replace("0.01", "NaN"), "NaN is not JSON"),
        (line(1).replace("0.01", "1e999"), "latency is inf; a finite number"),
        (line(1).replace("0.01", "1" * 400), "latency is a huge number; a finite"),
        (line(1, latency=-0.001), r"latency is -0.001; it must be above 0"),
        (line(1, latency=1e299), "latency is .*; it must be"),
        (line(1, score=1e299), "score is .*; it must be"),
        (line(1, score=-1e299), "score is .*; it must be"),
        (line(1, latency="0.01"), "latency is '0.01'; a finite number"),
        (line(1, latency=True), "latency is True"),
        (line(1, latency=None), "latency is missing"),
        (line(1, time=None), "time is missing"),
        (line(1, ok=1), "ok is 1; true or false"),
        (line(1, ok=None), "ok is None; true or false"),
        (line(1, output="xyz"), "output is 'xyz'; the SHA-256"),
        (line(1, request=[1]), "request is"),
        (line(1, score="good"), "score is 'good'"),
        (line(1, error=5), "error is 5"),
        ("[1, 2]", "is list; an object"),
        ("[" * 100_000, "is not JSON"),
        ('{"time": 1', "is not JSON"),
        ("\udcff\udcfe", "is not JSON"),
        (json.dumps({**HEAD, "format": 2}), "'enginesmith-observations' in format 2; this version reads"),
        (json.dumps({**HEAD, "engine": "zz"}), "engine is 'zz'; a SHA-256"),
        (json.dumps(HEAD), "is a second head"),
        (json.dumps({**HEAD, "planned": -5}), "planned is '-5'"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, bad, message):
    path = tmp_path / "candidate.jsonl"
    path.write_bytes("\n".join([line(0), bad, line(2)]).encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(DataError, match=rf"candidate.jsonl:2: .*{message}"):
        read_observations(path)


def test_a_huge_line_is_refused_before_it_is_parsed(tmp_path):
    with pytest.raises(DataError, match=f"candidate.jsonl:2: is longer than {MOST_LINE_BYTES} bytes"):
        read_observations(written(tmp_path, line(0), line(1, error="x" * (MOST_LINE_BYTES + 1))))


def test_half_a_last_line_is_omitted_and_reported(tmp_path):
    candidate = read_observations(written(tmp_path, line(0), line(1), line(2)[:25], end=""))
    assert len(candidate) == 2 and candidate.cut
    baseline = read_observations(written(tmp_path, line(0), line(1), line(2), name="baseline.jsonl"))
    evidence, notes = evidence_of(candidate, baseline, 15.0)
    assert evidence.requests == 2 and "half a line" in notes[0] and "in flight to the candidate" in notes[1]


def test_empty_and_duplicate_requests_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no observations"):
        read_observations(written(tmp_path, json.dumps(HEAD)))
    with pytest.raises(DataError, match=r"request '7' was observed again; 1 of 2 observations repeat .*, over 0\.1 %"):
        read_observations(written(tmp_path, line(7), line(7)))
    with pytest.raises(DataError, match="'5000' was observed again; 4 of 2005 "):  # one name of many requests
        read_observations(written(tmp_path, *map(line, range(2000)), *[line(5000)] * 5))
    with pytest.raises(DataError, match="cannot be read"):
        read_observations(tmp_path / "gone.jsonl")


def both(tmp_path, ours, theirs):
    return [
        read_observations(written(tmp_path, *lines, name=f"{name}.jsonl"))
        for name, lines in (("candidate", ours), ("baseline", theirs))
    ]


def test_a_request_that_one_side_lost_counts_as_failed_there(tmp_path):
    pair = both(tmp_path, [line(0), line(2), line(3)], [line(3), line(0), line(1), line(2)])
    evidence, notes = evidence_of(*pair, 15.0)
    assert evidence.paired and list(evidence.candidate.ok) == [True, False, True, True] and evidence.baseline.ok.all()
    assert "1 requests were observed on one side only, and count as failed" in notes[0]
    evidence, notes = evidence_of(*pair, 15.0, ignore_missing=True)
    assert evidence.requests == 3 and "left out" in notes[0]


@pytest.mark.parametrize("attempts", [({}, {"ok": False}), ({"latency": 9.0}, {}), ({"output": "cd" * 32}, {})])
def test_attempts_of_the_candidate_count_and_the_baselines_are_kept(tmp_path, attempts):
    rest, second_lines = [line(index) for index in range(1, 2000)], [line(0, **changes) for changes in attempts]
    end = json.dumps({"kind": "enginesmith-end", "requests": 2001})
    spoilt, notes = evidence_of(*both(tmp_path, [*second_lines, *rest, end], [line(0), *rest]), 15.0)
    bad_flags = not spoilt.candidate.ok[0], spoilt.candidate.latency[0] > 1, bool(spoilt.differs[0])
    assert sum(bad_flags) == 1 and "candidate.jsonl: 1 request observed again; the worst try counts" in notes[0]
    assert spoilt.requests == 2000 and read_observations(tmp_path / "candidate.jsonl").merge_attempts(worst=True).ended
    spared, notes = evidence_of(*both(tmp_path, [line(0), *rest], [*second_lines, *rest]), 15.0)
    assert spared.baseline.ok.all() and spared.baseline.latency.max() < 1 and "the best try counts" in notes[0]


def test_answers_are_compared_by_distance_or_digest(tmp_path):
    other_text = "cd" * 32
    our_lines = [line(0), line(1, output=other_text), line(2, output=other_text, sqnr_db=40.0)]
    our_lines += [line(3, sqnr_db=3.0), line(4, ok=False)]
    evidence, _ = evidence_of(*both(tmp_path, our_lines, [line(index) for index in range(5)]), 15.0)
    assert list(evidence.differs) == [False, True, False, True]
    evidence, _ = evidence_of(*both(tmp_path, [line(0, output=None)], [line(0)]), 15.0)
    assert evidence.differs is None


def test_without_names_the_sides_are_judged_separately(tmp_path):
    our_lines = [line(5, request=None, score=1.0), line(1, request=None, score=0.5)]
    evidence, notes = evidence_of(*both(tmp_path, our_lines, [line(0)]), 15.0)
    assert not evidence.paired and list(evidence.candidate.time) == [1.0, 5.0] and "different requests" in notes[0]
    assert np.allclose(evidence.candidate.score, [0.5, 1.0]) and evidence.differs is None
    with pytest.raises(DataError, match="no request in common"):
        evidence_of(*both(tmp_path, [line(1)], [line(2)]), 15.0)
