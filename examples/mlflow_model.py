"""Logs a version of a registry as a model of MLflow (tested with mlflow-skinny 3.17.2 and pandas):

    ENGINESMITH_REGISTRY=registry python examples/mlflow_model.py digits:stable

It has the engine that fits this CPU, with its description, signature and manifest's digest. `mlflow.pyfunc.load_model`
opens it with ONNX Runtime; `predict` takes and returns arrays by name. MLflow copies this file: nothing is pickled.
MLflow checks no signatures; the pull does, by the trust policy in ENGINESMITH_TRUST_POLICY.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow.models
import mlflow.pyfunc
import numpy as np
from mlflow.types import Schema, TensorSpec

import enginesmith


class EngineModel(mlflow.pyfunc.PythonModel):
    """A pulled engine that ONNX Runtime opens."""

    def load_context(self, context: Any) -> None:
        """Open the engine. context: with the folder of the pulled files as `engine`."""
        (description,) = Path(context.artifacts["engine"]).glob("*.json")
        self._run = enginesmith.open_onnx(description)

    def predict(self, model_input):  # MLflow would read types as a schema
        """Outputs for inputs, both by name."""
        return dict(self._run(model_input))


def log_version(reference: str, registry: str) -> Any:
    """Log the best engine of a version for this CPU; returns MLflow's `ModelInfo`. Raises as `enginesmith.pull`."""
    with tempfile.TemporaryDirectory() as folder:
        pulled_engine = enginesmith.pull(reference, registry=registry, dest=folder, target="cpu")
        facts = json.loads(pulled_engine.description.read_bytes())
        names = ("model", "version", "manifest", "digest", "target", "precision", "backend", "status")
        return mlflow.pyfunc.log_model(
            name=str(facts["model"]),
            python_model=__file__,
            artifacts={"engine": folder},
            signature=mlflow.models.ModelSignature(_schema(facts["inputs"]), _schema(facts["outputs"])),
            metadata={"enginesmith": {name: facts[name] for name in names}},
            pip_requirements=["enginesmith", "onnxruntime"],
        )


def _schema(tensors: Sequence[Mapping[str, Any]]) -> Schema:
    """The tensors of a description; a named dim is -1."""
    return Schema(
        [
            TensorSpec(
                np.dtype(tensor["dtype"]),
                [dim if isinstance(dim, int) else -1 for dim in tensor["shape"]],
                tensor["name"],
            )
            for tensor in tensors
        ]
    )


if __name__ == "__main__":
    print(log_version(sys.argv[1], os.environ["ENGINESMITH_REGISTRY"]).model_uri)
else:
    mlflow.models.set_model(EngineModel())
