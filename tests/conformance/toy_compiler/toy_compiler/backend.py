"""The toy compiler as a backend of Enginesmith. Neither numpy nor onnx is imported before they are needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import PackageNotFoundError, version
from enginesmith.core.capabilities import Capabilities
from enginesmith.core.requirements import Requirement, for_target, same_versions
from enginesmith.core.types import BuildRequest, Engine, QuantizationScheme, Session, Target

PRECISIONS = ("fp32", "fp16", "int8")
DTYPES = {"bool", "float16", "float32", "float64"} | {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Toy:
    """The toy backend, for CPUs.

    fold: whether nodes that only weights go into are computed once, while building.
    """

    name: ClassVar[str] = "toy"
    revision: ClassVar[int] = 1
    install: ClassVar[str] = "pip install toy-compiler"
    runtime: ClassVar[str] = "toy_compiler.session"
    # Symmetric int8, biases in floating point, the rest in fp32.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities(determinism="bytes", thread_safe=True)

    fold: bool = True

    def serves(self, target: Target) -> bool:
        """CPUs only."""
        return target.is_cpu

    def versions(self) -> dict[str, str]:
        """Compiler and runtime are one distribution."""
        try:
            return {"toy-compiler": version("toy-compiler")}
        except PackageNotFoundError:
            return {}

    def refuses(self, request: BuildRequest) -> str | None:
        """GPUs, precisions and types that it lacks, and everything where it is not installed."""
        if not self.serves(request.target):
            return f"toy compiles for CPUs, not for {request.target.name}; use another backend"
        if request.precision not in PRECISIONS:
            return f"toy has no {request.precision}; use one of {', '.join(PRECISIONS)}"
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype not in DTYPES:
                return f"{spec.name!r} is {spec.dtype}, which toy does not take; cast it to float32 or int64"
        return None if self.versions() else f"toy is not installed; {self.install}"

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """A CPU, and the version that built it."""
        return (for_target(request.target), *same_versions(dict(request.toolchain), "toy-compiler"))

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Compile `model` into WORKDIR/engine.toy. Raises ModelError naming the node that it does not know."""
        from toy_compiler.compiler import compile_model

        path = workdir / "engine.toy"
        compile_model(model, path, fold=self.fold)
        return Engine.of_file(self, request, path)

    def runs(self, target: Target) -> str | None:
        """A CPU is always at hand."""
        return None if target.is_cpu else f"toy engines run on CPUs, not on {target.name}"

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load an engine. Raises as `check_compatible` does, and IntegrityError for a damaged file."""
        from toy_compiler.session import ToySession

        check_compatible(self, engine)
        session = ToySession(engine)
        yield session
        session.close()
