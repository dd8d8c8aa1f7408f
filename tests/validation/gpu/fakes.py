"""A backend for tests: keeps the ONNX file as its engine, and runs it by ONNX's own evaluator, rightly or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from builders.backends import discovery
from enginesmith.core.capabilities import Capabilities, SharedOptions
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.requirements import Requirement, for_target
from enginesmith.core.types import BuildRequest, Engine, QuantizationScheme, Session, Target, Tensors
from validation.gpu.devices import KitDevice

HOPPER = KitDevice(
    "cuda", "NVIDIA H100", "NVIDIA-H100-PCIe", 0, "580.1", "13.0", compute_capability=(9, 0), product="h100"
)


@dataclass(frozen=True)
class Fake:
    """how: 'right', 'wrong', 'no build', 'no load', 'no run'.  only_sm: the one generation that it takes."""

    name: ClassVar[str] = "fake"
    revision: ClassVar[int] = 1
    install: ClassVar[str] = "it is not to be had"
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
    capabilities: ClassVar[Capabilities] = Capabilities("bytes", options=SharedOptions(cuda_graphs="cuda_graphs"))

    how: str = "right"
    cuda_graphs: bool = False
    only_sm: str = ""

    def serves(self, target: Target) -> bool:
        return True

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def refuses(self, request: BuildRequest) -> str | None:
        return "no such generation" if self.only_sm and request.target.sm != self.only_sm else None

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        return (for_target(request.target),)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        if self.how == "no build":
            raise EnginesmithError("the compiler says no")
        path = workdir / "engine.fake"
        path.write_bytes(model.read_bytes())
        return Engine.of_file(self, request, path, (request.target.name,))

    def runs(self, target: Target) -> str | None:
        return None

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        if self.how == "no load":
            raise EnginesmithError(f"no kernel image for {engine.request.target.name}")
        yield _Session(engine, self.how)


class _Session(Session):
    def __init__(self, engine: Engine, how: str) -> None:
        from onnx.reference import ReferenceEvaluator

        self.inputs, self.outputs, self._how = engine.request.inputs, engine.request.outputs, how
        self._evaluator = ReferenceEvaluator(str(engine.path))

    def run(self, inputs: Tensors) -> dict[str, Any]:
        if self._how == "no run":
            raise EnginesmithError("an illegal memory access was encountered")
        items = [np.asarray(value) for value in self._evaluator.run(None, dict(inputs))]
        off_number = 1 if self._how == "wrong" else 0
        return {spec.name: value + off_number for spec, value in zip(self.outputs, items, strict=True)}

    def device_seconds(self, inputs: Tensors, runs: int) -> list[float]:
        return [1e-3 * (1 + index) for index in range(runs)]


def register(monkeypatch: pytest.MonkeyPatch, *others: str) -> None:
    """Have `fake` be the only backend, beside those of the real ones that are named."""
    real = discovery._entries()
    entries = {"fake": EntryPoint("fake", f"{__name__}:Fake", discovery.GROUP), **{name: real[name] for name in others}}
    monkeypatch.setattr(discovery, "_entries", lambda: entries)
