"""How a request is padded to the sizes that an engine takes, as data of a version. Standard library only.

A dim may be padded where every input that has it says by what. Outputs are cropped on the axes that have its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from enginesmith.core import parsing

REPEAT: Literal["repeat"] = "repeat"
# A number; or 'repeat', the last entry along the axis again, which changes no extremes of a tensor.
PadValue = float | Literal["repeat"]


@dataclass(frozen=True)
class Padding:
    """The padding rules of a version. inputs: input -> dim -> what its axis of that dim is filled with.

    edges: dim -> sizes that it is padded up to, rising. A padded dim without edges is padded to the least size that an
    engine takes.
    """

    inputs: Mapping[str, Mapping[str, PadValue]] = field(default_factory=dict)
    edges: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def dims(self) -> frozenset[str]:
        """The dims that may be padded."""
        return frozenset(dim for rules in self.inputs.values() for dim in rules)


def padding_of(spec: Mapping[str, object]) -> Padding:
    """The padding of a version, from the spec that its manifest holds. Raises `parsing.Malformed` for what is none."""
    rules: dict[str, Mapping[str, PadValue]] = {}
    for name, value in parsing.mapping(spec.get("inputs", {}), "spec.inputs").items():
        item = parsing.mapping(value, f"spec.inputs.{name}")
        if pads := item.get("pad"):
            rules[name] = parsing.mapping_of(_read_value)(pads, f"spec.inputs.{name}.pad")
    padding = Padding(rules)
    dims = parsing.mapping(spec.get("dims", {}), "spec.dims") if rules else {}
    sizes = parsing.optional(parsing.many(parsing.count))
    found = {name: parsing.mapping(dims[name], f"spec.dims.{name}") for name in sorted(padding.dims) if name in dims}
    edges = {name: sizes(dim.get("buckets"), f"spec.dims.{name}.buckets") for name, dim in found.items()}
    return Padding(rules, {name: buckets for name, buckets in edges.items() if buckets})


def _read_value(value: object, path: str) -> PadValue:
    return REPEAT if value == REPEAT else float(parsing.number(value, path))
