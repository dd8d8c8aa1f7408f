"""Samples that a user's generator makes, given to another process one at a time.

A PyTorch source in the process of the user's code: captured once, then run and translated when asked.

What a process of a user's code is started for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from enginery.arrays import Array
from enginery.core.errors import DataError, ModelError
from enginery.core.types import Dim, Scalar, TensorSpec
from enginery.user_code.channel import Arrays, Channel
from enginery.user_code.entry_point import call_entry_point, importing_from
from enginery.user_code.torch_source import Program, from_entry_point, from_pt2, to_onnx


@dataclass(frozen=True)
class NextSample:
    """Give the next sample of a pass over all of them; of a pass that has not begun, the first."""

    pass_number: int


@dataclass(frozen=True)
class Sample:
    """The arrays that come with this are one sample, unless it is the end of the pass."""

    is_end: bool = False


@dataclass(frozen=True)
class SampleGenerator:
    """Call the function of an entry point for each pass, and give what it makes. name: how messages call it.

    The first answer is an end; then each `NextSample` gets one `Sample`.
    """

    root: Path
    file: str
    function: str
    name: str

    def serve(self, channel: Channel) -> None:
        """Answer until the other end is closed. Raises EOFError then, and ModelError for code that cannot be read."""
        passes: dict[int, Iterator[tuple[Sample, Arrays]]] = {}
        with importing_from(self.root, self.file):
            channel.send(Sample(is_end=True))
            while True:
                asked, _ = channel.receive(NextSample)
                if asked.pass_number not in passes:
                    passes[asked.pass_number] = self._pass()
                channel.answer(partial(next, passes[asked.pass_number], (Sample(is_end=True), {})))

    def _pass(self) -> Iterator[tuple[Sample, Arrays]]:
        made = sample_items(lambda: call_entry_point(self.root, self.file, self.function, {}), self.name)
        for index, item in enumerate(made):
            given = {str(name): value for name, value in item.items() if value is not None}
            where = f"{self.name}: sample {index}"
            yield Sample(), {name: _array(value, f"{where}: {name!r}") for name, value in given.items()}


def _array(value: object, where: str) -> Array:
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is a {type(value).__name__}, of which numpy makes no array: {error}") from error


def sample_items(make: Callable[[], Iterable[Any]], name: str) -> Iterator[Mapping[str, Any]]:
    """What a user's function gives, one after the other. name: how messages call it.

    Raises DataError for whatever its code raises, and for what is no mapping of names to arrays.
    """
    done = 0
    try:
        for item in make():
            if not isinstance(item, Mapping):
                raise DataError(
                    f"{name}: sample {done} is a {type(item).__name__}; yield a dict with one array per input"
                )
            yield item
            done += 1
    except DataError:
        raise
    except Exception as error:  # whatever the user's code raises
        behind = f" behind sample {done - 1}" if done else ""
        raise DataError(f"{name} failed{behind}: {type(error).__name__}: {error}") from error


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


@dataclass(frozen=True)
class Task:
    """The first message to such a process."""

    what: TorchProgram | SampleGenerator

    def serve(self, channel: Channel) -> None:
        """Answer until the other end is closed; an error before the first answer is the first answer."""
        try:
            self.what.serve(channel)
        except EOFError:
            return
        except Exception as error:
            channel.send_error(error)
