"""The section of a spec that asks for a compile cache: for nodes that run the Python model with torch.compile."""

from collections.abc import Sequence

from pydantic import Field

from enginesmith.compile_caches.recipe import CompileMode, CompileOptions
from enginesmith.core.types import TensorSpec
from pipeline.spec.source import SpecPart


class CompileCache(SpecPart):
    """A compile cache beside the engines, made with these options of torch.compile."""

    mode: CompileMode = "default"
    fullgraph: bool = Field(False, description="whether a graph break is an error")
    dynamic: bool = Field(True, description="whether dims are symbols from the first call on; else sizes are constants")

    def options(self, inputs: Sequence[TensorSpec]) -> CompileOptions:
        """As values of the step. inputs: of the model."""
        named = {
            spec.name: tuple(axis for axis, size in enumerate(spec.shape) if isinstance(size, str)) for spec in inputs
        }
        dynamic = {name: axes for name, axes in named.items() if axes and self.dynamic}
        return CompileOptions(self.mode, self.fullgraph, dynamic)
