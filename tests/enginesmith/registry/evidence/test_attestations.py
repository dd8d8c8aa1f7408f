from dataclasses import replace

import pytest

from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.core.reports.proof import Report
from enginesmith.core.types import CPU_KIND
from enginesmith.registry.evidence.attestations import attest, judge_entries
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import attestation_key
from enginesmith.registry.versions import channels
from tests.enginesmith.registries import FAILED, engine, on_each_store, publish_engines, report


@on_each_store
def test_a_report_from_the_hardware_proves_an_engine_without_changing_the_manifest(store: Store) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry, engine(store)]).manifest
    assert [item.status for item in judge_entries(store, manifest)] == ["unproven", "proven"]
    digest = attest(store, manifest, report(entry, "proven"))
    assert attest(store, manifest, report(entry, "proven")) == digest
    entries = judge_entries(store, manifest)
    assert [entry.status for entry in entries] == ["proven", "proven"] and digest[:12] in entries[0].reason
    assert manifest.engines[0].status == "unproven"


def test_a_failing_machine_outweighs_passing_ones_until_it_passes(store: Store) -> None:
    entry = engine(store)
    manifest = publish_engines(store, [entry]).manifest

    def status(verdict: str, host: str, day: int) -> str:
        attest(store, manifest, report(entry, verdict, host, f"2026-01-{day:02}T00:00:00+00:00"))
        return judge_entries(store, manifest)[0].status

    assert status("proven", "one", 1) == "proven"
    assert status("failed", "two", 2) == "failed"
    assert status("proven", "one", 3) == "failed"
    assert status("proven", "two", 4) == "proven"


@pytest.mark.parametrize("target", ["sm_89", "cpu"])
def test_an_attestation_does_not_make_an_engine_usable_that_the_build_refused(store: Store, target: str) -> None:
    entry = replace(engine(store, target), toolchain={CPU_KIND: "x86-64-v3"} if target == "cpu" else {})
    manifest = publish_engines(store, [entry]).manifest
    attest(store, manifest, on_kind(report(entry, "proven"), "x86-64-v3"))
    refused_manifest = replace(manifest, engines=(replace(entry, status="failed"),))
    assert judge_entries(store, refused_manifest)[0].status == "failed"


def test_a_report_without_a_verdict_cannot_be_attached(store: Store) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry]).manifest
    with pytest.raises(InputError, match="says 'unproven'"):
        attest(store, manifest, report(entry))
    with pytest.raises(InputError, match="says 'proven'"):
        attest(store, manifest, replace(report(entry, "proven"), checks=(FAILED,)))
    with pytest.raises(InputError, match="does not have"):
        attest(store, manifest, report(engine(store, data=b"other")))
    assert judge_entries(store, manifest)[0].status == "unproven"


def test_an_edited_attestation_is_refused(store: Store) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry]).manifest
    digest = attest(store, manifest, report(entry, "failed"))
    key = attestation_key("digits", "1", str(entry.digest), digest)
    data = store.read(key) or b""
    assert store.replace(key, data.replace(b'"failed"', b'"proven"'), data)
    with pytest.raises(IntegrityError, match="edited by hand"):
        judge_entries(store, manifest)


def test_a_version_that_failed_on_its_hardware_is_no_easier_to_promote_than_an_unproven_one(store: Store) -> None:
    entry = engine(store, "sm_89", status="unproven")
    manifest = publish_engines(store, [entry, engine(store)]).manifest
    attest(store, manifest, report(entry, "failed"))
    with pytest.raises(InputError, match=r"has failed where it was validated: sm_89 fp32 tensorrt-rtx"):
        channels.promote(store, manifest, "stable")
    assert channels.promote(store, manifest, "stable", proven_only=True).version == "1"


def on_kind(report: Report, kind: str) -> Report:
    return replace(report, host={"name": kind, CPU_KIND: kind})


def test_a_cpu_engine_has_a_status_on_each_kind_of_cpu(store: Store) -> None:
    built_engine = replace(engine(store, "cpu", "int8"), toolchain={CPU_KIND: "x86-64-v4-vnni"})
    manifest = publish_engines(store, [built_engine]).manifest

    def status(kind: str | None) -> tuple[str, str]:
        entry = judge_entries(store, manifest)[0].on_cpu(kind)
        return entry.status, entry.reason

    assert status(None)[0] == status("x86-64-v4-vnni")[0] == "proven"
    assert status("x86-64-v3") == ("unproven", "never run on x86-64-v3, this kind of CPU (proven on x86-64-v4-vnni)")
    attest(store, manifest, on_kind(report(built_engine, "failed"), "x86-64-v3"))
    assert status("x86-64-v3")[0] == "failed" and status(None)[0] == status("x86-64-v4-vnni")[0] == "proven"
    attest(store, manifest, replace(on_kind(report(built_engine), "x86-64-v3"), created_at="2026-01-02T00:00:00+00:00"))
    assert status("x86-64-v3")[0] == "proven"
    assert status("arm64") == (
        "unproven",
        "never run on arm64, this kind of CPU (proven on x86-64-v3, proven on x86-64-v4-vnni)",
    )
    attest(store, manifest, on_kind(report(built_engine, "failed"), "x86-64-v4-vnni"))
    assert status(None)[0] == status("arm64")[0] == "failed" and status("x86-64-v3")[0] == "proven"


def test_a_cpu_engine_that_ran_says_why_it_is_unproven(store: Store) -> None:
    built_engine = replace(
        engine(store, "cpu", status="unproven"), toolchain={CPU_KIND: "x86-64-v3"}, reason="not measured: y: constant"
    )
    entry = judge_entries(store, publish_engines(store, [built_engine]).manifest)[0]
    assert entry.on_cpu("x86-64-v3").reason == "not measured: y: constant"
    assert entry.on_cpu("arm64").reason == "never run on arm64, this kind of CPU"
