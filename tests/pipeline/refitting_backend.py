"""Backends whose engines can be given other weights, on the CPU: for what the driver does about that.

A stripped engine is the ONNX model with its float weights zeroed; a whole one is the model itself. Two names, so that
one build has both.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from enginesmith.core.capabilities import Capabilities
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.requirements import Requirement, Weights, for_target
from enginesmith.core.types import BuildRequest, Engine, QuantizationScheme, Session, Target


@dataclass(frozen=True)
class Whole:
    name: ClassVar[str] = "whole"
    revision: ClassVar[int] = 1
    install: ClassVar[str] = "it is part of the tests"
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities("bytes")

    strip_weights: bool = False
    refittable: bool = True
    gain: int = 1

    def serves(self, target: Target) -> bool:
        return target.is_cpu

    def versions(self) -> dict[str, str]:
        return {"refitting": "1.0"}

    def refuses(self, request: BuildRequest) -> str | None:
        return None

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        weights = (Weights(request.model),) if self.strip_weights else ()
        return (for_target(request.target), *weights)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        return self._engine(request, model, workdir / "engine.refitting")

    def refits(self, request: BuildRequest) -> str | None:
        return None if self.strip_weights or self.refittable else "it was built without refittable or strip_weights"

    def refit_needs_gpu(self) -> bool:
        return False

    def refit(self, engine: Engine, model: Path, request: BuildRequest, workdir: Path) -> Engine:
        if self.gain != 1:
            raise EnginesmithError("the engine did not accept the new weights: gain; build it again")
        if self.strip_weights:
            path = workdir / "refitted.refitting"
            path.write_bytes(engine.path.read_bytes())
            return Engine.of_file(self, request, path)
        return self._engine(request, model, workdir / "refitted.refitting")

    def _engine(self, request: BuildRequest, model: Path, path: Path) -> Engine:
        import onnx
        from onnx import numpy_helper

        loaded_model = onnx.load(str(model))
        if self.strip_weights:
            for tensor in loaded_model.graph.initializer:
                if len(tensor.dims) and tensor.data_type == onnx.TensorProto.FLOAT:
                    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 0, tensor.name))
        onnx.save(loaded_model, path)
        return Engine.of_file(self, request, path)

    def runs(self, target: Target) -> str | None:
        return None

    def open(self, engine: Engine) -> AbstractContextManager[Session]:
        from builders.backends.onnxruntime import OrtSession

        return OrtSession(engine.weights if self.strip_weights and engine.weights else engine.path)


@dataclass(frozen=True)
class Stripped(Whole):
    name: ClassVar[str] = "stripped"
    capabilities: ClassVar[Capabilities] = Whole.capabilities

    strip_weights: bool = True


def install(folder: Path) -> str:
    """A distribution in `folder` that registers both; the folder, for sys.path, where jobs find it too."""
    info = folder / "refitting_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refitting-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[enginesmith.backends]\nwhole = {__name__}:Whole\nstripped = {__name__}:Stripped\n"
    )
    return str(folder)
