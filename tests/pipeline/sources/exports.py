"""Small torch sources, and exporting them."""

from functools import cache
from pathlib import Path

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from enginesmith.core.errors import ModelError
from enginesmith.core.types import Dim, TensorSpec
from pipeline.sources.export import export
from pipeline.sources.request import ExportRequest
from tests.enginesmith.user_code.here import serve_here

X = TensorSpec("x", "float32", ("batch", 3))
BATCH = Dim("batch", 1, 4, 8)
LINEAR = """
import torch
class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x)
def build(width=4):
    return Net(torch.nn.Linear(3, width), torch.nn.ReLU())
"""
MODULE = """
import torch
class Net(torch.nn.Module):
    def forward(self, x{more}):
        {body}
def build():
    return Net()
"""


def net(body: str, more: str = "") -> str:
    return MODULE.format(body=body, more=more)


def torch_request(root: Path, code: str, **more) -> ExportRequest:
    (root / "model.py").write_text(code)
    fields = {"inputs": (X,), "dims": (BATCH,), "function": "build", **more}
    return ExportRequest("torch", root, "model.py", **fields)


def run(request: ExportRequest, samples=None, labels=None, **more):
    workdir = request.root / "work"
    workdir.mkdir(exist_ok=True)
    return export(request, samples, labels, workdir, **more)


def fails(request: ExportRequest, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        run(request)


def failed(exported) -> list[str]:
    return [check.name for check in exported.checks if not check.passed]


# What torch's exporter translates by. Reading it takes half of the CPU time of each export of a small module.
TORCHLIB = cache(ONNXRegistry.from_torchlib)


@pytest.fixture(autouse=True)
def user_code_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of torch sources runs in this process, in each file that imports this."""
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(TORCHLIB))
    for module in ("pipeline.sources.export", "pipeline.drafts.torch_model"):
        monkeypatch.setattr(f"{module}.start_user_process", serve_here)
