"""The chosen buckets in the file of a spec, of which every other character stays as it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from enginesmith.core.errors import InputError
from pipeline.spec.model import ModelSpec, load_spec

# What buckets take the place of.
_REPLACED = ("buckets", "max", "opt")


def write_buckets(path: Path, edges: Mapping[str, Sequence[int]]) -> None:
    """Set `dims.*.buckets` in a spec's file. edges: of each dim, rising.

    The file is replaced (atomic write) only when the changed text reads as meant. Raises InputError where it would not.
    """
    text = path.read_text(encoding="utf-8")
    for dim, sizes in edges.items():
        text = _with_buckets(text, dim, sizes, path)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.chmod(path.stat().st_mode & 0o777)
        if _rest(load_spec(fresh), {}) != _rest(load_spec(path), edges):
            raise _misplaced(path, edges)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _rest(spec: ModelSpec, edges: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """All that a spec says, with buckets of these edges."""
    found = spec.model_dump()
    for dim, sizes in edges.items():
        found["dims"][dim] |= {"opt": None, "max": None, "buckets": tuple(sizes)}
    return found


def _with_buckets(text: str, dim: str, sizes: Sequence[int], path: Path) -> str:
    """The text with the buckets in the place of the dim's `buckets`, else of its `max`; `opt` is taken out."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("dims", dim):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    if not isinstance(node, yaml.MappingNode):
        raise _misplaced(path, {dim: sizes})
    found = {key.value: (key, value) for key, value in node.value}
    placed = next((name for name in _REPLACED if name in found), None)
    if placed is None:
        raise _misplaced(path, {dim: sizes})
    changes = [(*_span(*found[placed]), f"buckets: [{', '.join(map(str, sizes))}]")]
    changes += [(*_removed(text, node, name), "") for name in _REPLACED if name in found and name != placed]
    for begin, end, fresh in sorted(changes, reverse=True):
        text = text[:begin] + fresh + text[end:]
    return text


def _span(key: yaml.Node, value: yaml.Node) -> tuple[int, int]:
    """Where a pair stands. For YAML a block sequence ends behind the comments that follow: its last item counts."""
    last = value.value[-1] if isinstance(value, yaml.SequenceNode) and not value.flow_style else value
    return key.start_mark.index, last.end_mark.index


def _removed(text: str, node: yaml.MappingNode, name: str) -> tuple[int, int]:
    """What is cut to take out a pair: of a flow mapping with a comma, of a block its lines."""
    index = next(index for index, (key, _) in enumerate(node.value) if key.value == name)
    begin, end = _span(*node.value[index])
    if node.flow_style:
        if index + 1 < len(node.value):
            return begin, node.value[index + 1][0].start_mark.index
        return _span(*node.value[index - 1])[1], end
    if index == 0:
        return begin, node.value[1][0].start_mark.index
    line = text.find("\n", end)
    return text.rfind("\n", 0, begin), len(text) if line < 0 else line


def _misplaced(path: Path, edges: Mapping[str, Sequence[int]]) -> InputError:
    lines = "; ".join(f"under dims.{dim}: buckets: [{', '.join(map(str, each))}]" for dim, each in edges.items())
    return InputError(f"{path}: the buckets cannot be placed without changing more; write {lines}")
