"""What an export is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginery.core.types import Dim, Scalar, TensorSpec


@dataclass(frozen=True)
class ExportRequest:
    """What to export. root: the spec's folder.  file, weights: relative to it.  function, arguments: of a torch source.

    outputs: names in order; None takes the model's own.  opset: of the ONNX model made from a torch or pt2 source.
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
