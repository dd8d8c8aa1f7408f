"""Runs an engine: its steps in order, on numpy arrays."""

import json
import zipfile
from typing import Any

import numpy as np

from enginesmith.arrays import InputCheck
from enginesmith.core.errors import DataError, EnginesmithError, IntegrityError
from enginesmith.core.types import Engine, Session, Tensors
from toy_compiler.operators import run_step


class ToySession(Session):
    """An opened engine. Raises IntegrityError for a file that is none."""

    def __init__(self, engine: Engine) -> None:
        self.inputs, self.outputs = engine.request.inputs, engine.request.outputs
        self._name, self._closed = engine.path.name, False
        self._check = InputCheck(self.inputs, engine.request.profiles)
        try:
            with np.load(engine.path, allow_pickle=False) as stored_arrays:
                document = json.loads(stored_arrays["program"].tobytes())
                self._steps: list[dict[str, Any]] = document["steps"]
                self._weights = {name: stored_arrays[f"w{index}"] for index, name in enumerate(document["names"])}
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise IntegrityError(f"{self._name} is no engine of toy ({error}); build it again") from error

    def run(self, inputs: Tensors) -> dict[str, Any]:
        """Run once. Raises DataError for arrays that do not fit, and where a step cannot be computed of them."""
        if self._closed:
            raise EnginesmithError(f"{self._name}: the session is closed; open it again")
        self._check(inputs)
        values = {**self._weights, **inputs}
        for step in self._steps:
            try:
                values[step["output"]] = run_step(step, values)
            except (ValueError, IndexError, TypeError) as error:
                raise DataError(f"{step['where']} cannot be computed of these inputs: {error}") from error
        return {spec.name: np.array(values[spec.name], order="C") for spec in self.outputs}

    def close(self) -> None:
        """Give back the weights; no call is answered from now on."""
        self._closed = True
        self._weights.clear()
