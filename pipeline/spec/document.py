"""Reads a YAML file that people write into a pydantic model that knows all of its keys.

Every mistake becomes one line that says where it is, which key and value it is about, and what to do.
"""

import dataclasses
import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import yaml
from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from enginesmith.core.errors import SpecError
from enginesmith.core.text import suggest
from pipeline.spec.source import Loc, Mistakes, format_value

# Expected value, by pydantic's type of the mistake.
_KINDS = {
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type", "dataclass_type"), "a mapping of keys to values"
    ),
    "string_type": "text",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
}

# Constraint on a value of the right type, filled in from the mistake's context.
_BOUNDS = {
    "greater_than": "must be above {gt:.15g}",
    "greater_than_equal": "must be {ge:.15g} or more",
    "less_than": "must be below {lt:.15g}",
    "less_than_equal": "must be {le:.15g} or less",
    "too_short": "has {actual_length} items; it needs {min_length} or more",
    "too_long": "has {actual_length} items; it takes {max_length} at most",
    "string_too_short": "must have {min_length} characters or more",
    "string_pattern_mismatch": "must look like {pattern}",
}

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Kind(Generic[M]):
    """A kind of file. model: of its content.  name, keys, help: for messages: the name of the kind ('a spec'), some of
    its keys, and the place of an example."""

    model: type[M]
    name: str
    keys: str
    help: str


def mistake_lines(path: Path, root: yaml.Node, error: ValidationError, kind: Kind[M]) -> list[str]:
    """Pydantic's errors with the names in the file: one line per mistake, without duplicates."""
    mistakes = error.errors(include_url=False)
    outer_locs = {mistake["loc"][:depth] for mistake in mistakes for depth in range(len(mistake["loc"]))}
    kinds: dict[Loc, list[str]] = {}
    lines: dict[tuple[Loc, str], str] = {}
    for mistake in mistakes:
        kind_of_mistake = mistake["type"]
        if kind_of_mistake == "too_short" and mistake["loc"] in outer_locs:
            continue  # it only counts the items that are wrong
        if kind_of_mistake == "default_factory_not_called":
            continue  # it follows from the other mistakes, which say more
        loc, cause = _without_union_tags(root, mistake["loc"]), mistake.get("ctx", {}).get("error")
        sentences: Iterable[tuple[Loc, str, str]]
        if kind_of_mistake in _KINDS:  # each member of a union reports the value that it expects
            kinds.setdefault(loc, []).append(_KINDS[kind_of_mistake])
            sentences = [(loc, "", f"{format_value(mistake['input'])}: must be {_either(kinds[loc])}")]
        elif isinstance(cause, Mistakes):
            sentences = (((*loc, *inner_loc), sentence, sentence) for inner_loc, sentence in cause.mistakes)
        else:
            sentences = ((loc, sentence, sentence) for sentence in _explain(mistake, loc, kind).splitlines())
        key = ".".join(map(str, loc))
        for sentence_loc, dedupe_key, sentence in sentences:
            lines[sentence_loc, dedupe_key] = f"{path}:{line_of(root, sentence_loc)}: " + (
                f"{key}: {sentence}" if key else sentence
            )
    return list(dict.fromkeys(lines.values()))


def _either(kinds: Sequence[str]) -> str:
    """'text, a number, or true or false'."""
    names = [kind for kind in dict.fromkeys(kinds) if not (kind == "a whole number" and "a number" in kinds)]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + (", or " if len(names) > 2 else " or ") + names[-1]


def _without_union_tags(root: yaml.Node, loc: Loc) -> Loc:
    """A mistake's path without the union members that pydantic tried ('int', 'constrained-int', 'function-after[...]').

    A part that looks like a union member is kept if the file has a key of that name.
    """
    tags = ("int", "str", "float", "bool", "constrained-int", "constrained-str")
    node: yaml.Node | None = root
    keys: list[int | str] = []
    for key in loc:
        child_pair = _child(node, key) if node else None
        if child_pair is None and isinstance(key, str) and (key in tags or "[" in key):
            continue
        node = child_pair[1] if child_pair else None
        keys.append(key)
    return tuple(keys)


