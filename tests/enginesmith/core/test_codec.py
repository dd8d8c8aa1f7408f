import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from annotated_types import Interval, Len, MultipleOf
from hypothesis import given
from hypothesis import strategies as st

from builders.execution.jobs import decode_request, encode_request, result_type
from enginesmith.core.codec import Excerpt, NewerFormatError, decode, encode, encode_document, parse_as
from enginesmith.core.errors import Digest, IntegrityError, canonical_json
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
from enginesmith.core.reports.proof import Check
from enginesmith.core.requirements import Count, Format, JsonObject
from enginesmith.core.types import BuildRequest, ShapeProfile, Target, TensorSpec
from pipeline.values import Proof, Searched
from tests.calls import Call


class Pair(NamedTuple):
    name: str
    size: int


@dataclass(frozen=True)
class Inner:
    values: tuple[float, ...] = ()
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    text: str
    count: int
    flag: bool
    path: Path
    pair: Pair
    inner: Inner | None
    scalars: tuple[tuple[str, str | int | float | bool], ...]
    by_name: Mapping[str, Inner]
    anything: object = None


OUTER = Outer(
    "x", 1, True, Path("/a/b"), Pair("n", 3), Inner((0.5,)), (("w", 1), ("f", 0.5), ("b", False)), {"k": Inner()}
)


def test_a_value_survives_json_with_its_types() -> None:
    decoded_value = decode(json.loads(json.dumps(encode(OUTER), allow_nan=False)), Outer)
    assert decoded_value == OUTER and isinstance(decoded_value.path, Path) and isinstance(decoded_value.pair, Pair)
    assert [type(value) for _, value in decoded_value.scalars] == [int, float, bool]
    assert decode({**encode(OUTER), "anything": {"a": [1]}}, Outer) == replace(OUTER, anything={"a": [1]})


@given(st.lists(st.floats(), max_size=4).map(tuple))
def test_every_float_survives(values: tuple[float, ...]) -> None:
    loaded_values = decode(json.loads(json.dumps(encode(Inner(values)), allow_nan=False)), Inner).values
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(loaded_values, values, strict=True))


def test_the_values_of_the_pipeline_survive() -> None:
    profile = ShapeProfile((("x", (1, 3), (2, 3), (4, 3)),))
    tensors = (TensorSpec("x", "float32", ("batch", 3)),)
    request = BuildRequest("a" * 64, "int8", Target("sm_89", (8, 9)), "t", tensors, tensors, (profile,), (("w", 1),))
    proof = Proof((Check("engine", "sqnr_db", "y", "golden", math.inf, math.nan, False),), (("accuracy", 0.5),))
    for value in (request, Searched("uint8", 64)):
        assert decode(json.loads(json.dumps(encode(value))), type(value)) == value
    assert repr(decode(json.loads(json.dumps(encode(proof))), Proof)) == repr(proof)
    assert decode(encode(request), BuildRequest).key == request.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": 1}, "Outer.text is 1; it must be a string"),
        ({"count": True}, "Outer.count is True; it must be a whole number"),
        ({"count": 1.0}, "Outer.count is 1.0; it must be a whole number"),
        ({"pair": ["n"]}, "Outer.pair is"),
        ({"inner": {"values": ["x"], "kind": "a"}}, r"Outer.inner.values\[0\] is 'x'; it must be a number"),
        ({"inner": {"values": [], "kind": "c"}}, "Outer.inner.kind is 'c'"),
        ({"by_name": {"k": {"more": 1}}}, "Outer.by_name.k has no field 'more'"),
        ({"scalars": [["w", None]]}, r"Outer.scalars\[0\]\[1\] is None"),
        ({"inner": {"values": [{"float": "x"}]}}, "is {'float': 'x'}; it must be a number"),
        ({"inner": {"values": [10**400]}}, "is 'a huge number'; it must be a number"),
        ({"anything": {"float": []}}, "Outer.anything is {'float': .*; it must be a number"),
    ],
)
def test_another_type_is_refused_by_the_name_of_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        decode({**encode(OUTER), **change}, Outer)


def test_unsupported_values_are_not_written() -> None:
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        encode(Inner((object(),)))  # type: ignore[arg-type]


def test_a_request_is_read_back_by_the_name_of_its_class() -> None:
    request = Call("tests.builders.jobs:add", {"a": 1})
    assert decode_request(json.loads(json.dumps(encode_request(request)))) == request
    assert result_type(request) is Any


@dataclass(frozen=True)
class Area:
    width: float
    height: float
    area: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise ValueError("width must be over 0")
        object.__setattr__(self, "area", self.width * self.height)


def test_derived_fields_are_written_and_computed_again() -> None:
    assert encode(Area(2.0, 3.0)) == {"width": 2.0, "height": 3.0, "area": 6.0}
    assert decode({"width": 2.0, "height": 3.0, "area": "anything"}, Area).area == 6.0


@pytest.mark.parametrize("width", [10**400, {"float": []}, {"float": "1e3"}, -1], ids=["huge", "list", "text", "low"])
def test_a_number_beyond_its_type_is_refused(width: object) -> None:
    with pytest.raises(IntegrityError, match="width"):
        decode({"width": width, "height": 3.0}, Area)


