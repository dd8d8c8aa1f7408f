import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("variables", [{}, {"ORT_DISABLE_TELEMETRY": "1"}])
def test_opening_a_graph_writes_no_file_at_home(tmp_path: Path, variables: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    program = "import builders.reference, onnxruntime, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    result = subprocess.run(
        [sys.executable, "-c", program], env={**environment, "HOME": str(tmp_path), **variables}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert result.stdout.strip() == "1"
    assert not list(tmp_path.rglob("*"))