def _explain(error: ErrorDetails, loc: Loc, kind: Kind[M]) -> str:
    mistake, context, value = error["type"], error.get("ctx", {}), error["input"]
    if mistake in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key; {suggest(str(loc[-1]), _known_keys(kind.model, error['loc'][:-1]))}"
    if mistake == "missing":
        return f"is missing; add it ({kind.help})"
    if mistake == "literal_error":
        valid_words = [word.strip("'") for word in str(context.get("expected")).replace(" or ", ", ").split(", ")]
        return f"{format_value(value)} is not known; {suggest(str(value), valid_words)}"
    if mistake == "value_error":
        message = str(context.get("error"))
        names_value = isinstance(value, (Mapping, BaseModel)) or format_value(value) in message
        return message if names_value else f"{format_value(value)}: {message}"
    if mistake in _BOUNDS:
        return f"{format_value(value)}: {_BOUNDS[mistake].format(**context)}"
    return f"{format_value(value)}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _known_keys(model: type[BaseModel], loc: Loc) -> list[str]:
    """The keys allowed at a place in the file, found by walking the types."""
    part_type: object = model
    for key in loc:
        if tagged_type := _tagged(part_type, key):
            part_type = tagged_type
            continue
        if fields := _fields(part_type):
            if isinstance(key, int):
                continue  # the list's field already led to the type of its items
            extra_type = getattr(part_type, "__annotations__", {}).get("__pydantic_extra__")
            part_type = fields[str(key)] if str(key) in fields else typing.get_args(extra_type)[-1]
        else:
            part_type = typing.get_args(part_type)[0 if isinstance(key, int) else -1]
        members = [member for member in typing.get_args(part_type) if _fields(member)]
        if members and typing.get_origin(part_type) not in (dict, Mapping):
            part_type = members[0]  # of `Part | None`
    return list(_fields(part_type))


def _fields(kind: object) -> Mapping[str, object]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field_info.annotation for name, field_info in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {kind_field.name: hints[kind_field.name] for kind_field in dataclasses.fields(kind)}
    return {}


def _tagged(part_type: object, tag: int | str) -> object:
    """The member of a union, also of nested ones, that has a tag; None if there is none."""
    for member in typing.get_args(part_type):
        if any(
            isinstance(annotation, Tag) and annotation.tag == tag for annotation in getattr(member, "__metadata__", ())
        ):
            return member.__origin__
        if model_type := _tagged(member, tag):
            return model_type
    return None


def line_of(root: yaml.Node, loc: Loc) -> int:
    """The line of the deepest part of `loc` that the file really has, counted from 1."""
    node, line = root, root.start_mark.line
    for loc_key in loc:
        child_pair = _child(node, loc_key)
        if child_pair is None:
            break
        key, node = child_pair
        line = key.start_mark.line
    return int(line) + 1


def locate(path: Path, root: yaml.Node, mistakes: Iterable[tuple[Loc, str]]) -> list[str]:
    """'FILE:LINE: KEY: MESSAGE' for each different mistake. mistakes: (key, message)."""
    return [f"{path}:{line_of(root, loc)}: {'.'.join(map(str, loc))}: {text}" for loc, text in dict.fromkeys(mistakes)]


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == str(part)), None)
    return None


# The YAML is first composed into nodes, which know their lines and are not yet expanded: an alias that would expand to
# millions of values, or that contains itself, is refused at that stage.

# Limits of a text that a person writes; other files are refused before they are parsed.
LARGEST_BYTES = 1 << 20
_MOST_BRACKETS = 500
_LONGEST_LINE = 500
MOST_NODES = 100_000
# Characters that no text has: all control characters except tabs and line ends.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
# Half of a character, as the escape "\ud800" writes it; UTF-8 has no halves.
_SURROGATE = re.compile("[\ud800-\udfff]")

# The key that only specs of ensembles have, found without parsing.
_GRAPHS = re.compile(rb"^[\"']?graphs[\"']?[ \t]*:", re.MULTILINE)


def is_ensemble(path: Path) -> bool:
    """Whether a file is the spec of an ensemble: it has the top-level key `graphs`, in block style."""
    try:
        with path.open("rb") as stream:
            return _GRAPHS.search(stream.read(LARGEST_BYTES)) is not None
    except OSError:
        return False


