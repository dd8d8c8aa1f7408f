"""What an engine promises besides being near its graph: bits that repeat, and outputs of a certain form."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline.spec.words import Part


class Bitwise(Part):
    """The same inputs give the same bits. A sample's place in a batch is held to the limits, unless named here."""

    runs: int = Field(3, ge=2, le=1000, description="how often each case runs")
    position: bool = Field(False, description="the same bits wherever a sample lies in a batch")
    size: bool = Field(False, description="the same bits whatever the size of the batch")


class Structure(Part):
    """What one output must be, in every case of the golden set. What is not given is not asked for."""

    finite: Literal[True] | None = Field(None, description="no NaN and no infinity")
    range: tuple[float | None, float | None] | None = Field(None, description="[least, greatest]; null is no end")
    sums_to_one: float | None = Field(None, ge=0, description="how far sums over the last axis may be from 1")
    unit_norm: float | None = Field(None, ge=0, description="how far norms over the last axis may be from 1")
    sorted: Literal["ascending", "descending", "strictly ascending", "strictly descending"] | None = None
    shape: tuple[int | str, ...] | None = Field(None, description="sizes, and names of dims")
    equal_until: int | None = Field(None, description="token id: sequences equal the graph's up to its first one")

    @model_validator(mode="after")
    def _asks(self) -> Self:
        if all(value is None for value in self.model_dump().values()):
            raise ValueError("asks for nothing; name a predicate, such as finite: true")
        if self.range is not None and None not in self.range and self.range[0] > self.range[1]:  # type: ignore[operator]
            raise ValueError("range: the least value comes first")
        return self


class Contract(Part):
    """Checked on every engine that runs; one that breaks it has failed (docs/validation.md)."""

    bitwise: Bitwise | None = None
    structured: dict[str, Structure] = Field({}, description="by output")
