"""Reads prices of machines per hour, and how many there are.

::

    currency: USD
    l4: {per_hour: 0.71, count: 40}
    a100: {per_hour: 3.67}                # as many as are wanted
    sm_120: {per_hour: 2.10, count: 8}    # every product of the generation that has no price of its own
    cpu: {per_hour: 0.19}                 # or a kind of CPU: x86-64-v4-vnni
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from enginesmith.core.errors import UnknownNameError
from enginesmith.core.hardware.targets import parse_targets
from pipeline.spec.document import load_document
from pipeline.spec.mistakes import Kind
from pipeline.spec.value_types import Loc, Mistakes, SpecPart

EXAMPLE = "write such as `l4: {per_hour: 0.71, count: 40}`"


class MachinePrice(SpecPart):
    """The price of one machine: a GPU with what it needs, or a node without one."""

    per_hour: float = Field(gt=0, le=1e9)
    count: int | None = Field(None, ge=0, le=1_000_000, strict=True, description="default: as many as are wanted")


class PriceFile(SpecPart):
    """The content of a file of prices: names of machines, each with its price, and the currency."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, MachinePrice]
    currency: str = Field("", max_length=12)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        wrong: list[tuple[Loc, str]] = [
            ((name,), reason) for name in self.__pydantic_extra__ if (reason := _why_no_machine(name))
        ]
        if not self.__pydantic_extra__:
            wrong = [((), f"has no price; {EXAMPLE}")]
        if wrong:
            raise Mistakes(wrong)
        return self


def _why_no_machine(name: str) -> str:
    """Why a name stands for no one kind of machine; '' where it does."""
    try:
        found = parse_targets(name)
    except UnknownNameError as error:
        return str(error)
    several = ", ".join(target.name for target in found)
    return f"{name} is several: {several}; give each its price" if len(found) > 1 else ""


@dataclass(frozen=True)
class MachinePrices:
    """Prices by the name of the machine. source: the file's name."""

    machines: Mapping[str, MachinePrice]
    currency: str
    source: str

    def name_of(self, names: Sequence[str]) -> str | None:
        """The entry for a machine. names: that it goes by, the narrowest first ('l4', 'sm_89')."""
        return next((name for name in names if name in self.machines), None)


KIND = Kind(PriceFile, "a list of prices", "l4 and currency", EXAMPLE)


def read_prices(path: Path) -> MachinePrices:
    """The prices in a YAML file; names as targets have them ('L4' is 'l4', '8.9' is 'sm_89').

    Raises SpecError with a line for each mistake.
    """
    found, _ = load_document(path, KIND)
    machines = {parse_targets(name)[0].name: price for name, price in found.__pydantic_extra__.items()}
    return MachinePrices(machines, found.currency, str(path))
