"""The sizes at which an engine's latency is measured, and inputs of these sizes, made of real ones."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from enginesmith.core.errors import InputError
from enginesmith.core.types import Dim, Tensors, TensorSpec, sizes_product
from validation.data.batches import leading_dim
from validation.data.samples import resize

Which = Literal["few", "all"]
MOST = 16
_ONE = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, eq=False)
class BucketInputs:
    """The sizes of the dims and inputs of these sizes. items: the number of samples in them."""

    sizes: Mapping[str, int]
    inputs: Tensors
    items: int

    @property
    def name(self) -> str:
        """'batch=8 length=64', or 'static'."""
        return " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "static"


def sizes_of_buckets(dims: Sequence[Dim], which: Which) -> list[dict[str, int]]:
    """Distinct sizes, those with the smaller product first.

    'few': every dim at its min, opt and max. 'all': the ends of every bucket of every dim, at most MOST combinations.
    """
    if which == "few":
        found = [{dim.name: getattr(dim, end) for dim in dims} for end in ("min", "opt", "max")]
    else:
        found = list(islice(sizes_product(dims, {dim.name: dim.test_sizes() for dim in dims}), MOST))
    distinct = {tuple(sizes.items()): sizes for sizes in found}
    return sorted(distinct.values(), key=lambda sizes: math.prod(sizes.values()))


def parse_sizes(text: str, dims: Sequence[Dim]) -> dict[str, int]:
    """Sizes from 'batch=8,length=64'; dims that are left out have the size that they are tuned for.

    Raises InputError for a dim that the model does not have, and a size outside of its range.
    """
    given = {name: int(size) for name, size in _ONE.findall(text)}
    known = {dim.name: dim for dim in dims}
    example = ",".join(f"{dim.name}={dim.opt}" for dim in dims) or "nothing: this model has no dynamic dims"
    if _ONE.sub("", text).strip(" ,") or not given:
        raise InputError(f"bucket {text!r} is not NAME=SIZE,...; write {example}")
    for name, size in given.items():
        if name not in known:
            raise InputError(f"bucket {text!r}: the model has no dim {name!r}; write {example}")
        if size not in known[name].sizes:
            raise InputError(f"bucket {text!r}: {name} has the sizes {known[name].words}")
    return {dim.name: given.get(dim.name, dim.opt) for dim in dims}


def make_buckets(wanted: Sequence[Mapping[str, int]], specs: Sequence[TensorSpec], real: Tensors) -> list[BucketInputs]:
    """Inputs of each of the sizes. specs: the model's inputs.  real: a group of real inputs, cut or repeated to fit."""
    batch = leading_dim(specs)
    return [BucketInputs(dict(sizes), resize(real, specs, sizes), sizes.get(batch or "", 1)) for sizes in wanted]


def tuned_for(dims: Sequence[Dim]) -> dict[str, int]:
    """The size that each dim is tuned for."""
    return {dim.name: dim.opt for dim in dims}
