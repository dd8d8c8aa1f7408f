import logging
from dataclasses import replace
from typing import Any

import pytest

from builders.execution.local import LocalExecutor
from builders.execution.ray import RayExecutor
from enginesmith.core.errors import InputError, UnknownNameError, canonical_json
from enginesmith.core.reports.proof import unmeasured
from enginesmith.core.types import Target
from enginesmith.registry.builds import build_history
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.publish import add_attestation
from pipeline.compile.composition import InProcess
from pipeline.compile.run_context import RunContext
from pipeline.operations import validate as proving
from pipeline.operations.validate import Pending, Validated, list_pending, pending_of, validate, why_nothing
from pipeline.operations.validate import validate_pending as prove
from pipeline.orchestration.flows import validate_pending as flows
from pipeline.progress import Progress
from tests.enginesmith.registries import engine, publish_engines, report
from tests.waiting import run_threads, until


def units(store: Store) -> dict[str, list[str]]:
    return {item.manifest.reference: [entry.unit for entry in item.engines] for item in list_pending(store)}


def test_only_unproven_engines_that_run_here_wait(store: Store) -> None:
    entries = [
        engine(store, "cpu", status="unproven"),
        engine(store, "cpu", "fp16"),
        engine(store, "sm_89", status="unproven"),
    ]
    publish_engines(store, entries)
    assert units(store) == {"digits@1": ["cpu fp32 onnxruntime"]}


def test_an_unprovable_engine_does_not_wait(store: Store) -> None:
    entry = engine(store, "cpu", status="unproven")
    unknown = replace(report(entry), checks=(unmeasured("export", "y", "golden", "the same in all 8 golden samples"),))
    entry = replace(entry, report=store.put_bytes(canonical_json(unknown.to_json())))
    manifest = publish_engines(store, [entry]).manifest
    assert units(store) == {}
    assert "not measured: y" in why_nothing(store, pending_of(store, "digits", "1"))
    assert add_attestation(store, manifest, unknown) is None


def test_the_newest_and_served_versions_are_checked(store: Store) -> None:
    for content in ("one", "two", "three"):
        publish_engines(
            store,
            [engine(store, status="unproven", data=content.encode())],
            content,
            channel="beta" if content == "one" else None,
        )
    assert list(units(store)) == ["digits@3"], "no channel takes what is unproven, and older versions wait no more"


def three_versions(store: Store) -> None:
    """Of which the first is neither the newest nor served."""
    for content in ("one", "two", "three"):
        entries = [
            engine(store, status="unproven", data=content.encode()),
            engine(store, "l4", status="unproven"),
            engine(store, "sm_90"),
        ]
        publish_engines(store, entries, content)


def test_a_requested_version_is_checked(store: Store) -> None:
    three_versions(store)
    assert list(units(store)) == ["digits@3"]
    result = pending_of(store, "digits", "1")
    assert [entry.unit for entry in result.engines] == [
        "cpu fp32 onnxruntime"
    ] and result.manifest.reference == "digits@1"
    assert not pending_of(store, "digits", "1", "sm_89").engines
    with pytest.raises(UnknownNameError):
        pending_of(store, "digits", "9")


def test_the_error_explains_why_an_engine_cannot_be_proven_here(store: Store) -> None:
    three_versions(store)
    pending_version = pending_of(store, "digits", "1")
    for target in ("sm_89", "l4"):
        expected = "digits@1: no sm_89 GPU on this machine"
        assert why_nothing(store, pending_version, target) == expected, "an l4 is of that generation"
    assert why_nothing(store, pending_version, "sm_90") == "digits@1 has no unproven engine for sm_90; it has 1 proven"
    assert why_nothing(store, pending_version, "sm_75") == "digits@1 has no unproven engine for sm_75; it has none"


