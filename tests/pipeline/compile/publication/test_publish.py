from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.core.reports.proof import Check
from pipeline.compile.publication.publish import RANDOM_INPUTS, SELECTING, UNMEASURED, _hint

SHAPE = Check("quantization", "shape", "y", "golden", 0.0, 1.0, False)
OVERFLOW = Check("engine", "nonfinite", "y", "golden", 3.0, 0.0, False)
DRIFT = Check("quantization", "sqnr_db", "y", "golden", 3.0, 15.0, False)


@pytest.mark.parametrize(("checks", "has_golden", "expected"), [
    ((SHAPE,), True, [SELECTING]),
    ((DRIFT,), True, []),
    ((OVERFLOW,), True, [UNMEASURED]),
    ((DRIFT,), False, [RANDOM_INPUTS]),
    ((), False, []),
])  # fmt: skip
def test_a_failed_check_recommends_suitable_data(checks, has_golden, expected):
    spec: Any = SimpleNamespace(calibration=None, golden=None)
    exported_stub: Any = SimpleNamespace(golden_inputs=object() if has_golden else None)
    unit = SimpleNamespace(request=SimpleNamespace(precision="fp16"))
    failed_stub: Any = SimpleNamespace(
        entry=SimpleNamespace(status="failed"), report=SimpleNamespace(checks=checks), built=SimpleNamespace(unit=unit)
    )
    assert list(_hint(spec, exported_stub, failed_stub)) == expected
