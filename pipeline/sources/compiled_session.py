"""A model that a process of its own compiles with torch.compile, as a session (`enginesmith.user_code.compiling`)."""

import numpy as np

from enginesmith.compile_caches.recipe import CacheRecipe
from enginesmith.core.errors import ModelError
from enginesmith.core.types import Session, Tensors, TensorSpec
from enginesmith.user_code.compiling import CompileModel, RanCompiled, RunCompiled
from enginesmith.user_code.task import Task
from pipeline.sources.user_process import UserProcess, start_user_process


class CompiledSession(Session):
    """A model that a process of its own compiles, from `with` on. answers: what the process told of each call."""

    def __init__(self, model: CompileModel, outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.outputs = (), outputs
        self.answers: list[RanCompiled] = []
        self._starting = start_user_process(Task(model))
        self._model = model

    def __enter__(self) -> "CompiledSession":
        self._process: UserProcess = self._starting.__enter__()
        self.recipe, _ = self._process.ask(Task(self._model), CacheRecipe)
        return self

    def __exit__(self, *given: object) -> None:
        self._starting.__exit__(None, None, None)

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """The outputs, by the names that the golden set has. Raises ModelError where the model fails."""
        answer, arrays = self._process.ask(RunCompiled(), RanCompiled, inputs)
        self.answers.append(answer)
        if len(arrays) != len(self.outputs):
            raise ModelError(f"the model gives {len(arrays)} outputs, and {len(self.outputs)} as it was exported")
        return dict(zip((spec.name for spec in self.outputs), arrays.values(), strict=True))
