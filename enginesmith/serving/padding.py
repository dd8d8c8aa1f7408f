"""How a request is padded to the sizes that an engine takes, as data of a version. Standard library only.

A dim may be padded where every input that has it says by what. Outputs are cropped on the axes that have its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from enginesmith.core.codec import Excerpt, decode
from enginesmith.core.requirements import Count, JsonObject

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
    edges: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)

    @property
    def dims(self) -> frozenset[str]:
        """The dims that may be padded."""
        return frozenset(dim for rules in self.inputs.values() for dim in rules)


@dataclass(frozen=True)
class _PaddedInput(Excerpt):
    pad: Mapping[str, PadValue] | None = None


@dataclass(frozen=True)
class _PaddedDim(Excerpt):
    buckets: tuple[Count, ...] | None = None


@dataclass(frozen=True)
class _PaddedSpec(Excerpt):
    inputs: Mapping[str, _PaddedInput] = field(default_factory=dict)
    dims: JsonObject = field(default_factory=dict)


def padding_of(spec: Mapping[str, object]) -> Padding:
    """The padding of a version, from the spec that its manifest holds. Raises `parsing.Malformed` for what is none."""
    found = decode(spec, _PaddedSpec, "spec")
    padding = Padding({name: item.pad for name, item in found.inputs.items() if item.pad})
    dims = ((name, found.dims[name]) for name in sorted(padding.dims & found.dims.keys()))
    edges = {name: decode(dim, _PaddedDim, f"spec.dims.{name}").buckets for name, dim in dims}
    return replace(padding, edges={name: sizes for name, sizes in edges.items() if sizes})
