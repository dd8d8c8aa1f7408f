"""A compiler that compiles nothing: its engines are so many MiB of nothing. For benchmarks of what is around it."""

# ruff: noqa: ARG002 - the protocol asks for these arguments
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from enginesmith.core.capabilities import Capabilities
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.requirements import Requirement, for_target
from enginesmith.core.types import BuildRequest, Engine, QuantizationScheme, Session, Target
from pipeline.compile.steps.engines import BuildEngine
from pipeline.values import Recorded


@dataclass(frozen=True)
class Noop:
    """size_mib: of its engines; 0 is a handful of bytes that no other unit's engine has."""

    name: ClassVar[str] = "noop"
    revision: ClassVar[int] = 1
    install: ClassVar[str] = "comes with the benchmarks"
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
    capabilities: ClassVar[Capabilities] = Capabilities("bytes")

    size_mib: int = 0

    def serves(self, target: Target) -> bool:
        return True

    def versions(self) -> dict[str, str]:
        return {"noop": "1"}

    def refuses(self, request: BuildRequest) -> str | None:
        return None

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        return (for_target(request.target),)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        path = workdir / "engine.noop"
        with path.open("wb") as stream:
            stream.write(request.key.encode())
            stream.truncate(max(64, self.size_mib << 20))
        return Engine.of_file(self, request, path)

    def runs(self, target: Target) -> str | None:
        return "it compiles nothing"

    def open(self, engine: Engine) -> AbstractContextManager[Session]:
        raise EnginesmithError("engines of noop hold nothing that could run; build them only")


def install() -> None:
    """Have `builders.backends.discovery` find it, in this process."""
    entries = discovery._entries()
    entries["noop"] = EntryPoint("noop", "benchmarks.noop:Noop", discovery.GROUP)


@dataclass(frozen=True)
class BuildNothing:
    """`BuildEngine`, with that compiler known."""

    build: BuildEngine

    def run(self, context: WorkerContext) -> Recorded:
        """The record of the engine."""
        install()
        return self.build.run(context)


@dataclass(frozen=True)
class Nothing:
    """Do nothing."""

    def run(self, context: WorkerContext) -> None:
        """Return at once."""
