"""ONNX models made hostile: fields of a valid one set to odd values, dropped, repeated or nested, or bytes damaged."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.hostile import damaged

TEXTS = (
    "", "x", "y", "w", "hidden", "N", " ", "/etc/passwd", "../../../../etc/passwd", "..", ".", "a/../../b", "a\x00b",
    "n" * 5000, "weights.bin", "model.onnx", "link.bin", "loop.bin", "folder", "If", "Constant", "Twice", "mine",
    "com.microsoft", "ai.onnx", "ai.onnx.ml", "location", "offset", "length", "checksum", "-1", "-9223372036854775808",
    "9" * 30, "1e3", "1_0", "\u0661", "\u202e", "%s{0}",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 16, 100, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e38, float("nan"), float("inf"))
DATA = (b"", b"\x00", b"\xff" * 7, bytes(64))


def valid_model() -> onnx.ModelProto:
    """What a reader meets: branches, a function, constants, external and typed data."""
    value = helper.make_tensor_value_info
    later_graph = helper.make_graph(
        [helper.make_node("Relu", ["product"], ["positive"])], "then", [], [value("positive", 1, None)]
    )
    other_graph = helper.make_graph(
        [helper.make_node("Neg", ["product"], ["negative"])], "other", [], [value("negative", 1, None)]
    )
    far_tensor = TensorProto(name="w", data_type=1, dims=[3, 4], data_location=TensorProto.EXTERNAL)
    for key, message in {"location": "weights.bin", "offset": "0", "length": "48"}.items():
        far_tensor.external_data.add(key=key, value=message)
    proto = TensorProto(name="shape", data_type=7, dims=[2], int64_data=[-1, 4])
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    doubled_function = helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 20)])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], "matmul"),
        helper.make_node("ReduceSum", ["product"], ["sum"], "reduce", keepdims=0),
        helper.make_node("Cast", ["sum"], ["positive_sum"], "cast", to=9),
        helper.make_node("If", ["positive_sum"], ["chosen"], "if", then_branch=later_graph, else_branch=other_graph),
        helper.make_node("Twice", ["chosen"], ["doubled"], "twice", domain="mine"),
        helper.make_node("Constant", [], ["c"], "constant", value=numpy_helper.from_array(np.ones(4, np.float32))),
        helper.make_node("Add", ["doubled", "c"], ["hidden"], "add"),
        helper.make_node("Reshape", ["hidden", "shape"], ["y"], "reshape"),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 3])], [value("y", 1, ["N", 4])], [far_tensor, proto])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[doubled_function])


WEIGHTS = np.arange(12, dtype=np.float32).tobytes()


def _messages(message: Any) -> Iterator[Any]:
    """A message and every one inside it."""
    yield message
    for field, result in message.ListFields():
        if field.message_type is not None:
            for inner in result if field.is_repeated else [result]:
                yield from _messages(inner)


def _scalar(draw: st.DrawFn, field: Any) -> Any:
    kind = field.cpp_type
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return draw(st.sampled_from(FLOATS))
    if kind == field.CPPTYPE_STRING:
        return draw(st.sampled_from(DATA if field.type == field.TYPE_BYTES else TEXTS))
    if kind == field.CPPTYPE_ENUM:
        return draw(st.sampled_from([item.number for item in field.enum_type.values]))
    bits = 31 if kind == field.CPPTYPE_INT32 else 63
    low = 0 if kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else -(2**bits)
    return draw(st.sampled_from([number for number in NUMBERS if low <= number < 2**bits]))


def _change(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    """One thing: a field set, dropped, repeated, or filled with another message of its kind from elsewhere."""
    message = draw(st.sampled_from(list(_messages(model))))
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    mutation = draw(st.sampled_from(["set", "set", "set", "drop", "repeat", "graft"]))
    if mutation == "drop":
        message.ClearField(field.name)
    elif field.message_type is None:
        if field.is_repeated:
            items = getattr(message, field.name)
            value = _scalar(draw, field)
            if len(items) and mutation == "set":
                items[draw(st.integers(0, len(items) - 1))] = value
            else:
                items.extend([value] * draw(st.sampled_from([1, 2, 50])))
        else:
            setattr(message, field.name, _scalar(draw, field))
    else:
        _fill(draw, model, message, field)


def _copy(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def _fill(draw: st.DrawFn, model: onnx.ModelProto, message: Any, field: Any) -> None:
    """Put an empty message there, or a copy of one of the same kind from anywhere in the model."""
    same_items = [item for item in _messages(model) if item.DESCRIPTOR.full_name == field.message_type.full_name]
    chosen = draw(st.sampled_from([None, *same_items]))
    target = getattr(message, field.name)
    if not field.is_repeated:
        target.SetInParent() if chosen is None else target.CopyFrom(_copy(chosen))
    elif chosen is None:
        target.add()
    else:
        offset = draw(st.integers(0, len(target)))
        after = [_copy(item) for item in target[offset:]]
        chosen = _copy(chosen)
        del target[offset:]
        target.extend([chosen, *after])


@st.composite
def models(draw: st.DrawFn) -> bytes:
    """Bytes like a model's, with one to four things wrong."""
    model = valid_model()
    for _ in range(draw(st.integers(1, 4))):
        _change(draw, model)
    data = model.SerializeToString()
    return draw(damaged(data)) if draw(st.integers(0, 9)) == 0 else data


def hostile_models() -> st.SearchStrategy[bytes]:
    """Changed in their fields, or in their bytes."""
    return st.one_of(models(), models(), damaged(valid_model().SerializeToString()))
