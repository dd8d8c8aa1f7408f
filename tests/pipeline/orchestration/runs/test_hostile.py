"""Whoever can write to the registry can write its runs, histories and totals, too."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.builds.build_history import BUCKETS_S, Past, read_pasts, read_totals
from enginesmith.registry.builds.runs import parse_run
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import run_key
from pipeline.orchestration.metrics import live
from pipeline.orchestration.metrics.live import Looker
from pipeline.orchestration.runs.views import view_runs
from tests.enginesmith.registry.memory import MemoryStore
from tests.hostile import damaged, documents
from tests.pipeline.orchestration.runs.runs import EXPECTED, UNIT, running
from tests.pipeline.projects import Project

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
FEW = settings(max_examples=int(os.environ.get("ENGINESMITH_HOSTILE_EXAMPLES", "60")))
RUN = running(predicted=EXPECTED, retries=("x",), log="a" * 64, seconds=1.0, ended_at="2026")
PAST = Past("digits", "sm_89", "fp16", 1000, 10.0, 500.0, "built", "2026-01-01T00:00:00+00:00")
TALLY = {"state": "built", "target": "t", "backend": "b", "count": 1, "seconds": 1.0, "buckets": [1] * len(BUCKETS_S)}
STORE = MemoryStore()
STORE.create(run_key(RUN.id), b"")
TOTALS = {"format": 1, "buckets_s": list(BUCKETS_S), "builds": [TALLY], "hits": 1, "misses": 1}


def hostile(valid: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(documents(json.loads(valid), lambda document: document), damaged(valid))


@FEW
@given(hostile(RUN.to_bytes()))
def test_a_run_is_read_and_shown_or_refused(data: bytes) -> None:
    try:
        (view,) = view_runs(STORE, [parse_run("runs/x.json", data)])
    except IntegrityError as error:
        assert str(error).startswith("runs/x.json: ")
        return
    json.dumps(view.to_json(), allow_nan=False)


@FEW
@given(hostile(json.dumps({"format": 1, "builds": [asdict(PAST)]}).encode()))
def test_a_history_is_read_or_empty(data: bytes) -> None:
    assert isinstance(read_pasts(data), tuple)


@FEW
@given(hostile(json.dumps(TOTALS).encode()))
def test_totals_are_read_or_empty(data: bytes) -> None:
    for tally in read_totals(data).builds:
        assert len(tally.buckets) == len(BUCKETS_S)


@pytest.mark.parametrize("seconds", [{"float": "nan"}, {"float": "inf"}, -1.0, 1e300, 10**30])
def test_an_invalid_time_is_refused(seconds: object) -> None:
    assert read_pasts(json.dumps({"format": 1, "builds": [asdict(PAST) | {"seconds": seconds}]}).encode()) == ()
    assert not read_totals(json.dumps(TOTALS | {"builds": [TALLY | {"seconds": seconds}]}).encode()).builds
    document = json.loads(RUN.to_bytes())
    with pytest.raises(IntegrityError, match=r"beats_every_s is .*; it must be a number from 0 to"):
        parse_run("runs/x.json", json.dumps(document | {"beats_every_s": seconds}).encode())


def test_text_of_a_run_does_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = Project(tmp_path / "project", capsys)
    store = open_store(project.registry, create=True)
    log = store.put_bytes(b"\x1b]0;title\x07\x1b[2Jprinted\r\n\ttabbed\x9b31m\n")
    run = running(why="\x1b[2Jwhy \x9b [red]no[/red]", log=log, log_bytes=9)
    store.create(run_key(run.id), run.to_bytes())
    for words in (("status",), ("status", "digits"), ("status", "digits", "--log", UNIT)):
        shown_output = project.run(*words).out
        assert not {char for char in shown_output if char < " " and char not in "\n\t"} and "\x9b" not in shown_output
    assert "printed\n\ttabbed" in project.run("status", "digits", "--log", UNIT).out
    assert "[red]no[/red]" in project.run("status", "digits").out


def test_an_exporter_survives_a_registry_of_nonsense(store: Store) -> None:
    store.create(run_key("20260101T000000Z.digits.000000"), b"{")
    store.create("history/totals.json", b"[]")
    store.create("models/digits/versions/1/manifest.json", b"{}")
    view = Looker(store).look()
    assert not any(view.values[live.RUNS].values()) and not view.totals.builds and view.values[live.MODELS] == {(): 1}
