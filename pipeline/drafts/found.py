"""What a look at a model finds, and the spec that follows from it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import PLUS, TensorSpec

# How large a dim may become where nothing in the model says it; the first dim of a tensor is the samples of a batch.
LARGEST_BATCH = 8
LARGEST_SIZE = 128


@dataclass(frozen=True)
class FoundDim:
    """A dynamic dim: the sizes that the spec will allow, multiples of `multiple` alone, and why these.

    guessed: the model was not seen to run at any of them.
    """

    min: int
    opt: int
    max: int
    why: str
    multiple: int = 1
    guessed: bool = False


@dataclass(frozen=True)
class FoundModel:
    """A model as it was found.

    name: for the registry.  source: the spec's `source`, with paths as they will stand in the spec.
    inputs, outputs: in the model's order; a name of a dim is one that a spec can have.
    precisions: that make sense, with the reason for each.  notes: on the whole model, each one line of a comment.
    unknown: inputs of which nothing says what they are, and why; a person has to fill them in.
    left_out: outputs of the model that no spec can have, and why; `outputs` are the others.
    metric: the task metric that it most likely wants, as a spec has it; empty where nothing is evident.
    states: inputs that seem to take what an output gave in the call before.
    targets: what it is served on, as a spec names it; 'cpu' where nothing says so.
    refused: why it does not take the requests that were given, as far as that was tried.
    """

    name: str
    source: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, FoundDim] = field(default_factory=dict)
    precisions: tuple[tuple[str, str], ...] = (("fp32", ""),)
    notes: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    metric: Mapping[str, object] = field(default_factory=dict)
    states: tuple[State, ...] = ()
    targets: tuple[str, ...] = ("cpu",)
    refused: str = ""

    def with_dims(self, dims: Mapping[str, FoundDim]) -> "FoundModel":
        """The same with other dims."""
        return replace(self, dims=dict(dims))

    def hold_sizes(self, sizes: Mapping[str, int]) -> "FoundModel":
        """The same with dims that hold the sizes of requests, and but for batches are tuned for them.

        A dim that was only guessed holds these sizes alone.

        Raises DataError for a size that is no multiple of what the model takes.
        """
        dims = dict(self.dims)
        for name, dim in self.dims.items():
            size = sizes[name]
            if size % dim.multiple:
                raise DataError(
                    f"the requests have {name} {size}; the model takes multiples of {dim.multiple}: pad them"
                )
            why = f"{dim.why}; requests have {size}"
            opt = dim.opt if is_batch(name) else size
            held = replace(dim, min=min(dim.min, size), opt=opt, max=max(dim.max, size), why=why)
            dims[name] = FoundDim(size, size, size, why) if dim.guessed else held
        return self.with_dims(dims)


def is_batch(name: str) -> bool:
    """Whether a dim of this name counts the samples of a batch."""
    return "batch" in name.lower() or name.lower() in ("n", "b", "bs")


def model_name(text: str) -> str:
    """A name for the registry out of a file's name: lower case, every run of other characters as one '-'."""
    plain = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")
    return re.sub(r"\.{2,}", ".", plain)[:63].rstrip("-._") or "model"


def name_axes(inputs: tuple[TensorSpec, ...], unknown: str = "?") -> tuple[TensorSpec, ...]:
    """Inputs whose dims have names that a spec can have, equal ones for equal names of the model.

    An axis that the model leaves without a name (`unknown`) gets one of its own, what such an axis is usually called:
    `batch` for axis 0, `height` and `width` of [n, c, h, w], `length` of a sequence; with the input's name before it
    where that name is taken. A sum of other dims of the model stays one.
    """
    taken: dict[str, str] = {}
    named = []
    first = {spec.shape[0] for spec in inputs if spec.shape}
    every = {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)}
    for spec in inputs:
        shape: list[int | str] = []
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int) or _terms(dim, every):
                shape.append(dim)
            elif dim != unknown and dim in taken:
                shape.append(taken[dim])
            else:
                own = _identifier(dim) if dim != unknown else None
                if own and is_batch(own) and "batch" not in own.lower() and dim not in first:
                    own = None  # an n that is no axis 0 counts samples of a signal, or points
                name = _free(own or _usual_name(spec, axis), spec.name, taken)
                taken[dim if dim != unknown else f"{spec.name}\0{axis}"] = name
                shape.append(name)
        named.append(replace(spec, shape=tuple(shape)))

    def rename(dim: int | str) -> int | str:
        terms = () if isinstance(dim, int) else _terms(dim, every)
        return PLUS.join(taken.get(term, term) for term in terms) if terms else dim

    return tuple(replace(spec, shape=tuple(map(rename, spec.shape))) for spec in named)


def _terms(dim: str, every: Collection[str]) -> list[str]:
    """The terms of a dim that exporters name as a sum of other dims, 'past_length + length' or 'past_length + 1', or as
    the total of two, 'total_length'; else none."""
    whole = re.fullmatch(r"total_(\w+)", dim)
    terms = [f"past_{whole[1]}", whole[1]] if whole else re.split(r"\s*\+\s*", dim)
    known = [term for term in terms if term in every and term != dim]
    return terms if known and all(term in known or re.fullmatch("[1-9][0-9]{,8}", term) for term in terms) else []


def _identifier(text: str) -> str | None:
    """A dim's own name where it says something: not the counted names that converters give."""
    plain = re.sub(r"\W+", "_", text).strip("_")
    counted = re.fullmatch(r"(?:unk_+|dynamic_axes_|(?:p2o_)?DynamicDimension_|s|d|dim_?)\d+", plain)
    return plain if plain.isidentifier() and not counted else None


def _usual_name(spec: TensorSpec, axis: int) -> str:
    rank = len(spec.shape)
    if axis == 0:
        return "batch"
    if rank == 4 and axis >= 2 and spec.dtype.startswith(("float", "uint8")):
        return ("height", "width")[axis - 2]
    return "length" if axis == 1 or rank == 3 else f"axis{axis}"


def _free(name: str, owner: str, taken: Mapping[str, str]) -> str:
    """The name, or one that nothing has yet."""
    used = set(taken.values())
    if name not in used:
        return name
    base = re.sub(r"\W+", "_", f"{owner}_{name}").strip("_")
    base = base if base.isidentifier() else f"_{base}"
    return next(text for text in (base, *(f"{base}_{n}" for n in range(2, 1000))) if text not in used)
