"""Converts values to JSON and back, by the types of their fields. All documents, requests and results use this codec.

A value is a frozen dataclass of plain values, paths, times, tuples, mappings and such dataclasses, whose annotations
can be resolved at run time. annotated-types limit a field (docs/decisions/0028-annotated-types.md): `Annotated[float,
Ge(0)]`, or `Annotated[str, Predicate(is_digest), doc("a SHA-256 in hexadecimal")]`, whose `doc` describes the expected
value in errors. The type in a union is found by a field that is a `Literal` in each of its classes; without such a
field the types are tried in order. A class checks other rules in `check_fields`, which is called for values that were
read, not for values that code constructs.

A missing field gets its default. A field with `init=False`, which `__post_init__` sets, is written, and computed again
when the value is read. JSON has no NaN and no infinities (RFC 8259, section 6): such a float becomes {"float": "nan"},
and in documents for people (`encode_document`) "nan". If a field's JSON name is a Python keyword, its name in the class
ends with "_".
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar, get_args, get_origin

from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError
from enginesmith.core.parsing import Malformed, Timestamp, parse_json, read_stamp, stamp
from enginesmith.core.requirements import UNIONS, Format, acceptor, describe, rules

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_PLAIN = frozenset({str, bool, int, NoneType})
_TOO_NEW = "is {}; this enginesmith reads {}: upgrade enginesmith"
_FLOAT, _NOT_JSON = "float", ("nan", "inf", "-inf")
_Reader: TypeAlias = Callable[[object], Any]


class Complete:
    """Base of a dataclass whose fields must all be in the document, including those with a default."""


class Excerpt:
    """Base of a dataclass that reads some fields of an object and ignores the others."""


class NewerFormatError(Malformed):
    """A document in a format of a newer release. The only remedy is to upgrade."""

    exit_code = InputError.exit_code


def document_error(where: str, error: Exception, remedy: str = "") -> IntegrityError:
    """The error for a document that cannot be read at `where`. remedy: used unless the document's format is newer."""
    if isinstance(error, NewerFormatError):
        return NewerFormatError(f"{where}: {error}")
    return IntegrityError(f"{where}: {error}; {remedy}" if remedy else f"{where}: {error}")


@contextmanager
def explain_damage(document: str, remedy: str = "") -> Iterator[None]:
    """Turn a Malformed error of the block into a `document_error`: 'the document: what is wrong; the remedy'."""
    try:
        yield
    except Malformed as error:
        raise document_error(document, error, remedy) from error


def refuse_newer(what: str, number: object, newest: int) -> None:
    """Raise NewerFormatError if a format's number is above `newest`. what: the document, for the message."""
    if isinstance(number, int) and number > newest:
        raise NewerFormatError(f"{what}: format {_TOO_NEW.format(number, newest)}")


class _Mismatch(Exception):  # noqa: N818 - `decode` raises it as Malformed
    """Data of another type. The message begins with the field's path, relative to the value that is read."""


class _Newer(_Mismatch):
    """The format of the data is newer."""


@typing.overload
def encode(value: "DataclassInstance") -> dict[str, object]: ...
@typing.overload
def encode(value: object) -> object: ...
def encode(value: object) -> object:
    """The JSON value (dict, list, str, number, bool, None) of a value. Raises TypeError for an unsupported type."""
    return _encode(value, lambda text: {_FLOAT: text})


def encode_fields(value: object) -> dict[str, object]:
    """The JSON object of a dataclass instance: its fields by name. Raises TypeError for other values."""
    return _object_writer(value.__class__)(value, lambda text: {_FLOAT: text})  # type: ignore[arg-type] # a type has a hash


def encode_document(value: "DataclassInstance") -> dict[str, object]:
    """A dataclass instance as `encode` writes it, but NaN and infinities as 'nan', 'inf' and '-inf'."""
    return _object_writer(value.__class__)(value, str)


def _encode(value: Any, strange: Callable[[str], object]) -> Any:
    """The JSON value of a value. strange: maps the name of a non-finite float ('nan') to its JSON value."""
    return value if (kind := value.__class__) in _PLAIN else _writer(kind)(value, strange)


