from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.core.errors import InputError, canonical_json
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions import channels
from enginesmith.registry.versions.channel_state import read_channel
from enginesmith.registry.versions.index import history
from enginesmith.registry.versions.policies import list_losses
from tests.enginesmith.registries import engine, publish_engines, report

UNITS = (("cpu", "fp32"), ("cpu", "int8"), ("sm_89", "fp16"))


def publish(store: Store, content: str, *units: tuple[str, str], **options: str) -> Manifest:
    entries = [engine(store, *unit, data=f"{content}{unit}".encode(), **options) for unit in units or UNITS]
    return publish_engines(store, entries, content, channel=None).manifest


def losses_now(store: Store, manifest: Manifest, proven_only: bool = False) -> tuple[str, ...]:
    return list_losses(store, read_channel(store, "digits", "stable"), manifest, proven_only)


def test_a_promotion_that_loses_engines_is_refused_until_accepted(store: Store) -> None:
    full_manifest, part = publish(store, "a"), publish(store, "b", ("cpu", "fp32"))
    channels.promote(store, full_manifest, "stable")
    with pytest.raises(InputError, match=r"digits@2 has nothing for cpu int8, sm_89 fp16; .*--accept-loss"):
        channels.promote(store, part, "stable")
    assert read_channel(store, "digits", "stable").version == "1"  # type: ignore[union-attr]
    with pytest.raises(InputError, match="nothing for sm_89 fp16;"):
        channels.promote(store, part, "stable", accepted_losses=["cpu int8"])
    assert channels.promote(store, part, "stable", accepted_losses=None).version == "2"
    assert [row.move.losses for row in history(store, parse_reference("digits:stable"))] == [
        (), ("cpu int8", "sm_89 fp16")
    ]  # fmt: skip
    channels.promote(store, full_manifest, "stable")
    channels.promote(store, part, "stable", accepted_losses=None)
    channels.promote(store, full_manifest, "stable")
    part_again = channels.rollback(store, "digits", "stable")
    assert part_again.version == "2", "a rollback is never refused"


def test_a_channel_of_proven_engines_loses_unproven_ones(store: Store) -> None:
    channels.promote(store, publish(store, "a"), "stable")
    unproven_engine = engine(store, "sm_89", "fp16", "unproven", data=b"new")
    other_engines = [engine(store, *unit, data=b"new" + unit[1].encode()) for unit in UNITS[:2]]
    new_manifest = publish_engines(store, [*other_engines, unproven_engine], "b", channel=None).manifest
    with pytest.raises(InputError, match="nothing for sm_89 fp16; build or validate"):
        channels.promote(store, new_manifest, "stable", proven_only=True)
    attest(store, new_manifest, report(unproven_engine, "proven"))
    assert channels.promote(store, new_manifest, "stable", proven_only=True).version == "2"


def on_kinds(store: Store, data: str, *kinds: str) -> Manifest:
    """A version with a CPU engine, built for the first of these kinds and proven on all of them."""
    entry = replace(engine(store, "cpu", "fp32", data=data.encode()), toolchain={"enginesmith-cpu": kinds[0]})
    manifest = publish_engines(store, [entry], data, channel=None).manifest
    for kind in kinds:
        result = report(entry, "proven", host=kind)
        attest(store, manifest, replace(result, host={**result.host, "enginesmith-cpu": kind}))
    return manifest


def test_a_channel_of_proven_engines_may_lose_a_kind_of_cpu(store: Store) -> None:
    channels.promote(store, on_kinds(store, "a", "x86-64-v4-vnni", "x86-64-v3"), "stable", proven_only=True)
    assert losses_now(store, on_kinds(store, "b", "x86-64-v4-vnni"), True) == ("cpu fp32 on x86-64-v3",)
    assert losses_now(store, on_kinds(store, "c", "x86-64-v4-vnni"), False) == ()
    assert losses_now(store, on_kinds(store, "d", "x86-64-v3", "x86-64-v4-vnni"), True) == ()


def test_a_generation_replaces_its_products_and_another_backend_the_same_target(store: Store) -> None:
    channels.promote(store, publish(store, "a", ("t4", "fp16")), "stable")
    assert losses_now(store, publish(store, "b", ("sm_75", "fp16"))) == ()
    assert losses_now(store, publish(store, "c", ("sm_89", "fp16"))) == ("t4 fp16",)
    another_engine = replace(engine(store, "t4", "fp16", data=b"d"), backend="tensorrt")
    another_engine = replace(another_engine, report=store.put_bytes(canonical_json(report(another_engine).to_json())))
    assert losses_now(store, publish_engines(store, [another_engine], "d", channel=None).manifest) == ()


def test_a_build_moves_only_candidate_to_the_specs_result(store: Store) -> None:
    entries = [engine(store, *unit) for unit in UNITS]
    for channel in ("candidate", "stable"):
        assert publish_engines(store, entries, "a", channel=channel).channel_refusal is None
    one_engine = engine(store, data=b"one")
    assert publish_engines(store, [one_engine], "b", channel="candidate").channel_refusal is None
    message = publish_engines(store, [one_engine], "b", channel="stable").channel_refusal
    assert message and "digits@2 has nothing for cpu int8, sm_89 fp16" in message
    assert read_channel(store, "digits", "stable").version == "1"  # type: ignore[union-attr]
    assert read_channel(store, "digits", "candidate").move.losses  # type: ignore[union-attr]


def test_a_mirror_accepts_accepted_losses_and_adds_none(store: Store, tmp_path: Path) -> None:
    dest = open_store(tmp_path / "dest", create=True)
    named_reference = parse_reference("digits:stable")
    full_manifest, part = publish(store, "a"), publish(store, "b", ("cpu", "fp32"))
    mirror(store, [parse_reference("digits@1")], dest)
    channels.promote(dest, full_manifest, "stable")
    channels.promote(store, part, "stable")  # the first version here: nobody lost anything
    with pytest.raises(InputError, match="nothing for cpu int8, sm_89 fp16"):
        mirror(store, [named_reference], dest, with_channels=True)
    channels.promote(store, full_manifest, "stable")
    mirror(store, [named_reference], dest, with_channels=True)
    channels.promote(store, part, "stable", accepted_losses=None)
    mirror(store, [named_reference], dest, with_channels=True)
    assert read_channel(dest, "digits", "stable").move.losses == ("cpu int8", "sm_89 fp16")  # type: ignore[union-attr]
