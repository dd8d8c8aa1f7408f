"""Stands in for Triton's backend `onnxruntime`, whose library is in no package: the same files, opened by ONNX Runtime
in Python. Triton loads it as a Python-based backend of that name; all else is Triton itself."""

import json
import os
import sys
from pathlib import Path

# The interpreter in Triton's process does not read it.
sys.path += os.environ["PYTHONPATH"].split(os.pathsep)
import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        file = config["default_model_filename"] or "model.onnx"
        path = Path(args["model_repository"]) / args["model_version"] / file
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = [item["name"] for item in config["input"]]
        self.outputs = [item["name"] for item in config["output"]]

    def execute(self, requests: list) -> list:
        answers = []
        for request in requests:
            # As DLPack: what the backend was compiled with misreads the types of numpy 2, and so sizes and strides.
            inputs = {name: np.from_dlpack(triton.get_input_tensor_by_name(request, name)) for name in self.inputs}
            arrays = self.session.run(self.outputs, inputs)
            tensors = [triton.Tensor.from_dlpack(*pair) for pair in zip(self.outputs, arrays, strict=True)]
            answers.append(triton.InferenceResponse(tensors))
        return answers
