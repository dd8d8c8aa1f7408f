"""Names of models, versions and channels, and references to them: `name`, `name@VERSION`, `name:CHANNEL`.

Names become parts of paths and URLs, so they are checked here: lower case (some file systems ignore case), no
separators, no control characters, no '..'. Relative paths in documents are checked here too.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import Annotated, Any

from annotated_types import Predicate, doc

from enginesmith.core.errors import InputError, UnknownNameError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
# Version names that a registry assigns. Names with more digits, such as a time in nanoseconds, come from users.
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_GRAPH_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
# The channel that commands move if the user names none.
STABLE = "stable"
# The environment variable with the path of the client's trust policy.
TRUST_VARIABLE = "ENGINESMITH_TRUST_POLICY"
_RULE = "1 to 63 of a-z 0-9 . _ -, starting with a letter or digit, no '..', no '.' at the end"


@dataclass(frozen=True)
class Reference:
    """A model, with a version or a channel or neither."""

    model: str
    version: str | None = None
    channel: str | None = None

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.model}@{self.version}"
        return self.model if self.channel is None else f"{self.model}:{self.channel}"


def is_name(text: str) -> bool:
    """Whether `text` is allowed as the name of a model, version or channel."""
    return _NAME.fullmatch(text) is not None and ".." not in text and not text.endswith(".")


def is_suffix(text: str) -> bool:
    """Whether `text` is a file suffix, such as '.engine'."""
    return text.startswith(".") and is_name(text[1:]) and len(text) <= 32


def is_graph_name(text: str) -> bool:
    """Whether `text` may name an ensemble's graph or function: without '.', the separator in 'GRAPH.OUTPUT'."""
    return _GRAPH_NAME.fullmatch(text) is not None


# Types of fields: a name that may become part of a path, and the name of an ensemble's graph or function.
Name = Annotated[str, Predicate(is_name), doc("a name (lower case, no separators)")]
NodeName = Annotated[str, Predicate(is_graph_name), doc("the name of a graph (1 to 32 of a-z 0-9 _ -)")]


def check_graph_name(name: str) -> str:
    """Return the name of a graph or a function of an ensemble if it is well-formed. Raises UnknownNameError."""
    if is_graph_name(name):
        return name
    raise UnknownNameError(f"name {name!r}: use 1 to 32 of a-z 0-9 _ -, starting with a letter or digit")


def check_model(name: str) -> str:
    """Return a model's name if it is well-formed. Raises UnknownNameError."""
    return _check("model", name)


def check_version(name: str) -> str:
    """Return a version's name if it is well-formed. Raises UnknownNameError."""
    return _check("version", name)


def check_channel(name: str) -> str:
    """Return a channel's name if it is well-formed. Raises UnknownNameError."""
    return _check("channel", name)


def parse_reference(text: str) -> Reference:
    """Parse `name`, `name@VERSION` or `name:CHANNEL`. Raises UnknownNameError for a malformed name, InputError if
    `text` is no string."""
    if not isinstance(text, str):
        raise InputError(f"reference {text!r}: give NAME, NAME@VERSION or NAME:CHANNEL")
    if "@" in text:
        model, _, version = text.partition("@")
        return Reference(check_model(model), version=check_version(version))
    if ":" in text:
        model, _, channel = text.partition(":")
        return Reference(check_model(model), channel=check_channel(channel))
    return Reference(check_model(text))


def parse_channel(text: str, default: str | None = None) -> tuple[str, str]:
    """Model and channel of `name:CHANNEL`; `name` alone means the default channel. Raises UnknownNameError."""
    reference = parse_reference(text)
    channel = default if reference.version is None and reference.channel is None else reference.channel
    if channel is None:
        raise UnknownNameError(
            f"{text!r} names no channel; give {reference.model}:CHANNEL, such as {reference.model}:{STABLE}"
        )
    return reference.model, channel


def channel_of(model: str, text: str) -> str:
    """The channel in `CHANNEL` or `name:CHANNEL`, where the name must equal `model`. Raises UnknownNameError."""
    name, separator, channel = text.rpartition(":")
    if separator and name != model:
        raise UnknownNameError(f"{text!r} is a channel of another model; give {model}:{channel}")
    return check_channel(channel)


def version_order(version: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key of versions in natural order: '2' before '10', '1.9' before '1.10', '1.0' before '1.0-rc'."""
    tokens = re.findall(r"[0-9]+|[^0-9]+", version)
    return tuple((0, int(token), "") if token.isdigit() else (1, 0, token) for token in tokens)


def number_of(version: str) -> int:
    """The number of a version whose name a registry assigned; 0 for other names."""
    return int(version) if _NUMBER.fullmatch(version) else 0


def _check(kind: str, name: str) -> str:
    if is_name(name):
        return name
    raise UnknownNameError(f"{kind} name {name!r}: use {_RULE}")


def inside(text: str) -> str:
    """A relative path without './' and '//'. Raises ValueError if the path names no file below its folder, or has a
    backslash or a control character."""
    path = PurePosixPath(text)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in text or not text.isprintable():
        raise ValueError("must be a relative path inside the spec's folder, without '..'")
    return str(path)


def is_path(text: str) -> bool:
    """Whether `text` is a relative path in the form that `inside` returns."""
    try:
        return inside(text) == text
    except ValueError:
        return False


# Types of fields: a file anywhere below the document's folder, and a file directly in it.
FilePath = Annotated[str, Predicate(is_path), doc("a relative path without '.' and '..'")]
FileName = Annotated[
    str, Predicate(is_path), Predicate(lambda text: "/" not in text), doc("the name of a file, without a folder")
]


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports public names on first use. homes: the module of each name."""

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        return getattr(import_module(homes[name]), name)

    return attribute
