"""What the entries of units say beside their results: engines that are larger, and the data that would show more."""

from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Precision
from enginesmith.registry.manifest import EngineEntry
from pipeline.compile.publication.publish import RANDOM_INPUTS, SELECTING, UNMEASURED, _hint, note_larger
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
        ((4_000, "sm_89", 9_004_000), (5_000_000,), None),
    ],
    ids=["larger", "smaller", "a CPU has no such order", "small", "shards count", "of fp16 too"],
)
def test_only_an_engine_that_is_larger_says_so(half: Any, narrow: Any, said: str | None) -> None:
    first, second = (item.entry for item in note_larger([engine("fp16", *half), engine("int8", *narrow)]))
    assert first.notes == ("built",) and second.size_bytes == narrow[0]
    assert second.notes[0] == "built" and len(second.notes) == (2 if said else 1)
    assert not said or said in second.notes[1]


SHAPE = Check("quantization", "shape", "y", "golden", 0.0, 1.0, False)
OVERFLOW = Check("engine", "nonfinite", "y", "golden", 3.0, 0.0, False)
DRIFT = Check("quantization", "sqnr_db", "y", "golden", 3.0, 15.0, False)


@pytest.mark.parametrize(("checks", "given", "told"), [
    ((SHAPE,), True, [SELECTING]),
    ((DRIFT,), True, []),
    ((OVERFLOW,), True, [UNMEASURED]),
    ((DRIFT,), False, [RANDOM_INPUTS]),
    ((), False, []),
])  # fmt: skip
def test_a_failed_check_is_told_with_the_data_that_would_mend_it(checks, given, told):
    spec: Any = SimpleNamespace(calibration=None, golden=None)
    exported: Any = SimpleNamespace(golden_inputs=object() if given else None)
    unit = SimpleNamespace(request=SimpleNamespace(precision="fp16"))
    failed: Any = SimpleNamespace(
        entry=SimpleNamespace(status="failed"), report=SimpleNamespace(checks=checks), built=SimpleNamespace(unit=unit)
    )
    assert list(_hint(spec, exported, failed)) == told
