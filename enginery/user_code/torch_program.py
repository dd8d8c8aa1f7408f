"""A PyTorch source in the process of the user's code: captured once, then run and translated when asked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from enginery.core.errors import ModelError
from enginery.core.types import Dim, Scalar, TensorSpec
from enginery.user_code.channel import Arrays, Channel
from enginery.user_code.entry_point import importing_from
from enginery.user_code.torch_source import Program, from_entry_point, from_pt2, to_onnx


@dataclass(frozen=True)
class Captured:
    """What is known of a captured program. outputs: their names, in order.  notes: for people."""

    outputs: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class WriteOnnx:
    """Write the program as ONNX, not yet canonical, to `path`."""

    path: Path


@dataclass(frozen=True)
class Evaluate:
    """Run the original on the arrays that come with this."""


@dataclass(frozen=True)
class Asked:
    """One question about a captured program."""

    what: WriteOnnx | Evaluate


@dataclass(frozen=True)
class Answered:
    """What was asked is done; what was computed comes with this."""


@dataclass(frozen=True)
class TorchProgram:
    """Capture a PyTorch source and answer questions about it. The fields are those of `ExportRequest`.

    The first answer is `Captured`; then each `Asked` gets one `Answered`.
    """

    kind: Literal["torch", "pt2"]
    root: Path
    file: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    function: str
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    weights: str | None = None
    opset: int = 20

    def serve(self, channel: Channel) -> None:
        """Answer until the other end is closed. Raises EOFError then, ModelError where nothing can be captured."""
        with self.captured() as program:
            channel.send(Captured(program.outputs, program.notes))
            while True:
                asked, arrays = channel.receive(Asked)
                channel.answer(partial(self._answer, program, asked, arrays))

    @contextmanager
    def captured(self) -> Iterator[Program]:
        """The captured program, whose code may import its local modules meanwhile. Raises ModelError."""
        if self.kind == "pt2":
            yield from_pt2(self.root / self.file, self.inputs)
            return
        with importing_from(self.root, self.file):
            entry = (self.file, self.function, self.arguments)
            yield from_entry_point(self.root, entry, self.weights, self.inputs, self.dims)

    def _answer(self, program: Program, asked: Asked, arrays: Arrays) -> tuple[Answered, Arrays]:
        if isinstance(asked.what, Evaluate):
            return Answered(), program.run(arrays)
        write_onnx(program, self.opset, asked.what.path)
        return Answered(), {}


def write_onnx(program: Program, opset: int, path: Path) -> None:
    """Write a captured program as ONNX. Raises ModelError naming an operator without ONNX form, and above 2 GB."""
    from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

    model = to_onnx(program, opset)
    try:
        path.write_bytes(model.SerializeToString(deterministic=True))
    except (ValueError, EncodeError) as error:
        raise ModelError(f"{path.name}: the model is over 2 GB, which one ONNX file cannot hold") from error
