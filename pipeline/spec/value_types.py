"""Types of single values in a spec (names, sizes, files) with their checks, and the error for what is wrong between
several keys."""

from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from enginesmith.core.errors import EnginesmithError, UnknownNameError
from enginesmith.core.hardware import targets
from enginesmith.core.names import check_channel, check_graph_name, check_model, check_version, inside
from enginesmith.core.types import PLUS

LARGEST_SIZE = 1 << 31
_LONGEST_SHOWN = 80
_DEEPEST_SHOWN = 4

# Path of a key in a file: names of keys, and indices in lists.
Loc = tuple[int | str, ...]


class Mistakes(ValueError):  # noqa: N818 - several of them
    """What is wrong between several keys of a part: (path of a key below the part, message) for each mistake."""

    def __init__(self, found: Iterable[tuple[Loc, str]]) -> None:
        self.found = tuple(found)
        super().__init__("\n".join(text for _, text in self.found))


def format_value(value: object) -> str:
    """A value as YAML writes it, cut after 80 characters."""
    text = _yaml(value, _DEEPEST_SHOWN)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _yaml(value: object, depth: int) -> str:
    if isinstance(value, (dict, list, tuple)) and value and not depth:
        return "..."
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item, depth - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(item, depth - 1) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str | int | float | bytes) else str(value)


def as_value_error(check: Callable[..., object], *values: object) -> None:
    """Call `check(*values)`; an EnginesmithError becomes a ValueError, which pydantic collects."""
    try:
        check(*values)
    except EnginesmithError as error:
        raise ValueError(str(error)) from error


def _validator(check: Callable[[str], object]) -> AfterValidator:
    def validate(text: str) -> str:
        as_value_error(check, text)
        return text

    return AfterValidator(validate)


def _check_unit_pattern(text: str) -> None:
    words = text.split()
    if not 1 <= len(words) <= 3:
        raise UnknownNameError("is not 'TARGET [PRECISION [BACKEND]]'")
    targets.parse_targets(words[0])


def _check_dim_name(text: str) -> None:
    if not text.isidentifier():
        raise ValueError("must be a name made of letters, digits and '_', not starting with a digit")


def _check_axis(value: object) -> object:
    if isinstance(value, str) and "+" in value:
        return _check_sum(value)
    good = value.isidentifier() if isinstance(value, str) else type(value) is int and 1 <= value < LARGEST_SIZE
    if not good:
        raise ValueError("must be a size from 1 up, the name of a dim (letters, digits, '_'), or a sum of these")
    return value


def _check_sum(text: str) -> str:
    """A sum of dims and sizes with one space around each '+'."""
    terms = [term.strip() for term in text.split("+")]
    sizes = [term for term in terms if term.isascii() and term.isdecimal()]
    if not all(term.isidentifier() or term in sizes for term in terms) or any(
        not 1 <= int(term) < LARGEST_SIZE for term in sizes
    ):
        raise ValueError("must be a sum of dims and of sizes from 1 up, such as 'past + tokens' or 'past + 1'")
    if len(sizes) == len(terms):
        raise ValueError("is a sum of sizes alone; write the number")
    return PLUS.join(terms)


def _as_name(value: object) -> object:
    """A whole number as text: PyTorch's older exporters call tensors 387, which YAML takes for a number."""
    return str(value) if type(value) is int else value


ModelName = Annotated[str, _validator(check_model)]
GraphKey = Annotated[str, _validator(check_graph_name)]
VersionName = Annotated[str, _validator(check_version)]
Channel = Annotated[str, _validator(check_channel)]
UnitPattern = Annotated[str, _validator(_check_unit_pattern)]
TargetName = Annotated[str, _validator(targets.parse_targets)]
File = Annotated[str, AfterValidator(inside)]
# Of a tensor or a node, or of an array of data for it.
GraphName = Annotated[str, BeforeValidator(_as_name)]
DimName = Annotated[str, _validator(_check_dim_name)]
Size = Annotated[int, Field(strict=True, ge=1, lt=LARGEST_SIZE)]
# Of a dim: 0 is for states that begin empty.
Least = Annotated[int, Field(strict=True, ge=0, lt=LARGEST_SIZE)]
Axis = Annotated[int | str, BeforeValidator(_check_axis)]


def off(value: object) -> object:
    """'off' for what YAML reads as false."""
    return "off" if value is False else value


class SpecPart(BaseModel):
    """Base of all parts of a spec: frozen and closed. omitted: fields that are not written while they have their
    default: versions are named by the content of their spec, and specs of older ones have no such keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    omitted: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _omit_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields, written = type(self).model_fields, write(self)
        return {
            key: value
            for key, value in written.items()
            if key not in self.omitted or getattr(self, key) != fields[key].default
        }
