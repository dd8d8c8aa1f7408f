"""Reads a YAML file that people write into a pydantic model that knows all of its keys.

Every mistake becomes one line that says where it is, which key and value it is about, and what to do. The YAML is
first composed into nodes, which know their lines and are not yet expanded: an alias that would expand to millions of
values, or that contains itself, is refused at that stage.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from enginesmith.core.errors import SpecError
from pipeline.spec.mistakes import Kind, M, mistake_lines

LARGEST_BYTES = 1 << 20
_MOST_BRACKETS = 500
_LONGEST_LINE = 500
MOST_NODES = 100_000
# What no text has: all control characters but tabs and ends of lines.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")

# The key that specs of ensembles alone have, as far as a look shows.
_GRAPHS = re.compile(rb"^[\"']?graphs[\"']?[ \t]*:", re.MULTILINE)


def is_ensemble(path: Path) -> bool:
    """Whether a file has the key `graphs` at its top, in block style: it is to be read as the spec of an ensemble."""
    try:
        with path.open("rb") as stream:
            return _GRAPHS.search(stream.read(LARGEST_BYTES)) is not None
    except OSError:
        return False


def load_document(path: Path, kind: Kind[M]) -> tuple[M, yaml.Node]:
    """Read and check a file: its content, and its YAML nodes for `line_of`. Raises SpecError, a line per mistake."""
    return parse_document(path, _read(path, kind), kind)


def parse_document(path: Path, text: str, kind: Kind[M]) -> tuple[M, yaml.Node]:
    """`load_document` of text that was read already; `path` is what messages call it."""
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
    """An ordinary file's nodes from libyaml, several times faster; None where PyYAML's own parser has to read it.

    libyaml's composer recurses in C without a limit, so a text that may be nested deeply is left to PyYAML: nesting
    takes many brackets, or a line as long as it is deep.
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
    """A message for each key given twice; walks the tree as its aliases expand, and stops at `MOST_NODES` or a loop."""
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
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            last = {key.value: key for key in keys}
            twins = Counter(key.value for key in keys) if len(last) < len(keys) else {}
            for name in sorted(name for name, count in twins.items() if count > 1):
                yield f"{path}:{last[name].start_mark.line + 1}: key {name!r} is given twice; keep one"
            pending += [(child, line) for _, child in node.value]


def _construct(path: Path, root: yaml.Node) -> object:
    try:
        return yaml.SafeLoader("").construct_document(root)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise SpecError(
            [f"{path}{where}: is not plain YAML: {problem}; use strings, numbers, lists and mappings"]
        ) from None
