"""Protobuf's text format: a text read into messages, and values written as text. Standard library only.

Of the format (https://protobuf.dev/reference/protobuf/textformat-spec/) this is what Triton's `config.pbtxt` has.
Serving nodes write such files, and protobuf's own library is no dependency of theirs; the tests read what is written
here with it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_DEEPEST = 20
_TOKEN = re.compile(r'\s*(?:#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[A-Za-z0-9_.+\-/]+|[{}\[\]:,;<>])')
# A hexadecimal number, or an octal one, which is read as the decimal one.
_OTHER_BASE = re.compile("0[xX]([0-9a-fA-F]+)|0([0-7]+)")
# A number in any base, far above what 64 bits hold; Python reads no 4,300 digits.
_LONG_NUMBER = re.compile(r"\d[\da-fA-FxX]{999,}")
_CLOSING = {"{": "}", "<": ">"}


class Word(str):
    """A value that is written without quotes: the name of an enum's member."""

    __slots__ = ()


Field = str | int | Mapping[str, "Fields"]
# A field's value, or the values of a repeated field; text and numbers of these come in brackets on one line.
Fields = Field | Sequence[Field]


@dataclass
class ProtoMessage:
    """A message of the text format: each field's values, in order."""

    fields: dict[str, list["str | ProtoMessage"]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """The first value of a field; '' without any."""
        field_value = self.fields.get(name, [""])[0]
        return field_value if isinstance(field_value, str) else ""

    def message(self, name: str) -> "ProtoMessage":
        """The first message of a field; an empty one without any."""
        return next(iter(self.messages(name)), ProtoMessage())

    def messages(self, name: str) -> "list[ProtoMessage]":
        """The messages of a field."""
        return [value for value in self.fields.get(name, ()) if isinstance(value, ProtoMessage)]

    def numbers(self, name: str) -> tuple[int, ...]:
        """The values of a field that are numbers from 0 on."""
        texts = (value for value in self.fields.get(name, ()) if isinstance(value, str))
        return tuple(int(text) for text in texts if text.isdecimal() and len(text) < 100)


def write_message(fields: Mapping[str, Fields]) -> str:
    """A message as text, a field a line."""
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
    """Read protobuf's text format. Raises ValueError, with the line."""
    tokens: list[tuple[str, int]] = []
    offset, end = 0, len(text.rstrip())
    while offset < end:
        match = _TOKEN.match(text, offset)
        if match is None:
            if not re.sub(r"#[^\n]*", "", text[offset:]).strip():
                break
            raise ValueError(f"line {text.count(chr(10), 0, offset) + 1} cannot be read")
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
            raise ValueError(f"line {line}: {name[:40]!r} is no field's name")
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
            raise ValueError(f"line {line}: a list in a list")
        values.extend(_values(tokens, line, depth))
    if not tokens:
        raise ValueError(f"line {line}: the list has no end")
    tokens.pop()
    return values


def _scalar_text(lexeme: str, line: int) -> str:
    """A number in decimal, and what stands in quotes without them."""
    if _LONG_NUMBER.fullmatch(lexeme):
        problem = f"{lexeme[:20]}... is a number of {len(lexeme)} characters; the format has none of over 64 bits"
        raise ValueError(f"line {line}: {problem}")
    if match := _OTHER_BASE.fullmatch(lexeme):
        return str(int(match[1], 16) if match[1] else int(match[2], 8))
    return lexeme[1:-1] if lexeme[0] in "\"'" else lexeme
