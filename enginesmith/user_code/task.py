"""The tasks of a process with a user's code: yield the samples of a generator, answer questions about a PyTorch model.

A task is the first message to such a process; its answers and their arrays use the same `MessageChannel`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, Scalar, TensorSpec
from enginesmith.user_code.channel import Arrays, ArraysOnly, CallFunction, MessageChannel
from enginesmith.user_code.describing import describe_module, describe_program
from enginesmith.user_code.entry_point import call_entry_point, importing_from
from enginesmith.user_code.torch_source import (
    SEED,
    Program,
    build_module,
    capture,
    from_pt2,
    load_pt2,
    run_once,
    write_onnx,
)


@dataclass(frozen=True)
class NextSample:
    """Request the next sample of a pass over all samples. A new number begins a new pass."""

    pass_number: int


@dataclass(frozen=True)
class Sample:
    """The arrays after this message are one sample, unless it is the end of the pass."""

    is_end: bool = False


@dataclass(frozen=True)
class SampleGenerator:
    """Call the function of an entry point for each pass, and send the samples. name: for messages.

    The first answer is `Sample(is_end=True)`; then each `NextSample` gets one `Sample`.

    root: the folder of the spec.  file, function: its file, relative to `root`, and its name.
    """

    root: Path
    file: str
    function: str
    name: str

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. Then raises EOFError; ModelError for code that cannot be imported."""
        passes: dict[int, Iterator[tuple[Sample, Arrays]]] = {}
        with importing_from(self.root, self.file):
            channel.send(Sample(is_end=True))
            while True:
                request, _ = channel.receive(NextSample)
                if request.pass_number not in passes:
                    passes[request.pass_number] = self._pass()
                channel.answer(partial(next, passes[request.pass_number], (Sample(is_end=True), {})))

    def _pass(self) -> Iterator[tuple[Sample, Arrays]]:
        sample_stream = sample_items(lambda: call_entry_point(self.root, self.file, self.function, {}), self.name)
        for index, sample in enumerate(sample_stream):
            named_values = {str(name): value for name, value in sample.items() if value is not None}
            yield Sample(), {name: self._array(value, index, name) for name, value in named_values.items()}

    def _array(self, value: object, index: int, name: str) -> Array:
        try:
            return np.asarray(value)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.name}: sample {index}: numpy cannot convert {name!r}, a {type(value).__name__}: {error}"
            ) from error


def sample_items(make: Callable[[], Iterable[Any]], name: str) -> Iterator[Mapping[str, Any]]:
    """The samples that a user's function yields. name: for messages.

    Raises DataError for any exception of its code, and for a sample that is no mapping.
    """
    sample_count = 0
    try:
        for sample in make():
            if not isinstance(sample, Mapping):
                raise DataError(
                    f"{name}: sample {sample_count} is a {type(sample).__name__}; yield a dict with one array per input"
                )
            yield sample
            sample_count += 1
    except DataError:
        raise
    except Exception as error:
        position_text = f" after sample {sample_count - 1}" if sample_count else ""
        raise DataError(f"{name} failed{position_text}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Captured:
    """A program was captured. outputs: names of its outputs, in order.  notes: for people."""

    outputs: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A request about a captured program. onnx: a file to write it to, as ONNX that is not yet canonical; None: run the
    original on the arrays after this message."""

    onnx: Path | None = None


@dataclass(frozen=True)
class TorchProgram:
    """Capture a PyTorch source and answer questions about it. The fields are those of `ExportRequest`.

    The first answer is `Captured`; then each `Asked` gets one `ArraysOnly`, with the outputs where it ran the original.
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
    module: str = ""
    most_embedded_bytes: int = 1 << 30

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. Raises EOFError then, ModelError if nothing can be captured."""
        with ExitStack() as exit_stack:
            if self.kind == "pt2":
                program = from_pt2(self.root / self.file, self.inputs)
            else:  # the model may import its local modules in calls, too
                exit_stack.enter_context(importing_from(self.root, self.file, self.module))
                program = self._capture_module()
            channel.send(Captured(program.outputs, program.notes))
            while True:
                request, arrays = channel.receive(Asked)
                channel.answer(partial(self._answer, program, request, arrays))

    def _capture_module(self) -> Program:
        """The captured module of the entry point. Raises ModelError with the user's file and line."""
        entry_point = (self.file, self.function, self.arguments, self.module)
        model = build_module(self.root, entry_point, self.weights)
        exported_program = capture(model, self.inputs, self.dims, self.root)
        input_names = tuple(spec.name for spec in self.inputs)
        notes = () if self.weights else (f"no weights file: the module's own initial weights, torch seed {SEED}",)
        return Program(exported_program, input_names, lambda tensors: model(**tensors), notes)

    def _answer(self, program: Program, asked: Asked, arrays: Arrays) -> tuple[ArraysOnly, Arrays]:
        if asked.onnx is None:
            return ArraysOnly(), program.run(arrays)
        write_onnx(program, self.opset, asked.onnx, self.most_embedded_bytes)
        return ArraysOnly(), {}


@dataclass(frozen=True)
class RanOnce:
    """The model ran. outputs: their names, in order."""

    outputs: tuple[str, ...]


@dataclass(frozen=True)
class LookAtModel:
    """Inspect a PyTorch source with unknown shapes, and try it. The fields are those of `TorchProgram`.

    The first answer is `SeenModel`; then each `ArraysOnly` gets one `RanOnce`.  requests: as in `describe_module`.
    """

    kind: Literal["torch", "pt2"]
    root: Path
    file: str
    function: str = ""
    module: str = ""
    requests: tuple[str, ...] = ()

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. Raises EOFError then, ModelError if there is nothing to inspect."""
        with ExitStack() as exit_stack:
            if self.kind == "pt2":
                exported_program = load_pt2(self.root / self.file)
                input_names = tuple(str(name) for name in exported_program.graph_signature.user_inputs)
                program = Program(exported_program, input_names, lambda _: None)
                channel.send(describe_program(exported_program, program.outputs))
                return
            exit_stack.enter_context(importing_from(self.root, self.file, self.module))
            model = build_module(self.root, (self.file, self.function, {}, self.module), None)
            channel.send(describe_module(model, self.root, (self.file, self.module), self.requests))
            while True:
                _, arrays = channel.receive(ArraysOnly)
                channel.answer(lambda: (RanOnce(run_once(model, arrays)), {}))  # noqa: B023 - called at once


@dataclass(frozen=True)
class Task:
    """The first message to a process of a user's code."""

    what: TorchProgram | SampleGenerator | LookAtModel | CallFunction

    def serve(self, channel: MessageChannel) -> None:
        """Answer until the other end is closed. An error before the first answer is sent as the first answer."""
        try:
            self.what.serve(channel)
        except EOFError:
            return
        except Exception as error:
            channel.send_error(error)
