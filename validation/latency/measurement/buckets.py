"""At which sizes an engine is measured, and with which inputs: real ones, cut or repeated to fit."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from enginery.core.errors import InputError
from enginery.core.types import Dim, Tensors, TensorSpec, sizes_product
from validation.data.batches import leading_dim
from validation.data.samples import resize

Which = Literal["few", "all"]
MOST = 16
_ONE = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, eq=False)
class Bucket:
    """Sizes of the dims, by which a bucket is named, and inputs of that size. items: how many samples those are."""

    sizes: Mapping[str, int]
    inputs: Tensors
    items: int

    @property
    def name(self) -> str:
        """'batch=8 length=64', or 'static'."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "static"


def sizes_of_buckets(dims: Sequence[Dim], which: Which) -> list[dict[str, int]]:
    """'few': every dim at its least, at what it is tuned for, at its most. 'all': every end of every bucket, MOST at
    most. Each once, smaller products first."""
    if which == "few":
        found = [{dim.name: getattr(dim, end) for dim in dims} for end in ("min", "opt", "max")]
    else:
        found = list(islice(sizes_product(dims, {dim.name: dim.test_sizes() for dim in dims}), MOST))
    distinct = {tuple(sizes.items()): sizes for sizes in found}
    return sorted(distinct.values(), key=lambda sizes: math.prod(sizes.values()))


def parse_sizes(text: str, dims: Sequence[Dim]) -> dict[str, int]:
    """'batch=8,length=64' as a person writes it; dims that are left out are at what they are tuned for.

    Raises InputError for a dim that the model does not have, and a size that it does not take.
    """
    given = {name: int(size) for name, size in _ONE.findall(text)}
    known = {dim.name: dim for dim in dims}
    example = ",".join(f"{dim.name}={dim.opt}" for dim in dims) or "nothing: this model has no dynamic dims"
    if _ONE.sub("", text).strip(" ,") or not given:
        raise InputError(f"bucket {text!r} is not NAME=SIZE,...; write {example}")
    for name, size in given.items():
        if name not in known:
            raise InputError(f"bucket {text!r}: the model has no dim {name!r}; write {example}")
        if not known[name].min <= size <= known[name].max:
            raise InputError(f"bucket {text!r}: {name} goes from {known[name].min} to {known[name].max}")
    return {dim.name: given.get(dim.name, dim.opt) for dim in dims}


def make_buckets(wanted: Sequence[Mapping[str, int]], specs: Sequence[TensorSpec], real: Tensors) -> list[Bucket]:
    """Inputs for each. specs: as the model's spec names their dims.  real: a group of real inputs."""
    batch = leading_dim(specs)
    return [Bucket(dict(sizes), resize(real, specs, sizes), sizes.get(batch or "", 1)) for sizes in wanted]


def tuned_for(dims: Sequence[Dim]) -> dict[str, int]:
    """Every dim at what it is tuned for."""
    return {dim.name: dim.opt for dim in dims}
