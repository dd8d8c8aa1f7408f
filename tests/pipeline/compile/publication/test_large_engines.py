"""An int8 engine that is larger than the fp16 engine beside it says so in the outcome, the manifest and the report."""

from typing import Any

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


@pytest.mark.parametrize(
    ("half", "narrow", "said"),
    [
        ((5_000_000,), (17_200_000,), "larger than the fp16 engine (16.4 MiB against 4.8 MiB)"),
        ((5_000_000,), (4_000_000,), None),
        ((5_000_000, "cpu"), (9_000_000, "cpu"), None),
        ((5_000,), (4_000,), None),
        ((5_000,), (4_000, "sm_89", 9_004_000), "larger than the fp16 engine"),
    ],
    ids=["larger", "smaller", "a CPU has no such order", "small", "shards count"],
)
def test_only_an_engine_that_is_larger_says_so(half: Any, narrow: Any, said: str | None) -> None:
    first, second = (item.entry for item in note_larger([engine("fp16", *half), engine("int8", *narrow)]))
    assert first.notes == ("built",) and second.size_bytes == narrow[0]
    assert second.notes[0] == "built" and len(second.notes) == (2 if said else 1)
    assert not said or said in second.notes[1]
