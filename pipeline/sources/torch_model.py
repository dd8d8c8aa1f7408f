"""A PyTorch source as a job sees it: the captured program lives in a process of its own (`user_process`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from enginery.core.types import Tensors
from enginery.user_code.task import Task
from enginery.user_code.torch_program import Answered, Asked, Captured, Evaluate, TorchProgram, WriteOnnx
from pipeline.sources.request import ExportRequest
from pipeline.sources.user_process import UserProcess, start_user_process


class TorchModel:
    """A captured program. outputs: their own names, in order.  notes: for people."""

    def __init__(self, process: UserProcess, captured: Captured, workdir: Path) -> None:
        self._process, self._workdir = process, workdir
        self.outputs, self.notes = captured.outputs, captured.notes

    def run(self, inputs: Tensors) -> Tensors:
        """The original's outputs, by their own names, in order. Raises ModelError when it fails on these inputs."""
        _, outputs = self._process.ask(Asked(Evaluate()), Answered, inputs)
        return outputs

    def to_onnx(self) -> onnx.ModelProto:
        """The program as ONNX, not yet canonical. Raises ModelError naming the operator that has no ONNX form."""
        path = self._workdir / "captured.onnx"
        self._process.ask(Asked(WriteOnnx(path)), Answered)
        model = onnx.load(path)
        path.unlink()
        return model


@contextmanager
def open_torch_model(request: ExportRequest, workdir: Path) -> Iterator[TorchModel]:
    """Capture a source of kind 'torch' or 'pt2'; the program can be asked inside this context.

    Raises ModelError naming the user's file and line, and StepError when the user's code ends its process.
    """
    fields = {name: value for name, value in vars(request).items() if name != "outputs"}
    task = Task(TorchProgram(**fields))
    with start_user_process(task) as process:
        captured, _ = process.ask(task, Captured)
        yield TorchModel(process, captured, workdir)