def load_document(path: Path, kind: Kind[M]) -> tuple[M, yaml.Node]:
    """Read and check a file: its content, and its YAML nodes for `line_of`. Raises SpecError, a line per mistake."""
    return parse_document(path, _read(path, kind), kind)


def parse_document(path: Path, text: str, kind: Kind[M]) -> tuple[M, yaml.Node]:
    """`load_document` for a text; `path` is the text's name in messages. Raises SpecError, a line per mistake."""
    root = _compose(path, text, kind)
    try:
        return kind.model.model_validate(_construct(path, root)), root
    except ValidationError as error:
        raise SpecError(mistake_lines(path, root, error, kind)) from None


def _read(path: Path, kind: Kind[M]) -> str:
    try:
        if path.is_dir():
            raise SpecError([f"{path}: is a folder; name the file in it"])
        if path.stat().st_size > LARGEST_BYTES:
            raise SpecError([f"{path}: is larger than {LARGEST_BYTES} bytes, so it is not {kind.name}; {kind.help}"])
        data = path.read_bytes()
    except FileNotFoundError:
        raise SpecError([f"{path}: no such file; {kind.help}"]) from None
    except OSError as error:
        raise SpecError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    if _CONTROL.search(data):
        raise SpecError([f"{path}: is a binary file, and {kind.name} is YAML text; {kind.help}"])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(
            [f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"]
        ) from None


def _compose(path: Path, text: str, kind: Kind[M]) -> yaml.Node:
    try:
        root = _quickly_composed(text) or yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line_text = f":{mark.line + 1}" if mark else ""
        raise SpecError([f"{path}{line_text}: is not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError([f"{path}: is not YAML: {str(error).splitlines()[0]}"]) from None
    if not isinstance(root, yaml.MappingNode):
        root_text = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise SpecError([f"{path}: holds {root_text}; {kind.name} is a mapping of keys such as {kind.keys}"])
    if duplicates := list(_duplicate_keys(path, root)):
        raise SpecError(duplicates)
    return root


def _quickly_composed(text: str) -> yaml.Node | None:
    """A file's nodes from libyaml, which is several times faster; None if PyYAML's own parser is needed.

    libyaml's composer recurses in C without a limit, so a text that may be nested deeply is left to PyYAML: nesting
    takes many brackets, or a line as long as it is deep.
    """
    brackets = text.count("[") + text.count("{")
    is_deep = brackets > _MOST_BRACKETS or any(len(line) > _LONGEST_LINE for line in text.splitlines())
    if is_deep or not yaml.__with_libyaml__:
        return None
    try:
        return yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return None


def _duplicate_keys(path: Path, root: yaml.Node) -> Iterator[str]:
    """A message for each duplicate key, and for text that UTF-8 cannot encode. Follows aliases, and stops at
    `MOST_NODES` nodes or at a cycle."""
    pending_nodes: list[tuple[yaml.Node, tuple[int, ...]]] = [(root, ())]
    node_count = 0
    while pending_nodes:
        node, ancestor_ids = pending_nodes.pop()
        node_count += 1
        if node_count > MOST_NODES or id(node) in ancestor_ids:
            yield f"{path}:{node.start_mark.line + 1}: aliases expand to more than {MOST_NODES} values; write them out"
            return
        path_ids = (*ancestor_ids, id(node))
        if isinstance(node, yaml.ScalarNode) and (match := _SURROGATE.search(node.value)):
            yield f"{path}:{node.start_mark.line + 1}: {match[0]!r} is half of a character; write the whole character"
        elif isinstance(node, yaml.SequenceNode):
            pending_nodes += [(child, path_ids) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            key_nodes = {key.value: key for key in keys}
            key_counts = Counter(key.value for key in keys) if len(key_nodes) < len(keys) else {}
            for name in sorted(name for name, count in key_counts.items() if count > 1):
                yield f"{path}:{key_nodes[name].start_mark.line + 1}: key {name!r} is given twice; keep one"
            pending_nodes += [(child, path_ids) for pair in node.value for child in pair]


def _construct(path: Path, root: yaml.Node) -> object:
    try:
        return yaml.SafeLoader("").construct_document(root)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        line_text = f":{mark.line + 1}" if mark else ""
        raise SpecError(
            [f"{path}{line_text}: is not plain YAML: {problem}; use strings, numbers, lists and mappings"]
        ) from None
