"""An int8 engine that is larger than the fp16 engine beside it says so in the outcome, the manifest and the report."""

import pytest

from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import Precision
from enginesmith.registry.manifest import EngineEntry
from pipeline.compile.publication.publish import note_larger
from pipeline.outcome import UnitResult


def engine(precision: Precision, size_bytes: int, target: str = "sm_89", whole: int | None = None) -> UnitResult:
    found = parse_targets(target)[0]
    entry = EngineEntry(
        found.name, precision, "tensorrt-rtx", "unproven", "no such GPU", found.compute_capability,
        size_bytes=size_bytes, digest="a" * 64, notes=("built",),
    )  # fmt: skip
    return UnitResult(entry, whole or size_bytes)


@pytest.mark.parametrize(("int8", "said"), [(17_200_000, True), (4_000_000, False)])
def test_only_an_engine_that_is_larger_says_so(int8: int, said: bool) -> None:
    half, narrow = note_larger([engine("fp16", 5_000_000), engine("int8", int8)])
    assert half.entry.notes == ("built",)
    assert narrow.entry.notes[0] == "built" and len(narrow.entry.notes) == 1 + said
    assert not said or "larger than the fp16 engine (16.4 MiB against 4.8 MiB)" in narrow.entry.notes[1]


def test_a_cpu_has_no_such_order() -> None:
    found = note_larger([engine("fp16", 5_000_000, "cpu"), engine("int8", 9_000_000, "cpu")])
    assert all(item.entry.notes == ("built",) for item in found)


def test_shards_count() -> None:
    assert note_larger([engine("fp16", 5_000), engine("int8", 4_000)])[1].entry.notes == ("built",)
    found = note_larger([engine("fp16", 5_000), engine("int8", 4_000, whole=9_004_000)])[1]
    assert len(found.entry.notes) == 2 and found.entry.size_bytes == 4_000
