"""Writes a tiny ONNX model, data and a spec into the folder that is given; the weights differ each time."""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SPEC = """
model: enginesmith-helm-test
source: {onnx: model.onnx}
inputs: {x: {dtype: float32, shape: [batch, 8]}}
outputs: [y]
dims: {batch: {min: 1, opt: 4, max: 8}}
precisions: [fp32]
targets: [cpu]
golden: {data: golden.npz}
validation: {latency: "off"}
"""


def main(folder: Path) -> None:
    """Write the three files."""
    random = np.random.default_rng()
    folder.mkdir(parents=True)
    weight = numpy_helper.from_array(random.standard_normal((8, 4), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    graph = helper.make_graph(nodes, "tiny", [x], [y], [weight])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "model.onnx"
    )
    np.savez(folder / "golden.npz", x=random.standard_normal((16, 8), np.float32))
    (folder / "spec.yaml").write_text(SPEC)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
