"""Protobuf's text format: parses messages, and writes values as text. Standard library only.

It supports the part of the format (https://protobuf.dev/reference/protobuf/textformat-spec/) that Triton's
`config.pbtxt` uses. Serving nodes write such files, and do not depend on protobuf's own library; the tests parse the
files written here with that library.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_DEEPEST = 20
_TOKEN = re.compile(r'\s*(?:#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[A-Za-z0-9_.+\-/]+|[{}\[\]:,;<>])')
# A hexadecimal or an octal number, which is parsed to decimal text.
_OTHER_BASE = re.compile("0[xX]([0-9a-fA-F]+)|0([0-7]+)")
# A number of at least 1,000 characters, in any base; Python refuses numbers of more than 4,300 digits.
_LONG_NUMBER = re.compile(r"\d[\da-fA-FxX]{999,}")
_CLOSING = {"{": "}", "<": ">"}
# An escape: a byte in octal or hexadecimal, or a letter.
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_CONTROLS = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


class Word(str):
    """A value that is written without quotes: the name of an enum's member."""

    __slots__ = ()


Field = str | int | Mapping[str, "Fields"]
# A field's value, or the values of a repeated field; text and numbers are written in brackets on one line.
Fields = Field | Sequence[Field]


@dataclass
class ProtoMessage:
    """A message of the text format: each field's values, in order."""

    fields: dict[str, list["str | ProtoMessage"]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """The first value of a field; '' if there is none."""
        field_value = self.fields.get(name, [""])[0]
        return field_value if isinstance(field_value, str) else ""

    def message(self, name: str) -> "ProtoMessage":
        """The first message of a field; an empty one if there is none."""
        return next(iter(self.messages(name)), ProtoMessage())

    def messages(self, name: str) -> "list[ProtoMessage]":
        """The messages of a field."""
        return [value for value in self.fields.get(name, ()) if isinstance(value, ProtoMessage)]

    def numbers(self, name: str) -> tuple[int, ...]:
        """The values of a field that are numbers of at least 0."""
        texts = (value for value in self.fields.get(name, ()) if isinstance(value, str))
        return tuple(int(text) for text in texts if text.isdecimal() and len(text) < 100)


def write_message(fields: Mapping[str, Fields]) -> str:
    """A message as text, one field per line."""
    return "".join(f"{line}\n" for line in _lines(fields, ""))


def entries(values: Mapping[str, Field]) -> list[Field]:
    """The entries of a map field."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _lines(fields: Mapping[str, Fields], indent: str) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            scalars = [element for element in value if not isinstance(element, Mapping)]
            if len(scalars) == len(value):
                yield f"{indent}{name}: [{', '.join(map(_scalar, scalars))}]"
                continue
        for element in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(element, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(element, f"{indent}  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(element)}"


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | Word):
        return str(value)
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    return letter if letter.isprintable() else "".join(f"\\{byte:03o}" for byte in letter.encode())


def parse(text: str) -> ProtoMessage:
    """Parse protobuf's text format. Raises ValueError, with the line."""
    tokens: list[tuple[str, int]] = []
    offset, end = 0, len(text.rstrip())
    while offset < end:
        match = _TOKEN.match(text, offset)
        if match is None:
            if not re.sub(r"#[^\n]*", "", text[offset:]).strip():
                break
            raise ValueError(f"line {text.count(chr(10), 0, offset) + 1}: invalid token")
        tokens.append((match[1], text.count("\n", 0, match.start(1)) + 1))
        offset = match.end()
    tokens.reverse()
    return _message(tokens, "", 0)


def _message(tokens: list[tuple[str, int]], closing: str, depth: int) -> ProtoMessage:
    if depth > _DEEPEST:
        raise ValueError(f"messages are more than {_DEEPEST} deep")
    message = ProtoMessage()
    while tokens:
        name, line = tokens.pop()
        if name == closing:
            return message
        if name in ",;":
            continue
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"line {line}: {name[:40]!r} is not a field's name")
        if tokens and tokens[-1][0] == ":":
            tokens.pop()
        message.fields.setdefault(name, []).extend(_values(tokens, line, depth))
    if closing:
        raise ValueError(f"the text ends before {closing!r}")
    return message


def _values(tokens: list[tuple[str, int]], line: int, depth: int) -> list["str | ProtoMessage"]:
    if not tokens:
        raise ValueError(f"line {line}: a value is missing")
    lexeme, line = tokens.pop()
    if lexeme in _CLOSING:
        return [_message(tokens, _CLOSING[lexeme], depth + 1)]
    if lexeme != "[":
        if lexeme in "}>]:":
            raise ValueError(f"line {line}: a value is missing before {lexeme!r}")
        return [_scalar_text(lexeme, line)]
    values: list[str | ProtoMessage] = []
    while tokens and tokens[-1][0] != "]":
        if tokens[-1][0] == ",":
            tokens.pop()
            continue
        if tokens[-1][0] == "[":
            raise ValueError(f"line {line}: a list may not contain a list")
        values.extend(_values(tokens, line, depth))
    if not tokens:
        raise ValueError(f"line {line}: the list has no end")
    tokens.pop()
    return values


def _scalar_text(lexeme: str, line: int) -> str:
    """A number in decimal, or a quoted text without its quotes and with its escapes resolved."""
    if _LONG_NUMBER.fullmatch(lexeme):
        problem = f"{lexeme[:20]}... is a number of {len(lexeme)} characters; numbers have at most 64 bits"
        raise ValueError(f"line {line}: {problem}")
    if match := _OTHER_BASE.fullmatch(lexeme):
        return str(int(match[1], 16) if match[1] else int(match[2], 8))
    text = _ESCAPE.sub(_unescaped, lexeme[1:-1].encode()).decode(errors="replace") if lexeme[0] in "\"'" else lexeme
    if "\0" in text:
        raise ValueError(f"line {line}: {lexeme[:40]} has a NUL, which no name may contain")
    return text


def _unescaped(escape: re.Match[bytes]) -> bytes:
    octal, hexadecimal, letter = escape.groups()
    if letter:
        return bytes([_CONTROLS.get(letter[0], letter[0])])
    return bytes([int(octal, 8) & 255 if octal else int(hexadecimal, 16)])
