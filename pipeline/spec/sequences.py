"""What stored data of a model with state says of its samples: which sequence, and which step, each is of."""

from typing import ClassVar

from pydantic import Field, field_validator

from pipeline.spec.value_types import DimName, GraphName, SpecPart


class SequenceArrays(SpecPart):
    """Names of arrays with a number for each sample, in a data file of a model with state."""

    omitted: ClassVar[frozenset[str]] = frozenset({"sequence", "steps"})

    sequence: GraphName | None = Field(
        None, description="of a model with state: name of the array that says which sequence each step is of"
    )
    steps: dict[DimName, GraphName] | None = Field(
        None,
        description="of a model with state: {DIM: ARRAY}; samples behind each other with the same number in the array "
        "are one step, joined along the dim, such as the tokens of a prompt",
    )

    @field_validator("steps")
    @classmethod
    def _along_one(cls, steps: dict[str, str] | None) -> dict[str, str] | None:
        if steps is not None and len(steps) != 1:
            raise ValueError(f"joins samples along one dim; give {{DIM: ARRAY}}, found {len(steps)} of them")
        return steps

    @property
    def joined(self) -> tuple[str, str] | None:
        """(dim, name of the array) of `steps`."""
        return next(iter(self.steps.items())) if self.steps else None

    @property
    def orders(self) -> list[str]:
        """The names of these arrays."""
        return [name for name in (self.sequence, *(self.steps or {}).values()) if name]


class EnsembleArrays(SequenceArrays):
    """The same in data of an ensemble, whose dims are called 'GRAPH.DIM'."""

    steps: dict[str, GraphName] | None = Field(
        None,
        description="of graphs with state: {GRAPH.DIM: ARRAY}; samples behind each other with the same number in the "
        "array are one step, joined along the dim of the graph's inputs, such as the tokens of a prompt",
    )
