"""The kit on this machine's GPU, at its small size: `pytest -m gpu`. Never run (docs/reference/gpu-check.md)."""

from pathlib import Path

import pytest

from enginesmith.core.hardware.cuda import gpus
from validation.gpu.kit import KitOptions, run_kit
from validation.gpu.page import page

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no NVIDIA GPU on this machine")]


@pytest.mark.timeout(1800)
def test_every_test_for_this_gpu_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_kit(KitOptions("cuda", ("mlp", "block"), peers=("eager",), seconds=0.2, size="small"), print)
    bad_items = [item for item in result.tries if item.kind in ("engine", "peer") and item.outcome != "passed"]
    assert not bad_items
    assert result.peaks and result.peaks.bytes_per_s > 1e10
    assert page([result])
