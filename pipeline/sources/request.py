"""The request of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.core.state import State
from enginesmith.core.types import Dim, Scalar, TensorSpec

# The greatest size of a model, with its external data, that is written as one file. Graphs that are derived from it
# (fp32 from fp16) must fit in one file, too.
MOST_EMBEDDED_BYTES = 1 << 30


@dataclass(frozen=True)
class ExportRequest:
    """A source and the form of its ONNX model. root: the spec's folder.  file, weights: relative to it.

    function: the entry point of a torch source.  module: its dotted name; empty where `file` is named.
    arguments: of that function; of an ONNX source, values of inputs that become constants.
    outputs: names in order; None keeps the model's own.
    opset: of the ONNX model of a torch or pt2 source.
    most_embedded_bytes: the greatest size of a model that is written as one file; the large weights of a larger model
    stay in separate files.
    libraries: (file, CUDA's major version or 0) of each shared library with operators of an ONNX source.
    states: inputs that take an output of the previous call.
    """

    kind: Literal["torch", "pt2", "onnx"]
    root: Path
    file: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...] = ()
    outputs: tuple[str, ...] | None = None
    function: str = ""
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    weights: str | None = None
    opset: int = 20
    module: str = ""
    most_embedded_bytes: int = MOST_EMBEDDED_BYTES
    states: tuple[State, ...] = ()
    libraries: tuple[tuple[str, int], ...] = ()
