"""What TVM's ONNX importer reads past: it compiles the node and computes something else. ONNX's node tests found it."""

from typing import TYPE_CHECKING

from builders.onnx_graphs.bodies import walk_nodes
from builders.onnx_graphs.plain_names import Names
from enginery.core.errors import ModelError

if TYPE_CHECKING:
    import onnx


def check_heeded(proto: "onnx.ModelProto", names: Names) -> None:
    """Raise ModelError naming the first node with an attribute or input that TVM would ignore, and the remedy."""
    for node in walk_nodes(proto.graph):
        if reason := _find_ignored(node):
            raise ModelError(f"TVM cannot compile the model: {names.restore(node.name)}: {reason}")


def _find_ignored(node: "onnx.NodeProto") -> str | None:
    from onnx import helper

    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "BatchNormalization" and given.get("training_mode", 0):
        return "TVM ignores training_mode; export the model in evaluation mode"
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        return "TVM ignores training_mode; export the model in evaluation mode"
    if node.op_type == "IsInf" and 0 in (given.get("detect_positive", 1), given.get("detect_negative", 1)):
        return "TVM finds both infinities; compare with the one that is meant, or use another backend"
    if node.op_type == "RoiAlign" and given.get("mode", b"avg") != b"avg":
        return "TVM averages, whatever the mode; use another backend"
    return None
