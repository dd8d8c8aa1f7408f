"""Padding rules of inputs: which of them no server can keep."""

from collections.abc import Iterator

from enginesmith.core.types import list_sums
from pipeline.spec.sections import SpecSections
from pipeline.spec.value_types import Loc

_GREATEST = {"float16": 65504.0, "float32": 3.4028235e38}


def wrong_pads(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Rules for dims that an input does not have, that another input does not pad, that a sum counts, of models with
    state, and values that the dtype does not hold: (key, message)."""
    rules = {name: item.pad for name, item in spec.inputs.items() if item.pad is not None}
    if rules and spec.state:
        yield ("inputs", next(iter(rules)), "pad"), "a model with state is not padded; remove pad"
        return
    summed = {dim for _, _, total in list_sums(spec.tensors()) for dim in total.split(" + ")}
    for name, pads in rules.items():
        for dim, value in pads.items():
            place: Loc = ("inputs", name, "pad", dim)
            text = f"inputs.{name}.pad has dim {dim!r}, which"
            lacking = [
                other for other, item in spec.inputs.items() if dim in item.shape and dim not in (item.pad or {})
            ]
            if dim not in spec.inputs[name].shape:
                yield place, f"{text} is no axis of {name!r}; name one of {list(spec.inputs[name].shape)}"
            elif lacking:
                yield place, f"{text} input {lacking[0]!r} has too and does not pad; add inputs.{lacking[0]}.pad"
            elif dim in summed:
                yield place, f"{text} is part of a sum of dims, and those are not padded; remove it"
            if value != "repeat" and not is_value_of(dtype := spec.inputs[name].dtype, value):
                yield place, f"inputs.{name}.pad is {value:g}, which {dtype} does not hold; give a value that it holds"


def is_value_of(dtype: str, value: float) -> bool:
    """Whether a number is one of a dtype's, but for the rounding of floats."""
    if dtype == "bool":
        return value in (0, 1)
    if dtype.startswith("float"):
        return abs(value) <= _GREATEST.get(dtype, abs(value))
    values = 2 ** int(dtype.lstrip("uint"))
    least = 0 if dtype.startswith("u") else -values // 2
    return value.is_integer() and least <= value < least + values
