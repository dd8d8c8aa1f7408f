"""An int8 engine that is larger than the fp16 engine beside it says so in the outcome, the manifest and the report."""

from dataclasses import replace

import pytest

from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.proof import Approved, Report, approve
from enginesmith.core.types import Precision
from enginesmith.registry.manifest import EngineEntry, Manifest
from pipeline.compile.publication.publish import say_which_are_large

PLAIN = Manifest("m", "", "2026-01-01T00:00:00Z", "c" * 64)


def engine(
    precision: Precision, size_bytes: int, target: str = "sm_89", digest: str = "a"
) -> tuple[EngineEntry, Approved]:
    found = parse_targets(target)[0]
    entry = EngineEntry(
        found.name, precision, "tensorrt-rtx", "unproven", "no such GPU", found.compute_capability,
        size_bytes=size_bytes, digest=digest * 64, notes=("built",),
    )  # fmt: skip
    facts = (digest * 64, "b" * 64, (), "unproven", "no such GPU", "2026-01-01T00:00:00Z", {}, {})
    report = Report(entry.unit, found.name, precision, entry.backend, *facts)
    proof = approve(report)
    assert proof is not None
    return entry, proof


@pytest.mark.parametrize(("int8", "said"), [(17_200_000, True), (4_000_000, False)])
def test_only_an_engine_that_is_larger_says_so(int8: int, said: bool) -> None:
    found = say_which_are_large([engine("fp16", 5_000_000), engine("int8", int8)], PLAIN)
    assert found[0][0].notes == ("built",)
    assert found[1][0].notes[0] == "built" and len(found[1][0].notes) == 1 + said
    assert not said or "larger than the fp16 engine (16.4 MiB against 4.8 MiB)" in found[1][0].notes[1]


def test_a_cpu_has_no_such_order() -> None:
    found = say_which_are_large([engine("fp16", 5_000_000, "cpu"), engine("int8", 9_000_000, "cpu")], PLAIN)
    assert all(entry.notes == ("built",) for entry, _ in found)


def test_shards_count() -> None:
    sharded = replace(PLAIN, shards={"d" * 64: {"e" * 64: 9_000_000}})
    engines = [engine("fp16", 5_000), engine("int8", 4_000, digest="d")]
    assert say_which_are_large(engines, PLAIN)[1][0].notes == ("built",)
    entry, _ = say_which_are_large(engines, sharded)[1]
    assert len(entry.notes) == 2 and entry.size_bytes == 4_000
