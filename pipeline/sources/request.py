"""The request of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.core.state import State
from enginesmith.core.types import Dim, Scalar, TensorSpec

# Of a model with its external data, which is taken into one file; graphs that are made of it (fp32 for fp16) must fit
# there too.
MOST_EMBEDDED_BYTES = 1 << 30


@dataclass(frozen=True)
class ExportRequest:
    """A source and the form that its ONNX model gets. root: the spec's folder.  file, weights: relative to it.

    function: the entry point of a torch source.  module: its dotted name; empty where `file` is named.
    arguments: of that function; of an ONNX source, values of inputs that become constants.
    outputs: names in order; None keeps the model's own.
    opset: of the ONNX model of a torch or pt2 source.
    most_embedded_bytes: of external data that is taken into one file; the large weights of a model with more stay in
    files of their own.
    libraries: of shared libraries with operators of an ONNX source the file, and CUDA's major version or 0.
    states: inputs that are carried from an output.
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
