from dataclasses import replace
from typing import Any

import pytest

from enginesmith.core.reports.proof import Report
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.publish import find_same
from tests.enginesmith.registries import draft, engine, flip, publish_engines, refusal, report

SPEC: dict[str, Any] = {"source": {"torch": "a.py"}, "golden": {"data": "a.npz", "metric": None}, "validation": {}}


def published(store: Store, entries: list[EngineEntry]) -> Manifest:
    """Version 1, of engines and a refusal."""
    publish_engines(store, entries, "a", others=[refusal()])
    return lookup.load(store, "digits", "1")


def again(store: Store, entries: list[EngineEntry], **parts: Any) -> Manifest:
    """What another content gave."""
    return replace(draft(store, "b"), engines=(*entries, refusal()), **parts)


def proofs(entries: list[EngineEntry]) -> list[Report]:
    """Made later, on another machine of the kind."""
    return [report(entry, host="another", created_at="2027-01-01T00:00:00+00:00") for entry in entries]


@pytest.fixture
def entries(store: Store) -> list[EngineEntry]:
    return [engine(store), engine(store, "sm_89", status="unproven")]


@pytest.mark.parametrize("store", ["file", "s3"], indirect=True)
def test_equal_engines_and_proofs_repeat_the_existing_version(store: Store, entries: list[EngineEntry]) -> None:
    first_manifest = published(store, entries)
    assert find_same(store, again(store, entries), proofs(entries)) == first_manifest
    assert find_same(store, again(store, entries), proofs(entries), "1") == first_manifest


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_another_engine_status_or_proof_is_another_version(store: Store, entries: list[EngineEntry]) -> None:
    published(store, entries)
    cpu, gpu = entries
    other = engine(store, data=b"other bytes")
    for engines in ([other, gpu], [replace(cpu, status="unproven"), gpu], [replace(cpu, notes=("slow",)), gpu], [cpu]):
        assert find_same(store, again(store, engines), proofs(engines)) is None
    first_proof, second_proof = proofs(entries)
    check = replace(first_proof.checks[0], limit=50.0)
    for report_of_cpu in (replace(first_proof, checks=(check,)), replace(first_proof, golden="1" * 64)):
        assert find_same(store, again(store, entries), [report_of_cpu, second_proof]) is None


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_later_proofs_count_and_toolchains_do_not(store, entries, monkeypatch):
    monkeypatch.setattr("tests.enginesmith.registries.draft", lambda *_: replace(draft(store), spec=SPEC))
    first_manifest = published(store, entries)
    moved_spec = SPEC | {"source": {"torch": "b.py"}, "golden": {"data": "b.npz", "metric": None}}
    timed_spec = SPEC | {"validation": {"latency": {"seconds": 1.0}}}
    for spec in (moved_spec, timed_spec):
        assert find_same(store, again(store, entries, spec=spec), proofs(entries)) == first_manifest
    limited_spec = SPEC | {"validation": {"limits": {"fp16": {"engine": {"max_abs": 1.0}}}}}
    metric = SPEC | {"golden": {"data": "a.npz", "metric": {"name": "accuracy", "floor": 0.9}}}
    for spec in (limited_spec, metric, SPEC | {"dims": {"batch": {"max": 4}}}):
        assert find_same(store, again(store, entries, spec=spec), proofs(entries)) is None


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_only_the_newest_undamaged_version_counts(store: Store, entries: list[EngineEntry]) -> None:
    first_manifest = published(store, entries)
    assert find_same(store, again(store, entries), proofs(entries), "2.0") is None, "a new name was asked for"
    flip(store, str(first_manifest.engines[0].report))
    assert find_same(store, again(store, entries), proofs(entries)) is None
    store.remove(blob_key(str(first_manifest.engines[0].report)))
    assert find_same(store, again(store, entries), proofs(entries)) is None
    engine(store)
    assert find_same(store, again(store, entries), proofs(entries)) == first_manifest
    publish_engines(store, [engine(store, data=b"newer")], "c")
    assert find_same(store, again(store, entries), proofs(entries)) is None
