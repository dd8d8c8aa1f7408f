"""The same function in each opset, with the operators whose signatures have changed on the way."""

import numpy as np

from tests.conformance.torture.graph import BATCH, add, noise

OPSETS = range(13, 24)
_WEIGHTS = {"w": noise(1, 4, 4), "axes": np.array([1])}


def _text(opset: int) -> str:
    mean = "m = ReduceMean(s, axes)" if opset >= 18 else "m = ReduceMean <axes = [1]> (s)"
    return f"""g (float[n, 4] x) => (float[n, 4] y) {{
        a = MatMul(x, w) s = Softmax <axis = 1> (a) {mean} q = Squeeze(m, axes) u = Unsqueeze(q, axes)
        h = HardSwish(a) c = Sub(h, u) t = ReduceSum <keepdims = 1> (c, axes) y = Div(c, t)
    }}"""


for _opset in OPSETS:
    _text_of = _text(_opset) if _opset >= 14 else _text(_opset).replace("HardSwish", "Relu")
    add(f"opset_{_opset}", _text_of, _WEIGHTS, opset=_opset, core=True)
add(
    "layer_norm_of_opset_17",
    "g (float[n, 4] x) => (float[n, 4] y) { y = LayerNormalization <axis = -1> (x, g1, b1) }",
    {"g1": noise(1, 4), "b1": noise(2, 4)},
    opset=17,
)
add("gelu_of_opset_20", 'g (float[n, 4] x) => (float[n, 4] y) { y = Gelu <approximate = "tanh"> (x) }', words="Gelu")
add(
    "rms_norm_of_opset_23",
    "g (float[n, 4] x) => (float[n, 4] y) { y = RMSNormalization(x, k) }",
    {"k": noise(1, 4)},
    opset=23,
    words="RMSNormalization|opset",
)
add("a_function_of_the_model", lambda: _with_function(), dims=BATCH, words=r"function|Twice")


def _with_function():
    import onnx

    return onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
        g (float[n, 4] x) => (float[n, 4] y) { a = local.Twice(x) y = Relu(a) }
        <domain: "local", opset_import: ["" : 20]>
        Twice (a) => (b) { b = Add(a, a) }"""
    )