def test_of_several_runs_one_proves_one_engine_at_a_time(store, monkeypatch):
    publish_engines(store, [engine(store, status="unproven"), engine(store, precision="fp16", status="unproven")])
    manifest = load(store, "digits", "1")
    monkeypatch.setattr(proving, "spec_of", lambda _: None)
    monkeypatch.setattr(build_history, "_POLL_S", 0.01)
    take, take_lock = build_history._take, list[str]()
    monkeypatch.setattr(build_history, "_take", lambda *words: take_lock.append(words[1]) or take(*words))
    actual_units: list[str] = []
    at_once_numbers: list[int] = []

    def attested(version: proving.PublishedModel, entry: EngineEntry, context: RunContext) -> Validated:
        actual_units.append(entry.unit)
        at_once_numbers.append(1)
        until(lambda: len(take_lock) >= 3, "all ask while one proves")
        assert len(at_once_numbers) == 1, "two on one machine would time each other"
        at_once_numbers.clear()
        attest(context.store, version.manifest, report(entry, "proven"))
        return Validated.of(version.manifest, entry, "proven", "fine")

    monkeypatch.setattr(proving.PublishedModel, "_prove", attested)
    executor = LocalExecutor()
    actual: list[list[Validated]] = []

    def run() -> None:
        actual.append(list(validate(manifest, RunContext(store, executor, executor), again=False)))

    run_threads([run] * 3)
    assert sorted(actual_units) == ["cpu fp16 onnxruntime", "cpu fp32 onnxruntime"], "each once"
    assert len(actual) == 3 and {item.verdict for items in actual for item in items} == {"proven"}
    list(validate(manifest, RunContext(store, executor, executor)))
    assert len(actual_units) == 4, "a person who says validate means it"


def fake_flow(monkeypatch: pytest.MonkeyPatch, flows: Any, **fakes: Any) -> None:
    """The flow without Prefect, tables and a log, and with these in the place of what proves."""
    usual_fields = {"PrefectRunner": InProcess, "FlowProgress": lambda _: Progress(), "show_table": lambda *_: None}
    usual_fields |= {"get_run_logger": lambda: logging.getLogger("x"), "show_document": lambda *_: None}
    for name, fake_field in {**usual_fields, **fakes}.items():
        if hasattr(flows, name):
            monkeypatch.setattr(flows, name, fake_field)


def test_the_flow_proves_the_events_version_or_gives_the_reason(store, monkeypatch):
    three_versions(store)
    references: list[str] = []

    def noted(item: Pending, _context: RunContext) -> list[Validated]:
        references.append(item.manifest.reference)
        return [Validated(item.manifest.reference, entry.unit, "proven", "") for entry in item.engines]

    fake_flow(monkeypatch, flows, prove=noted)
    run = flows.validate_pending.fn
    assert run(store.uri, "digits", "1", "cpu").message == "1 engine pending here, 1 proven"
    assert references == ["digits@1"]
    result = run(store.uri, "digits", "1", "sm_89")
    assert (result.name, result.message) == ("Skipped", "digits@1: no sm_89 GPU on this machine")
    run(store.uri)
    run(store.uri, "digits")
    assert references == ["digits@1", "digits@3", "digits@3"], "without a version: the newest, and what is served"


def test_a_gpu_worker_is_requested_only_for_a_waiting_engine(store, monkeypatch):
    three_versions(store)
    requests: list[str] = []

    def noted(item: Pending, on: Target, context: RunContext) -> list[Validated]:
        assert isinstance(context.executor, RayExecutor) and isinstance(context.local, LocalExecutor)
        requests.append(f"{item.manifest.reference} {[entry.unit for entry in item.engines]} on {on.name}")
        return [Validated(item.manifest.reference, entry.unit, "proven", "") for entry in item.engines]

    fake_flow(monkeypatch, flows, validate_on_worker=noted)

    def run(*words: str, on: str) -> Any:
        return flows.validate_pending.fn(store.uri, *words, on=on, executor="ray", ray_address="ray://nowhere:1")

    assert run("digits", "1", "sm_89", on="l4").message == "1 engine pending for l4, 1 proven"
    assert run(on="l4").message == "1 engine pending for l4, 1 proven"
    assert requests == [f"digits@{version} ['l4 fp32 tensorrt-rtx'] on l4" for version in "13"]
    other_fields = {
        "sm_90": "digits@1: an unproven engine is for l4, but these workers have sm_90",
        "sm_89": "digits@1: an unproven engine is for l4, but these workers have sm_89",
    }
    for on_name, output in other_fields.items():
        result = run("digits", "1", "l4", on=on_name)
        assert (result.name, result.message) == ("Skipped", output)
        assert run(on=on_name).message == f"0 engines pending for {on_name}, 0 proven"
    assert len(requests) == 2
    for wrong_name in ("auto", "cpu"):
        with pytest.raises(InputError, match=f"'{wrong_name}' names no GPU of Ray's workers"):
            run(on=wrong_name)


def test_an_error_about_a_version_is_shown_in_its_row(store: Store) -> None:
    publish_engines(store, [engine(store, status="unproven")])
    [item] = list_pending(store)
    executor = LocalExecutor()
    [result] = prove(item, RunContext(store, executor, executor))
    assert result.verdict == "error" and not result.good and result.reference == "digits@1"
