"""What is written is read back, by type; what is of another type is refused with the field's name."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginery.core.codec import decode, decode_request, encode, encode_request, result_type
from enginery.core.errors import IntegrityError
from enginery.core.proof.report import Check
from enginery.core.types import BuildRequest, ShapeProfile, Target, TensorSpec
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
    anything: Any = None


OUTER = Outer(
    "x", 1, True, Path("/a/b"), Pair("n", 3), Inner((0.5,)), (("w", 1), ("f", 0.5), ("b", False)), {"k": Inner()}
)


def test_a_value_survives_json_with_its_types() -> None:
    read = decode(json.loads(json.dumps(encode(OUTER), allow_nan=False)), Outer)
    assert read == OUTER and isinstance(read.path, Path) and isinstance(read.pair, Pair)
    assert [type(value) for _, value in read.scalars] == [int, float, bool]


@given(st.lists(st.floats(), max_size=4).map(tuple))
def test_every_float_survives(values: tuple[float, ...]) -> None:
    read = decode(json.loads(json.dumps(encode(Inner(values)), allow_nan=False)), Inner).values
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(read, values, strict=True))


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
    ("change", "told"),
    [
        ({"text": 1}, "Outer.text is 1, which is no str"),
        ({"count": True}, "Outer.count is True, which is no int"),
        ({"count": 1.0}, "Outer.count is 1.0, which is no int"),
        ({"pair": ["n"]}, "Outer.pair is"),
        ({"inner": {"values": ["x"], "kind": "a"}}, r"Outer.inner.values\[0\] is 'x', which is no float"),
        ({"inner": {"values": [], "kind": "c"}}, "Outer.inner.kind is 'c'"),
        ({"by_name": {"k": {"more": 1}}}, "Outer.by_name.k has no field 'more'"),
        ({"scalars": [["w", None]]}, r"Outer.scalars\[0\]\[1\] is None"),
    ],
)
def test_another_type_is_refused_by_the_name_of_its_field(change: dict[str, Any], told: str) -> None:
    with pytest.raises(IntegrityError, match=told):
        decode({**encode(OUTER), **change}, Outer)


def test_a_missing_field_is_named() -> None:
    data = encode(OUTER)
    del data["text"]
    with pytest.raises(IntegrityError, match="'text'"):
        decode(data, Outer)
    assert decode({**encode(OUTER), "anything": {"a": [1]}}, Outer) == replace(OUTER, anything={"a": [1]})


def test_what_is_no_value_is_not_written() -> None:
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        encode(Inner((object(),)))  # type: ignore[arg-type]


def test_a_request_is_read_back_by_the_name_of_its_class() -> None:
    request = Call("tests.builders.jobs:add", {"a": 1})
    assert decode_request(json.loads(json.dumps(encode_request(request)))) == request
    assert result_type(request) is Any
