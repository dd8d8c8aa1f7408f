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
        return [item for item in self.fields.get(name, ()) if isinstance(item, ProtoMessage)]

    def numbers(self, name: str) -> tuple[int, ...]:
        """The values of a field that are numbers from 0 on."""
        return tuple(int(item) for item in self.fields.get(name, ()) if isinstance(item, str) and item.isdigit())


def write_message(fields: Mapping[str, Fields]) -> str:
    """A message as text, a field a line."""
    return "".join(f"{line}\n" for line in _lines(fields, ""))


def entries(values: Mapping[str, Field]) -> list[Field]:
    """The entries of a map field."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _lines(fields: Mapping[str, Fields], indent: str) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            plain = [item for item in value if not isinstance(item, Mapping)]
            if len(plain) == len(value):
                yield f"{indent}{name}: [{', '.join(map(_scalar, plain))}]"
                continue
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(item, f"{indent}  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(item)}"


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
    place, end = 0, len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None:
            if not re.sub(r"#[^\n]*", "", text[place:]).strip():
                break
            raise ValueError(f"line {text.count(chr(10), 0, place) + 1} cannot be read")
        tokens.append((match[1], text.count("\n", 0, match.start(1)) + 1))
        place = match.end()
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
    word, line = tokens.pop()
    if word in _CLOSING:
        return [_message(tokens, _CLOSING[word], depth + 1)]
    if word != "[":
        if word in "}>]:":
            raise ValueError(f"line {line}: a value is missing before {word!r}")
        return [word[1:-1] if word[0] in "\"'" else word]
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
