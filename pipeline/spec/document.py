"""Reads a YAML file that people write into a closed model. Every mistake becomes one line: where, which key, which
value, and what to do.

The YAML is composed before it is constructed, so that a mistake can be given its line and so that an alias bomb or a
recursive alias is refused before it is expanded.
"""

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from builders.errors import SpecError

LARGEST_BYTES = 1 << 20
_MOST_BRACKETS = 500
_LONGEST_LINE = 500
MOST_NODES = 100_000

Loc = tuple[int | str, ...]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Kind(Generic[M]):
    """A kind of file. name: 'a spec'.  keys: some that it holds, for people.  help: where an example of one is."""

    model: type[M]
    name: str
    keys: str
    help: str


def load_document(path: Path, kind: Kind[M]) -> tuple[M, yaml.Node]:
    """Read and check a file; the YAML's nodes beside it, for `line_of`. Raises SpecError with one line per mistake."""
    return parse_document(path, _read(path, kind), kind)


def parse_document(path: Path, text: str, kind: Kind[M]) -> tuple[M, yaml.Node]:
    """`load_document` of text that was read already; `path` is what mistakes call it."""
    root = _compose(path, text, kind)
    try:
        return kind.model.model_validate(_construct(path, root)), root
    except ValidationError as error:
        raise SpecError(_lines(path, root, error, kind)) from None


def _read(path: Path, kind: Kind[M]) -> str:
    try:
        if path.is_dir():
            raise SpecError([f"{path}: is a folder; name the file in it"])
        if path.stat().st_size > LARGEST_BYTES:
            raise SpecError([f"{path}: is larger than {LARGEST_BYTES} bytes; this is not {kind.name}"])
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError([f"{path}: no such file; {kind.help}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([f"{path}: cannot be read as UTF-8 text: {error}"]) from None


def _compose(path: Path, text: str, kind: Kind[M]) -> yaml.Node:
    try:
        root = _quickly_composed(text) or yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}" if mark else ""
        raise SpecError([f"{path}{where}: is not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError([f"{path}: is not YAML: {str(error).splitlines()[0]}"]) from None
    if not isinstance(root, yaml.MappingNode):
        found = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise SpecError([f"{path}: holds {found}; {kind.name} is a mapping of keys such as {kind.keys}"])
    if duplicates := list(_duplicate_keys(path, root)):
        raise SpecError(duplicates)
    return root


def _quickly_composed(text: str) -> yaml.Node | None:
    """What libyaml makes of an ordinary file, in a fraction of the time; None where PyYAML's own parser has to look.

    libyaml's composer recurses in C without a limit. Nesting takes brackets, or a line as long as it is deep.
    """
    brackets = text.count("[") + text.count("{")
    deep = brackets > _MOST_BRACKETS or any(len(line) > _LONGEST_LINE for line in text.splitlines())
    if deep or not yaml.__with_libyaml__:
        return None
    try:
        return yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return None


def _duplicate_keys(path: Path, root: yaml.Node) -> Iterator[str]:
    """Walk the tree as it would be expanded: report keys given twice, and stop at an alias bomb or a loop."""
    pending: list[tuple[yaml.Node, tuple[int, ...]]] = [(root, ())]
    seen = 0
    while pending:
        node, above = pending.pop()
        seen += 1
        if seen > MOST_NODES or id(node) in above:
            yield f"{path}:{node.start_mark.line + 1}: aliases expand to more than {MOST_NODES} values; write them out"
            return
        line = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += [(child, line) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for name in sorted({name for name in names if names.count(name) > 1 and name != "<<"}):
                yield f"{path}:{node.start_mark.line + 1}: key {name!r} is given twice; keep one"
            pending += [(child, line) for _, child in node.value]


def _construct(path: Path, root: yaml.Node) -> Any:
    try:
        return yaml.SafeLoader("").construct_document(root)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise SpecError(
            [f"{path}{where}: is not plain YAML: {problem}; use strings, numbers, lists and mappings"]
        ) from None


def _lines(path: Path, root: yaml.Node, error: ValidationError, kind: Kind[M]) -> list[str]:
    out = []
    found = error.errors(include_url=False)
    inside = {item["loc"][:depth] for item in found for depth in range(len(item["loc"]))}
    for item in found:
        if item["type"] == "too_short" and item["loc"] in inside:
            continue  # it only counts the items that are wrong
        loc = _without_union_tags(root, item["loc"])
        prefix = f"{path}:{line_of(root, loc)}: "
        key = ".".join(str(part) for part in loc)
        for sentence in _explain(item, loc, kind).splitlines():
            out.append(prefix + (f"{key}: {sentence}" if key else sentence))
    return list(dict.fromkeys(out))


def _without_union_tags(root: yaml.Node, loc: Loc) -> Loc:
    """Pydantic puts the union member it tried ('int', 'constrained-int', 'function-after[...]') into the path.

    A part that looks like one is left out unless the file has a key of that name there.
    """
    tags = ("int", "str", "float", "bool", "constrained-int", "constrained-str")
    node: yaml.Node | None = root
    out: list[int | str] = []
    for part in loc:
        found = _child(node, part) if node else None
        if found is None and isinstance(part, str) and (part in tags or "[" in part):
            continue
        node = found[1] if found else None
        out.append(part)
    return tuple(out)


def _explain(item: Mapping[str, Any], loc: Loc, kind: Kind[M]) -> str:
    mistake, context, value = item["type"], item.get("ctx", {}), item.get("input")
    if mistake == "extra_forbidden":
        return f"unknown key; {_suggestion(str(loc[-1]), _known_keys(kind.model, loc[:-1]))}"
    if mistake == "missing":
        return f"is missing; add it ({kind.help})"
    if mistake == "literal_error":
        known = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        return f"{_shown(value)} is not known; {_suggestion(str(value), known)}"
    if mistake == "value_error":
        message = str(context["error"])
        said = isinstance(value, (Mapping, BaseModel)) or _shown(value) in message
        return message if said else f"{_shown(value)}: {message}"
    return f"{_shown(value)}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _suggestion(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _known_keys(model: type[BaseModel], loc: Loc) -> list[str]:
    """The keys allowed at a place in the file, found by walking the types."""
    here: Any = model
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            if isinstance(part, int):
                continue  # the items of a list were stepped into with its field
            here = here.model_fields[str(part)].annotation
        else:
            here = typing.get_args(here)[-1]
        here = _strip_optional(here)
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def _strip_optional(annotation: Any) -> Any:
    members = [item for item in typing.get_args(annotation) if isinstance(item, type) and issubclass(item, BaseModel)]
    is_mapping = typing.get_origin(annotation) is dict
    return members[0] if members and not is_mapping else annotation


def line_of(root: yaml.Node, loc: Loc) -> int:
    """The line of the deepest part of `loc` that the file really has, counted from 1."""
    node, line = root, root.start_mark.line
    for part in loc:
        found = _child(node, part)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line
    return int(line) + 1


def _child(node: yaml.Node, part: int | str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == str(part)), None)
    return None
