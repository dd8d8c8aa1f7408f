from pathlib import Path

import numpy as np
import onnx
import pytest

from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.user_code.task import Captured, Task, TorchProgram
from pipeline.quantization.statistics.observe import open_source
from pipeline.sources.export import export
from pipeline.sources.request import ExportRequest
from pipeline.sources.user_process import start_user_process
from validation.golden.golden_set import GoldenSet

X = TensorSpec("x", "float32", ("batch", 3))
BATCH = Dim("batch", 1, 2, 4)
# `run` and `errors` are names of Enginesmith's own modules too; `builders` has no __init__.py.
FILES = {
    "pipeline/__init__.py": "KIND = 'own'",
    "pipeline/run.py": "OFFSET = 1.0",
    "pipeline/layers.py": """
from __future__ import annotations
import dataclasses, torch
from pipeline.run import OFFSET

@dataclasses.dataclass
class Config:
    width: int = 3
    offset: Offset | None = None

@dataclasses.dataclass
class Offset:
    value: float = OFFSET

class Net(torch.nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def forward(self, x):
        from validation.scales import SCALE  # not loaded before
        return x * SCALE + self.config.offset.value
""",
    "builders/errors.py": "class BuildError(Exception): pass",
    "validation/__init__.py": "",
    "validation/scales.py": "SCALE = 2.0",
    "model.py": """
import copy, importlib, inspect, pickle, threading, typing
import pipeline, pipeline.run
from pipeline.layers import Config, Net, Offset

def build(broken=False):
    assert pipeline.KIND == "own" and not hasattr(importlib.import_module("builders.errors"), "ModelError")
    assert typing.get_type_hints(Config)["offset"] == typing.Optional[Offset]
    config = pickle.loads(pickle.dumps(Config(offset=Offset())))
    assert type(config) is Config and inspect.getmodule(Net).__file__ == pipeline.__path__[0] + "/layers.py"
    return copy.deepcopy(Net(config if not broken else None))

def samples():
    yield {"x": __import__("numpy").zeros((1, 3), "float32")}
    found = []
    thread = threading.Thread(target=lambda: found.append(importlib.import_module("validation.scales").SCALE))
    thread.start(), thread.join()
    yield {"x": __import__("numpy").full((1, 3), found[0], "float32")}
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


@pytest.mark.slow
def test_an_export_runs_code_with_packages_of_these_names(folder: Path, tmp_path: Path) -> None:
    request = ExportRequest("torch", folder, "model.py", (X,), (BATCH,), function="build")
    export_outcome = export(request, None, None, tmp_path)
    assert all(check.passed for check in export_outcome.checks)
    assert {node.op_type for node in onnx.load(export_outcome.onnx).graph.node} == {"Add", "Mul"}
    case = GoldenSet.load(export_outcome.golden).cases[0]
    assert np.allclose(case.expected["output"], case.inputs["x"] * 2 + 1)


@pytest.mark.slow
def test_errors_in_a_package_are_reported_with_file_and_line(folder: Path, tmp_path: Path) -> None:
    more_fields = {"function": "build", "arguments": {"broken": True}}
    request = ExportRequest("torch", folder, "model.py", (X,), (BATCH,), **more_fields)
    with pytest.raises(ModelError, match=r"pipeline/layers\.py:22: the model cannot be captured"):
        export(request, None, None, tmp_path)


@pytest.mark.slow
def test_calibration_samples_come_from_code_with_packages_of_these_names(folder: Path) -> None:
    """Also from a thread of its own, while Enginesmith's code runs."""
    with open_source(folder, "model.py:samples", "0" * 64, (X,), (BATCH,)) as source:
        for _ in range(2):
            assert [run["x"][0, 0] for _, run in source.runs()] == [0.0, 2.0]


LISTED = """
import sys
def listed():
    raise ValueError(sorted(name for name in sys.modules if name.startswith(("builders", "pipeline", "validation"))))
"""


@pytest.mark.slow
def test_a_user_codes_process_imports_only_enginesmith(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LISTED)
    task = Task(TorchProgram("torch", tmp_path, "model.py", (X,), (BATCH,), "listed"))
    with pytest.raises(ModelError, match=r"ValueError: \[\]$"), start_user_process(task) as process:
        process.ask(task, Captured)
    opened_source = open_source(tmp_path, "model.py:listed", "0" * 64, (X,), (BATCH,))
    with opened_source as source, pytest.raises(DataError, match=r"ValueError: \[\]$"):
        list(source.runs())
