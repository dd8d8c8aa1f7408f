"""Canaries without a person: what is missing is a reason, and a verdict does what it may and no more."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.canary.automatic import Wanted, canary, settle
from pipeline.registry import channels
from pipeline.registry.manifest import Manifest
from pipeline.registry.store import Store, open_store
from tests.pipeline.canary.test_verdicts import judged
from tests.pipeline.projects import Project
from tests.pipeline.registry.registries import engine, publish_engines


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "registry", create=True)


@pytest.fixture
def pair(store: Store) -> tuple[Manifest, Manifest]:
    """Two versions with an engine each; stable serves the first."""
    one, two = (
        publish_engines(store, [engine(store, data=content.encode())], content, channel=None).manifest
        for content in ("one", "two")
    )
    channels.promote(store, one, "stable")
    return one, two


def serving(store: Store) -> str:
    channel = channels.read(store, "digits", "stable")
    assert channel is not None
    return channel.version


def settled(store: Store, folder: Path, candidate: Manifest, baseline: Manifest, **fault: object) -> str:
    judged(folder, candidate, baseline, **fault)
    report = store.put_bytes((folder / "report.json").read_bytes())
    return settle(store, "digits", "stable", report, lambda _: None)


def test_a_pass_promotes_its_candidate_once(store: Store, pair: tuple[Manifest, Manifest], tmp_path: Path) -> None:
    one, two = pair
    assert settled(store, tmp_path / "c", two, one) == "promoted: digits:stable -> 2"
    assert serving(store) == "2"
    moves = channels.read(store, "digits", "stable")
    assert moves is not None and moves.history[-1].canary and "canary PASS" in moves.history[-1].why
    assert settled(store, tmp_path / "again", two, one) == "promoted: digits:stable -> 2"
    assert len(moves.history) == 2, "the same event twice moves nothing"


def test_a_fail_rolls_back_what_is_served_and_nothing_else(
    store: Store, pair: tuple[Manifest, Manifest], tmp_path: Path
) -> None:
    one, two = pair
    assert "no channel was moved" in settled(store, tmp_path / "early", two, one, slower=0.05)
    channels.promote(store, two, "stable")
    assert settled(store, tmp_path / "late", two, one, slower=0.05) == "rolled back: digits:stable -> 1"
    assert serving(store) == "1"


def test_a_pass_against_what_is_no_longer_served_moves_nothing(
    store: Store, pair: tuple[Manifest, Manifest], tmp_path: Path
) -> None:
    one, two = pair
    three = publish_engines(store, [engine(store, data=b"three")], "three", channel=None).manifest
    channels.promote(store, three, "stable")
    assert "was not moved: " in settled(store, tmp_path / "c", two, one)
    assert serving(store) == "3"


def test_too_few_requests_move_nothing(store: Store, pair: tuple[Manifest, Manifest], tmp_path: Path) -> None:
    one, two = pair
    assert settled(store, tmp_path / "c", two, one, count=50).startswith("INSUFFICIENT")
    assert serving(store) == "1"


def reason(store: Store, **wanted: object) -> str:
    found = canary(store, Wanted("digits", "2", **wanted), lambda _: None)  # type: ignore[arg-type]
    assert found.verdict is None and found.report is None
    return found.reason


def test_what_is_missing_is_a_reason(store: Store, pair: tuple[Manifest, Manifest], tmp_path: Path) -> None:
    assert "serves nothing yet" in reason(store, channel="canary")
    assert "--traffic" in reason(store)
    channels.promote(store, pair[1], "stable")
    assert "serves 2 already" in reason(store)
    channels.promote(store, pair[0], "stable")
    assert "it cannot run here" in reason(store, traffic=str(tmp_path), target="sm_89")
    assert "has no traffic of digits" in reason(store, traffic=str(tmp_path), target="cpu")


def test_recorded_traffic_gives_a_verdict_whose_report_the_registry_keeps(built: Project, tmp_path: Path) -> None:
    store = open_store(built.registry)
    assert built.run("promote", "tiny@1", "tiny:stable", "--proven-only").code == 0
    built.change_spec(precisions=["fp32"], targets=["cpu"], calibration=None)
    assert built.build().json["version"] == "2"
    x = np.random.default_rng(5).normal(size=(60, 1, 8)).astype(np.float32)
    np.savez(tmp_path / "tiny.npz", at=np.arange(60) / 2000, x=x)
    found = canary(store, Wanted("tiny", "2", traffic=str(tmp_path), target="cpu"), lambda _: None)
    assert found.verdict in ("INSUFFICIENT", "FAIL") and found.report and store.has(found.report)
    assert found.document and found.document["candidate"]["version"] == "2"
    assert "no channel was moved" in settle(store, "tiny", "stable", found.report, lambda _: None)