@cache
def _writer(kind: Any) -> Callable[[Any, Callable[[str], object]], Any]:
    """The function that encodes values of a class; cached per class, like `_reader`."""
    if issubclass(kind, str | int):
        return lambda value, _: value
    if issubclass(kind, float):
        return lambda value, marker: value if math.isfinite(value) else marker(str(value))
    if issubclass(kind, list | tuple):
        return lambda items, marker: [
            element if element.__class__ in _PLAIN else _writer(element.__class__)(element, marker) for element in items
        ]
    if issubclass(kind, datetime):
        return lambda value, _: stamp(value)
    if issubclass(kind, Mapping):
        return lambda value, marker: {name: _encode(element, marker) for name, element in value.items()}
    return (lambda value, _: str(value)) if issubclass(kind, Path) else _object_writer(kind)


@cache
def _object_writer(kind: Any) -> Callable[[Any, Callable[[str], object]], dict[str, object]]:
    """The function that encodes the fields of a class. Raises TypeError if it is no dataclass."""
    if hasattr(kind, "encode_json"):
        return lambda value, _: dict(value.encode_json())
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} cannot be written as JSON")
    layout = tuple((field.name, _key(field)) for field in dataclasses.fields(kind))
    return lambda value, marker: {
        key: field_value
        if (kind := (field_value := getattr(value, name)).__class__) in _PLAIN
        else _writer(kind)(field_value, marker)
        for name, key in layout
    }


def _key(field: "dataclasses.Field[object]") -> str:
    return field.name.removesuffix("_")


def parse_as(data: bytes, limit: int, kind: type[T]) -> T:
    """Decode a JSON object of at most `limit` bytes as a value of type `kind`. Raises Malformed like `parse_json` and
    `decode`."""
    return decode(parse_json(data, limit), kind, "")


def decode(data: object, kind: type[T], path: str | None = None) -> T:
    """Decode a value of type `kind` from the JSON that `encode` wrote; fields typed `object` or `Any` keep their JSON.

    path: where the data is in its document, for errors: '' for the whole document, None for the type's name. Raises
    Malformed with the wrong field's path, its value and the expected type; NewerFormatError.
    """
    try:
        value: T = _reader(kind)(data)  # type: ignore[arg-type] # a type has a hash
    except _Mismatch as error:
        root_name = getattr(kind, "__name__", describe(kind)) if path is None else path
        message = f"{root_name or 'document'}{error}".removeprefix("" if root_name else "document.").removeprefix(
            "document: "
        )
        raise (NewerFormatError if isinstance(error, _Newer) else Malformed)(message) from error
    return value


@cache
def _hints(what: object) -> Mapping[str, object]:
    return typing.get_type_hints(what, include_extras=True)


