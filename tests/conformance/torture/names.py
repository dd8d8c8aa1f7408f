"""Names that no identifier may have, and names that become one another when they are made into identifiers."""

from onnx import ModelProto

from tests.conformance.torture.graph import BATCH, add, model, noise

# What x, y, w, the node and the graph are called.
_ODD: dict[str, tuple[str, str, str]] = {
    "slashes_and_colons": ("/model/layer.0/x:0", "/model/out/y:0", "/model/w::weight"),
    "unicode": ("ввод", "出力🙂", "gewicht_ä"),
    "combining_characters": ("e\u0301", "\u00e9", "\u200bw"),
    "spaces": ("my input", " y ", "a  weight"),
    "quotes": ('it\'s "x"', "`y`", "w\\n'"),
    "line_breaks": ("x\nx", "y\ty", "w\r\nw"),
    "shell": ("$(x); rm -rf .", "--help", "%s{}%(y)s"),
    "paths": ("../../x", "/etc/y", "..\\w"),
    "keywords": ("class", "return", "int"),
    "digits": ("0", "1e5", "-1"),
    "python_attributes": ("self", "__class__", "run"),
    "very_long": ("x" * 400, "y" * 400, "w" * 400),
    "html": ("<b>x</b>", "&amp;", "w<script>"),
}


def _renamed(model: ModelProto, names: dict[str, str]) -> ModelProto:
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.name = names.get("node", node.op_type)
        for end_input in (node.input, node.output):
            end_input[:] = [names.get(name, name) for name in end_input]
    return model


def _odd(x: str, y: str, w: str) -> ModelProto:
    onnx_model = model("g (float[n, 4] x) => (float[n, 3] y) { a = MatMul(x, w) y = Relu(a) }", {"w": noise(1, 4, 3)})
    return _renamed(onnx_model, {"x": x, "y": y, "w": w, "node": f"{x}→{y}", "a": f"{y}{x}"})


def _alike(*names: str) -> ModelProto:
    """Three inputs and three outputs whose names fall together once what is odd in them is replaced."""
    onnx_model = model(
        "g (float[n, 4] a, float[n, 4] b, float[n, 4] c) => (float[n, 4] d, float[n, 4] e, float[n, 4] f) "
        "{ d = Sub(a, b) e = Sub(b, c) two = Add(c, c) f = Sub(two, a) }"
    )
    return _renamed(onnx_model, dict(zip("abcdef", names, strict=True)))


for _kind, _names in _ODD.items():
    add(f"names_of_{_kind}", lambda names=_names: _odd(*names), dims=BATCH, core=True)
add(
    "names_alike_but_for_odd_characters",
    lambda: _alike("a.b", "a_b", "a/b", "o.1", "o_1", "o/1"),
    dims=BATCH,
    core=True,
)
add("names_alike_but_for_case", lambda: _alike("X", "x", "Xx", "Y", "y", "yY"), dims=BATCH, core=True)
add(
    "names_of_inner_values_of_compilers",
    lambda: _alike("arg0", "arg1", "input_0", "output_0", "output", "main"),
    dims=BATCH,
    core=True,
)
