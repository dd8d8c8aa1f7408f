"""A text encoder with random weights as an ONNX file, with its spec, to measure buckets on."""

from pathlib import Path

import numpy as np
import onnx

VOCABULARY = 257

_HEAD = """
<ir_version: 9, opset_import: ["" : 20]>
encoder (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, {width}] embedding) {{
  shape = Shape (input_ids)
  one = Constant <value = int64[1] {{1}}> ()
  zero = Constant <value = int64[1] {{0}}> ()
  two = Constant <value = int64[1] {{2}}> ()
  length = Slice (shape, one, two)
  words = Gather (tokens, input_ids)
  seen = Slice (positions, zero, length)
  h0 = Add (words, seen)
  mask = Cast <to = 1> (attention_mask)
  unit = Constant <value = float {{1.0}}> ()
  far = Constant <value = float {{-10000.0}}> ()
  hidden_keys = Sub (unit, mask)
  lowered = Mul (hidden_keys, far)
  places = Constant <value = int64[2] {{1, 2}}> ()
  bias = Unsqueeze (lowered, places)
  heads = Constant <value = int64[4] {{0, 0, {heads}, {per_head}}}> ()
  flat = Constant <value = int64[3] {{0, 0, {width}}}> ()
  scale = Constant <value = float {{{scale}}}> ()
"""
_LAYER = """
  n{i} = LayerNormalization <axis = -1> (h{i}, gain, shift)
  q{i} = MatMul (n{i}, wq{i})
  k{i} = MatMul (n{i}, wk{i})
  v{i} = MatMul (n{i}, wv{i})
  qr{i} = Reshape (q{i}, heads)
  kr{i} = Reshape (k{i}, heads)
  vr{i} = Reshape (v{i}, heads)
  qt{i} = Transpose <perm = [0, 2, 1, 3]> (qr{i})
  kt{i} = Transpose <perm = [0, 2, 3, 1]> (kr{i})
  vt{i} = Transpose <perm = [0, 2, 1, 3]> (vr{i})
  s{i} = MatMul (qt{i}, kt{i})
  ss{i} = Mul (s{i}, scale)
  sb{i} = Add (ss{i}, bias)
  p{i} = Softmax <axis = -1> (sb{i})
  a{i} = MatMul (p{i}, vt{i})
  at{i} = Transpose <perm = [0, 2, 1, 3]> (a{i})
  af{i} = Reshape (at{i}, flat)
  o{i} = MatMul (af{i}, wo{i})
  r{i} = Add (h{i}, o{i})
  m{i} = LayerNormalization <axis = -1> (r{i}, gain, shift)
  u{i} = MatMul (m{i}, w1{i})
  g{i} = Gelu (u{i})
  d{i} = MatMul (g{i}, w2{i})
  h{j} = Add (r{i}, d{i})
"""
_TAIL = """
  column = Constant <value = int64[1] {{2}}> ()
  weight = Unsqueeze (mask, column)
  kept = Mul (h{layers}, weight)
  sums = ReduceSum <keepdims = 0> (kept, one)
  count = ReduceSum <keepdims = 0> (weight, one)
  embedding = Div (sums, count)
}}
"""
_SPEC = """\
model: {model}
source: {{onnx: encoder.onnx}}
inputs:
  input_ids: {{dtype: int64, shape: [batch, sequence]}}
  attention_mask: {{dtype: int64, shape: [batch, sequence]}}
outputs: [embedding]
dims:
  batch: {{min: 1, opt: {batch}, max: {batch}}}
  sequence: {{min: 1, opt: {top}, max: {top}}}     # one profile
golden: {{data: golden.npz}}
targets: [cpu]
backends: {{onnxruntime: {{intra_op_threads: 1}}}}
"""


def write_encoder(
    folder: Path, *, width: int = 128, heads: int = 4, layers: int = 2, top: int = 256, batch: int = 8
) -> Path:
    """Write encoder.onnx, golden.npz and encoder.yaml into a folder; the path of the last. top: tokens at most."""
    rng = np.random.default_rng(0)
    shapes = {"tokens": (VOCABULARY, width), "positions": (top, width)}
    for index in range(layers):
        shapes |= {f"{name}{index}": (width, width) for name in ("wq", "wk", "wv", "wo")}
        shapes |= {f"w1{index}": (width, 4 * width), f"w2{index}": (4 * width, width)}
    weights = {name: rng.normal(0, 0.5 / shape[0] ** 0.5, shape) for name, shape in shapes.items()}
    weights |= {"gain": np.ones(width), "shift": np.zeros(width)}
    per_head = width // heads
    text = _HEAD.format(width=width, heads=heads, per_head=per_head, scale=1 / per_head**0.5)
    text += "".join(_LAYER.format(i=index, j=index + 1) for index in range(layers)) + _TAIL.format(layers=layers)
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    onnx.checker.check_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "encoder.onnx")
    ids = rng.integers(1, VOCABULARY, (8, 16), np.int64)
    np.savez(folder / "golden.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    (folder / "encoder.yaml").write_text(_SPEC.format(model="text", top=top, batch=batch))
    return folder / "encoder.yaml"
