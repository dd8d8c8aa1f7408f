"""Writes a model with the operator example::Cube and data, and compiles the operator's library: `python prepare.py`."""

import subprocess
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

HERE = Path(__file__).parent
TEXT = """<ir_version: 10, opset_import: ["": 20, "example": 1]> cube (float[batch, 4] x) => (float[batch, 4] y) {
    c = example.Cube(x)
    y = MatMul(c, w)
}"""


def main() -> None:
    """Write model, data and library beside this file; needs g++."""
    rng = np.random.default_rng(0)
    np.savez(HERE / "golden.npz", x=rng.standard_normal((16, 4)).astype(np.float32))
    model = parser.parse_model(TEXT)
    weight = rng.standard_normal((4, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, HERE / "cube.onnx")
    library = HERE / "linux-x86_64" / "libcube.so"
    library.parent.mkdir(exist_ok=True)
    subprocess.run(["g++", "-shared", "-fPIC", "-O2", str(HERE / "cube.cpp"), "-o", str(library)], check=True)


if __name__ == "__main__":
    main()
