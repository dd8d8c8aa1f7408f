"""A function between the graphs of an ensemble: where it is, and what it takes and gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from enginesmith.core import state
from enginesmith.core.errors import digest_of_file
from enginesmith.core.names import inside
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.user_code.entry_point import source_files
from pipeline.spec.source import DimName, DimRange, GraphName, Input, SpecPart

# Sizes of a dim that a function does not bound.
_ANY = DimRange(min=1, opt=1, max=1 << 16)


class EnsembleFunction(SpecPart):
    """Python code that is run between graphs, on numpy arrays by name."""

    omitted: ClassVar[frozenset[str]] = frozenset({"dims"})

    function: str = Field(
        description="'file.py:function'; called with an array for each input, by name; returns a dict with one for "
        "each output"
    )
    inputs: dict[GraphName, Input] = Field(min_length=1)
    outputs: dict[GraphName, Input] = Field(
        min_length=1, description="axis 0 may have any number of rows, also none, whatever the inputs have"
    )
    dims: dict[DimName, DimRange] = Field(
        {}, description="sizes of named axes of inputs that a caller gives; default: any"
    )

    @field_validator("function")
    @classmethod
    def _entry_point(cls, text: str) -> str:
        file, _, name = text.partition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise ValueError("must look like 'ocr.py:crop', a file and a function in it")
        return f"{inside(file)}:{name}"

    def at(self, name: str, folder: Path, sources: Mapping[str, str]) -> state.EnsembleFunction:
        """It with digests of its files. name: in the spec.  folder: of that.  sources: what gives its inputs. Raises
        ModelError for a file that cannot be read."""
        digests = {
            str(path.relative_to(folder)): digest_of_file(path) for path in source_files(folder, folder / self.file)
        }
        return state.EnsembleFunction(name, self.file, self.name, self.tensors(), self.gives(), sources, digests)

    @property
    def file(self) -> str:
        """The Python file, relative to the spec."""
        return self.function.partition(":")[0]

    @property
    def name(self) -> str:
        """The function in it."""
        return self.function.partition(":")[2]

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs of the function."""
        return _tensors(self.inputs)

    def gives(self) -> tuple[TensorSpec, ...]:
        """The outputs of the function."""
        return _tensors(self.outputs)

    def named_dims(self) -> tuple[Dim, ...]:
        """The named dims of its inputs."""
        names = dict.fromkeys(dim for tensor in self.inputs.values() for dim in tensor.shape if isinstance(dim, str))
        return tuple(self.dims.get(name, _ANY).to_dim(name) for name in names)


def _tensors(items: dict[str, Input]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items.items())