@cache
def _reader(kind: object) -> _Reader:
    """The function that decodes JSON as a value of this type. It is cached, because inspecting the type takes longer
    than decoding a small value."""
    origin, arguments = get_origin(kind), get_args(kind)
    if accepts := acceptor(kind):
        return lambda data: data if accepts(data) else _refuse(data, kind)
    if origin is tuple or (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return _tuple_reader(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin in (dict, Mapping):
        return _mapping_reader(*arguments)
    if origin in (list, Sequence):
        return _list_reader(arguments[0])
    if origin is Annotated:
        return _limited_reader(kind)
    if origin in UNIONS:
        return _union_reader(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    raise TypeError(f"the codec cannot read {kind}")


def _limited_reader(kind: object) -> _Reader:
    base_reader, predicates = _reader(get_args(kind)[0]), [rule for rule, _ in rules(kind)]

    def read_limited(data: object) -> object:
        value = base_reader(data)
        return value if all(rule(value) for rule in predicates) else _refuse(data, kind)

    return read_limited


def _read_float(data: object) -> float:
    if type(data) is float:
        return data
    number = float(data) if isinstance(data, str) and data in _NOT_JSON else _unmark(data)
    if isinstance(number, bool) or not isinstance(number, int | float):
        return _refuse(data, float)
    with suppress(OverflowError):
        return float(number)
    return _refuse("a huge number", float)


def _union_reader(kind: object) -> _Reader:
    """Decodes a union by its tag, or as the first type that fits. For `X | None`, errors are those of X."""
    kinds = [member for member in get_args(kind) if member is not NoneType]
    plain_kinds = {*_leading(kinds), *([NoneType] if len(kinds) < len(get_args(kind)) else [])}
    tag = _tag_of(kinds) if len(kinds) > 1 else None
    if tag or len(kinds) == 1:
        sole_reader = _tagged_reader(kinds, tag) if tag else _reader(kinds[0])
        return lambda data: data if type(data) in plain_kinds else sole_reader(data)
    readers = [_reader(member) for member in kinds]

    def read_first(data: object) -> object:
        if type(data) in plain_kinds:
            return data
        for reader in readers:
            with suppress(_Mismatch):
                return reader(data)
        return _refuse(data, kind)

    return read_first


def _leading(kinds: Iterable[object]) -> Iterator[object]:
    """The plain types at the start of a union, up to float, which would convert the values of later types."""
    for kind in kinds:
        if kind in (str, int, bool, float):
            yield kind
        if kind not in (str, int, bool):
            return


def _tag_of(kinds: Iterable[object]) -> str | None:
    """The `Literal` field that identifies each dataclass of a union; None if there is none."""
    classes = [member for member in kinds if not hasattr(member, "decode_json")]
    hints = [_hints(member) if dataclasses.is_dataclass(member) else {} for member in classes]  # type: ignore[arg-type]
    return next((name for name in hints[0] if all(get_origin(member.get(name)) is Literal for member in hints)), None)


def _tagged_reader(kinds: Sequence[Any], tag: str) -> _Reader:
    """Decodes an object by its tag. A class with `decode_json` and `encode_json`, which converts its own JSON, decodes
    objects with an unknown tag, or with other fields than the class of the tag."""
    custom_class: Any = next((kind for kind in kinds if hasattr(kind, "decode_json")), None)
    kinds_by_label = {
        label: kind for kind in kinds if kind is not custom_class for label in get_args(_hints(kind)[tag])
    }
    keys_by_label = {
        label: {_key(field) for field in dataclasses.fields(kind)} for label, kind in kinds_by_label.items()
    }

    def read_tagged(data: object) -> object:
        mapping = _as(dict, data, dict)
        if type(label := mapping.get(tag)) is not str:
            raise _Mismatch(f".{tag}{_say(label, str) if tag in mapping else ' is missing'}")
        if custom_class and mapping.keys() != keys_by_label.get(label):
            return custom_class.decode_json(mapping)
        if label not in kinds_by_label:
            raise _Mismatch(f".{tag}{_say(label, Literal[tuple(kinds_by_label)])}")
        return _reader(kinds_by_label[label])(mapping)

    return read_tagged


def _list_reader(element_kind: object) -> _Reader:
    accepts = (lambda data: type(data) is float) if element_kind is float else acceptor(element_kind)

    def read_list(data: object) -> list[Any]:
        elements = _as(list, data, list)
        if accepts and all(map(accepts, elements)):
            return list(elements)
        return _read_each(elements, [_reader(element_kind)] * len(elements))

    return read_list


def _read_each(values: Sequence[object], readers: Sequence[_Reader]) -> list[Any]:
    elements = list[Any]()
    try:
        for reader, value in zip(readers, values, strict=True):
            elements.append(reader(value))
    except _Mismatch as error:
        raise type(error)(f"[{len(elements)}]{error}") from error
    return elements


def _tuple_reader(kind: object) -> _Reader:
    kinds = get_args(kind) or tuple(_hints(kind).values())
    if kinds[-1] is ...:
        list_reader = _list_reader(kinds[0])
        return lambda data: tuple(list_reader(data))
    readers, constructor = [_reader(element_kind) for element_kind in kinds], getattr(kind, "_make", tuple)
    return lambda data: constructor(
        _read_each(data, readers) if type(data) is list and len(data) == len(readers) else _refuse(data, kind)
    )


def _mapping_reader(key: object, value_kind: object) -> _Reader:
    accepts_key, accepts_value = acceptor(key), acceptor(value_kind)

    def read_mapping(data: object) -> dict[str, Any]:
        mapping = _as(dict, data, dict)
        for name in mapping:
            if accepts_key and not accepts_key(name):
                raise _Mismatch(f" has the key {name!r:.80}; it must be {describe(key)}")
        if accepts_value and all(map(accepts_value, mapping.values())):
            return dict(mapping)
        decoded_map, reader = dict[str, Any](), _reader(value_kind)
        try:
            for name, value in mapping.items():
                decoded_map[name] = reader(value)
        except _Mismatch as error:
            raise type(error)(f".{name if name.isprintable() else ascii(name)!s:.80}{error}") from error
        return decoded_map

    return read_mapping


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How to decode an object as a dataclass. readers: by key: (field's name, the plain type that needs no conversion
    or None, reader).  formats: the newest format number by key.  needed: required keys.

    field_names: all keys; None if other keys are ignored.
    """

    readers: Mapping[str, tuple[str, object, _Reader]]
    formats: Mapping[str, int]
    needed: Sequence[str]
    field_names: Set[str] | None

    @classmethod
    def of(cls, kind: "type[DataclassInstance]") -> "_Plan":
        """The plan of a class. Its annotations must be resolvable."""
        fields_by_key = {_key(field): field for field in dataclasses.fields(kind)}
        hints = {key: _hints(kind)[field.name] for key, field in fields_by_key.items() if field.init}
        annotations = ((key, annotation) for key, hint in hints.items() for annotation in get_args(hint))
        formats = {key: annotation.newest for key, annotation in annotations if isinstance(annotation, Format)}
        no_default, is_complete = dataclasses.MISSING, issubclass(kind, Complete)
        needed_keys = [
            key
            for key in hints
            if is_complete or fields_by_key[key].default is fields_by_key[key].default_factory is no_default
        ]
        plain_kinds = {key: hint if hint in (str, int, bool, float) else None for key, hint in hints.items()}
        readers = {key: (fields_by_key[key].name, plain_kinds[key], _reader(hint)) for key, hint in hints.items()}
        return cls(
            readers, formats, [*formats, *needed_keys], None if issubclass(kind, Excerpt) else fields_by_key.keys()
        )

    def check(self, mapping: Mapping[str, object]) -> None:
        """Raise _Newer for a newer format, _Mismatch for an unknown or a missing key."""
        for key, newest_format in self.formats.items():
            if isinstance(format_number := mapping.get(key), int) and format_number > newest_format:
                raise _Newer(f".{key} {_TOO_NEW.format(format_number, newest_format)}")
        if self.field_names is not None and not mapping.keys() <= self.field_names:
            name = min(map(str, mapping.keys() - self.field_names))
            name_list = ", ".join(sorted(self.field_names))
            raise _Mismatch(
                f" has no field {name!r:.80}; known: {name_list:.400}; a newer enginesmith may have written it"
            )
        for key in self.needed:
            if key not in mapping:
                raise _Mismatch(f".{key} is missing")


def _dataclass_reader(kind: "type[DataclassInstance]") -> _Reader:
    constructor: Callable[..., Any] = kind
    plan: _Plan | None = None
    has_check = hasattr(kind, "check_fields")

    def read_fields(data: object) -> object:
        nonlocal plan
        plan = plan or _Plan.of(kind)  # not earlier: a class may contain its own type
        mapping, field_values, key, readers = _as(dict, data, dict), dict[str, object](), "", plan.readers
        if plan.formats or mapping.keys() != readers.keys():
            plan.check(mapping)
        try:
            for key, field_data in mapping.items():
                if field_reader := readers.get(key):
                    name, plain_kind, reader = field_reader
                    field_values[name] = field_data if type(field_data) is plain_kind else reader(field_data)
        except _Mismatch as error:
            raise type(error)(f".{key}{error}") from error
        try:
            value = constructor(**field_values)
            if has_check:
                value.check_fields()
        except (
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            EnginesmithError,
        ) as error:  # fields that do not fit
            raise _Mismatch(f": {error}") from error
        return value

    return read_fields


def _as(kind: type[T], data: object, expected_kind: object) -> T:
    """Return the data if its type is exactly `kind`: True is no int. Raises _Mismatch."""
    return data if isinstance(data, kind) and type(data) is kind else _refuse(data, expected_kind)


def _say(data: object, kind: object) -> str:
    return f" is {data!r:.80}; it must be {describe(kind)}"


def _refuse(data: object, kind: object) -> NoReturn:
    raise _Mismatch(_say(data, kind))


def _unmark(data: object) -> object:
    """The data, with {"float": "nan"} and the like replaced by floats."""
    if isinstance(data, list):
        return [_unmark(element) for element in data]
    if not isinstance(data, dict):
        return data
    if data.keys() != {_FLOAT}:
        return {name: _unmark(element) for name, element in data.items()}
    float_text = data.get(_FLOAT)
    return float(float_text) if float_text in _NOT_JSON else _refuse(data, float)


def _read_time(data: object) -> datetime:
    try:
        return read_stamp(_as(str, data, Timestamp))
    except ValueError:
        return _refuse(data, Timestamp)


_SIMPLE: Mapping[object, _Reader] = {
    object: _unmark,
    Any: _unmark,
    float: _read_float,
    Path: lambda data: Path(_as(str, data, str)),
    datetime: _read_time,
}
