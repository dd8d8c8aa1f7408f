"""Reads single fields of a protobuf file without parsing all of it; other parts of a mapped file are never read.
Field numbers of ONNX: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A field of a message: its number, and its value if that is a number. begin, end: the place of its bytes, if it
    has a length."""

    number: int
    value: int
    begin: int
    end: int


def inner_fields(data: mmap.mmap | bytes, message: Field, number: int) -> Iterator[Field]:
    """The fields of that number in the message that a field holds. Raises ValueError as `fields`."""
    return (field for field in fields(data, message.begin, message.end) if field.number == number)


def inner_text(data: mmap.mmap | bytes, message: Field, number: int) -> str:
    """The first text of that number in the message that a field holds; '' without one. Raises ValueError."""
    return next((decode(data, field) for field in inner_fields(data, message, number)), "")


def decode(data: mmap.mmap | bytes, field: Field) -> str:
    """The text of a field. Raises ValueError if it is not UTF-8."""
    return bytes(data[field.begin : field.end]).decode()


def fields(data: mmap.mmap | bytes, place: int, end: int) -> Iterator[Field]:
    """The fields of the message in these bytes (https://protobuf.dev/programming-guides/encoding). Raises ValueError
    for a field with another form, or one that extends beyond the message."""
    while place < end:
        tag, place = _varint(data, place, end)
        value, payload_start = 0, place
        match tag & 7:
            case 0:
                value, place = _varint(data, place, end)
            case 1:
                place += 8
            case 2:
                length, payload_start = _varint(data, place, end)
                place = payload_start + length
            case 5:
                place += 4
            case _:
                raise ValueError(f"protobuf wire type {tag & 7}, which ONNX does not use")
        if tag < 8:
            raise ValueError("a protobuf field has the number 0")
        if place > end:
            raise ValueError("a protobuf field extends beyond its message")
        yield Field(tag >> 3, value, payload_start, place)


def _varint(data: mmap.mmap | bytes, place: int, end: int) -> tuple[int, int]:
    """A number of at most 64 bits, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a protobuf number is cut off or has more than 10 bytes")
