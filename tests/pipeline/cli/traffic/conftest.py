"""A small model over texts, its spec, and recorded traffic to it."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from enginesmith.recording.recorder import Recorder

EPOCH = 1_772_409_600.0
SPEC = """\
# What words cost.
model: words
source: {onnx: words.onnx}
inputs: {x: {dtype: float32, shape: [batch, length]}}
dims:
  batch: {min: 1, opt: 2, max: 2}
  length: {min: 1, opt: 32, max: 64}   # words of a text
targets: [cpu]
"""


def record(path: Path, lengths, at=None, **head) -> Path:
    with Recorder(path, **head) as recorder:
        for index, length in enumerate(lengths):
            when = EPOCH + 0.01 * index if at is None else at[index]
            recorder.append({"x": np.ones((1, length), np.float32)}, when)
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The path of the spec."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        words (float[batch, length] x) => (float[batch] y) {
            axis = Constant <value = int64[1] {1}> ()
            e = Exp(x)
            y = ReduceSum <keepdims = 0> (e, axis)
        }
        """
    )
    onnx.save(model, tmp_path / "words.onnx")
    path = tmp_path / "words.yaml"
    path.write_text(SPEC)
    return path
