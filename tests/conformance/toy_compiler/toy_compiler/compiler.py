"""From an ONNX file to an engine: one npz file with the steps as JSON, and the weights."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from enginesmith.core.errors import ModelError
from toy_compiler.backend import DTYPES
from toy_compiler.operators import OPERATORS, run_step

OLDEST_OPSET = 13


def compile_model(model: Path, path: Path, *, fold: bool) -> None:
    """Write the engine. Raises ModelError, naming node and operator, for what is not known."""
    loaded_model = onnx.load(model)
    opset = max(item.version for item in loaded_model.opset_import if item.domain in ("", "ai.onnx"))
    if opset < OLDEST_OPSET:
        raise ModelError(f"{model.name} is of opset {opset}, and toy begins with {OLDEST_OPSET}; export it with that")
    weights = {item.name: numpy_helper.to_array(item) for item in loaded_model.graph.initializer}
    steps = [_step(node, weights) for node in loaded_model.graph.node]
    if fold:
        steps = [step for step in steps if not _fold(step, weights)]
    for name, array in weights.items():
        if array.dtype.name not in DTYPES:
            raise ModelError(f"weight {name!r} is {array.dtype.name}, which toy does not take; cast it to float32")
    program = np.frombuffer(json.dumps({"steps": steps, "names": list(weights)}).encode(), np.uint8)
    with path.open("wb") as stream:
        np.savez(stream, program=program, **{f"w{index}": array for index, array in enumerate(weights.values())})


def _step(node: onnx.NodeProto, weights: dict[str, Any]) -> dict[str, Any]:
    place = f"{node.op_type} (node {node.name!r})"
    operator = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if operator is None:
        raise ModelError(f"toy does not know the operator {place}; use another backend, or leave it out")
    if len([name for name in node.output if name]) > 1:
        raise ModelError(f"toy computes one output of {place}; use another backend")
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    taken_parameters = {} if isinstance(operator, np.ufunc) else inspect.signature(operator).parameters
    defaults = {"group": 1, "dilations": [1, 1], "auto_pad": b"NOTSET", "allowzero": 0, "saturate": 1, "block_size": 0}
    for name in [name for name in attributes if name not in taken_parameters]:
        if attributes.pop(name) != defaults.get(name):
            raise ModelError(f"toy does not know {name} of {place}; use another backend, or leave it out")
    inputs = list(node.input)
    if node.op_type == "Constant":
        if "value" not in attributes:
            raise ModelError(f"toy knows tensors alone as the value of {place}; use another backend")
        weights[node.output[0]] = numpy_helper.to_array(attributes.pop("value"))
        return {"op": "Identity", "inputs": [node.output[0]], "given": {}, "output": node.output[0], "where": place}
    if "to" in attributes:
        attributes["to"] = onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]).name
        if attributes["to"] not in DTYPES:
            raise ModelError(f"toy has no {attributes['to']}, which {place} gives; use another backend")
    return {"op": node.op_type, "inputs": inputs, "given": attributes, "output": node.output[0], "where": place}


def _fold(step: dict[str, Any], weights: dict[str, Any]) -> bool:
    """Compute a step that only weights go into; whether that was done."""
    if not all(name in weights for name in step["inputs"] if name):
        return False
    weights[step["output"]] = run_step(step, weights)
    return True
