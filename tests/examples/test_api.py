import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/api.py"


@pytest.mark.slow
def test_a_torch_module_becomes_a_proven_engine_with_its_answers(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, SCRIPT, tmp_path / "net"], capture_output=True, text=True, check=True)
    output = re.fullmatch(r"net-1-cpu-int8\.onnx is proven; largest error ([\d.]+)\n", result.stdout)
    assert output and 0 < float(output[1]) < 0.1, result.stdout