@dataclass(frozen=True)
class Origin:
    from_: str
    values: tuple[float | None, ...]


def test_a_document_for_people_has_infinities_as_words_and_keywords_unchanged() -> None:
    origin = Origin("a", (1.5, math.inf, None))
    assert encode_document(origin) == {"from": "a", "values": [1.5, "inf", None]}
    assert decode(encode_document(origin), Origin) == decode(encode(origin), Origin) == origin
    with pytest.raises(IntegrityError, match=r"Origin\.values\[0\]"):
        decode({"from": "a", "values": ["Infinity"]}, Origin)


@dataclass(frozen=True)
class Disk:
    size: Count
    kind: Literal["disk"] = "disk"


@dataclass(frozen=True)
class Gauge:
    share: Annotated[float, Interval(ge=0, lt=1)]
    kind: Literal["gauge"] = "gauge"


@dataclass(frozen=True)
class Rest:
    """What no other class knows, as it was written."""

    text: str

    def encode_json(self) -> dict[str, object]:
        return dict(json.loads(self.text))

    @classmethod
    def decode_json(cls, data: Mapping[str, object]) -> "Rest":
        return cls(json.dumps(data))


@dataclass(frozen=True)
class Document:
    blob: Digest
    names: Mapping[Name, Annotated[tuple[Count, ...], Len(1, 2)]] = field(default_factory=dict)
    parts: tuple[Disk | Gauge, ...] = ()
    held: tuple[Disk | Gauge | Rest, ...] = ()
    free: JsonObject = field(default_factory=dict)
    format: Annotated[int, Format(3)] = 3

    def check_fields(self) -> None:
        if self.names.keys() & self.free.keys():
            raise ValueError("a name is free and is not")


BLOB = {"format": 3, "blob": "a" * 64}


def test_limits_tags_and_free_parts_survive() -> None:
    values = (Disk(1), Rest('{"kind": "gauge", "share": 0.5, "more": 1}'), Rest('{"kind": "tape"}'))
    value = Document("a" * 64, {"a": (1,)}, (Disk(0), Gauge(0.5)), values, {"x": {"float": "nan"}, "y": [None]})
    assert decode(json.loads(json.dumps(encode(value))), Document) == value
    assert parse_as(canonical_json(BLOB), 200, Document) == Document("a" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blob": "../x"}, r"^blob is '../x'; it must be a SHA-256 in hexadecimal$"),
        ({"blob": 1}, "^blob is 1; it must be a SHA-256 in hexadecimal$"),
        ({"names": {"../x": [1]}}, r"^names has the key '../x'; it must be a name"),
        ({"names": {"a": [True]}}, r"^names.a\[0\] is True; it must be a whole number from 0 to 9"),
        ({"names": {"a": [1 << 63]}}, r"^names.a\[0\] is 9223372036854775808; it must be a whole number from 0 to 9"),
        ({"names": {"a": []}}, "^names.a is .*; it must be a list, of at least 1, of at most 2$"),
        ({"parts": [{"kind": "tape"}]}, r"^parts\[0\].kind is 'tape'; it must be one of disk, gauge$"),
        ({"parts": [{"size": 1}]}, r"^parts\[0\].kind is missing$"),
        ({"parts": [{"kind": []}]}, r"^parts\[0\].kind is \[\]; it must be a string$"),
        ({"parts": [{"kind": "gauge", "share": 1}]}, r"^parts\[0\].share is 1; .* at least 0, below 1$"),
        ({"parts": [{"kind": "gauge", "share": "nan"}]}, r"^parts\[0\].share is 'nan'"),
        ({"held": [1]}, r"^held\[0\] is 1; it must be an object$"),
        ({"names": {"x": [1]}, "free": {"x": 1}}, "^a name is free and is not$"),
        ({"free": []}, r"^free is \[\]; it must be an object$"),
        ({"more": 1}, "^document has no field 'more'; known: blob, format, free, held, names, parts; a newer"),
        ({"format": 2}, "^format is 2; it must be a whole number, equal to 3$"),
        ({"format": True}, "^format is True"),
    ],
)
def test_an_invalid_field_is_named_with_its_path_and_the_expected_type(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Malformed, match=message):
        parse_as(canonical_json({**BLOB, **change}), 1000, Document)


def test_a_newer_format_is_reported_before_unknown_fields() -> None:
    with pytest.raises(NewerFormatError, match=r"^format is 4; this enginesmith reads 3: upgrade enginesmith$"):
        decode({"format": 4, "lump": 1}, Document, "")
    with pytest.raises(Malformed, match=r"^format is missing$"):
        decode({"blob": "a" * 64}, Document, "")


@dataclass(frozen=True)
class Head(Excerpt):
    blob: Digest


def test_an_excerpt_reads_only_its_fields() -> None:
    assert decode({**BLOB, "more": [1]}, Head) == Head("a" * 64)
    with pytest.raises(Malformed, match=r"^head.blob is missing$"):
        decode({"more": 1}, Head, "head")


def test_an_unknown_constraint_is_a_bug() -> None:
    with pytest.raises(TypeError, match="no constraint MultipleOf"):
        decode(4, Annotated[int, MultipleOf(2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot read"):
        decode(4, complex)
