"""The table of values in the chart's README, from the `# --` comments of values.yaml."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

BEGIN, END = "<!-- values: made by `make chart` -->", "<!-- end of values -->"


@dataclass(frozen=True)
class Documented:
    """One value: its path ('ray.head.resources'), its description, and its default as JSON or in words."""

    path: str
    text: str
    default: str


def documented(source: str) -> list[Documented]:
    """Every value with a `# --` comment, in order. Raises ValueError for one without, unless `_is_leaf` covers it."""
    lines = source.splitlines()
    root = yaml.compose(source)
    assert isinstance(root, yaml.MappingNode)
    return list(_walk(root, lines, ()))


def _walk(node: yaml.MappingNode, lines: list[str], path: tuple[str, ...]) -> Iterator[Documented]:
    for key, value in node.value:
        here = (*path, key.value)
        text, default = _comment(lines, key.start_mark.line)
        if text:
            text_value = json.dumps(yaml.safe_load(yaml.serialize(value)), ensure_ascii=False)
            yield Documented(".".join(here), text, default or f"`{text_value}`")
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _walk(value, lines, here) if not _is_leaf(text, value) else ()
        elif not text:
            raise ValueError(f"values.yaml:{key.start_mark.line + 1}: {'.'.join(here)} has no `# --` comment")


def _is_leaf(text: str, value: yaml.MappingNode) -> bool:
    """Whether a mapping is one value: it has a comment of its own, and no keys but requests and limits."""
    names = {key.value for key, _ in value.value}
    return bool(text) and names <= {"requests", "limits"}


def _comment(lines: list[str], at: int) -> tuple[str, str]:
    """The comment above a line, from its last `# --` on, and the text after `# @default --`."""
    above: list[str] = []
    while at > 0 and lines[at - 1].lstrip().startswith("#"):
        at -= 1
        above.insert(0, lines[at].lstrip().removeprefix("#").strip())
    starts = [index for index, line in enumerate(above) if line.startswith("-- ")]
    if not starts:
        return "", ""
    words, default = [], ""
    for line in above[starts[-1] :]:
        if line.startswith("@default -- "):
            default = line.removeprefix("@default -- ")
        else:
            words.append(line.removeprefix("-- "))
    return " ".join(words), default


def table(values: list[Documented]) -> str:
    """The values as a Markdown table."""
    rows = [f"| `{item.path}` | {item.default} | {item.text} |".replace("||", "| |") for item in values]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows])


def with_table(readme: str, values: str) -> str:
    """A README with the table between its markers. Raises ValueError if the markers are missing."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(readme):
        raise ValueError(f"the README has no {BEGIN} ... {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{table(documented(values))}\n{END}", readme)
