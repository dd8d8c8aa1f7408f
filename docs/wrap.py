"""Wraps the prose of Markdown files at 120 characters: `python -m docs.wrap [FILE ...]`, by default all tracked.

Only paragraphs with a longer line are touched; tables, code and headings never are. A file is written only if it
renders to the same HTML.
"""

import re
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

WIDTH = 120
# Prefixes of a paragraph's line: quotes, bullets, numbers.
_MARKERS = re.compile(r"(?:[ ]*(?:>|[-*+]|\d{1,9}[.)])[ ]+)*[ ]*")
# A word that Markdown reads as markup at the start of a line.
_BLOCK = re.compile(r"[-+*>]|\d{1,9}[.)]|#{1,6}|[=-]+|\|.*|:?-+:?|`{3,}.*|~{3,}.*|<.*|\[[^\]]*\]:.*")
# Code spans and link targets are never broken.
_SPAN = re.compile(r"`+[^`]*`+|\]\([^)]*\)")
_MARKDOWN = MarkdownIt("commonmark").enable("table")


def wrap(text: str) -> str:
    """The text, with each paragraph wrapped again that has a line over `WIDTH` characters and no hard line break."""
    lines = text.split("\n")
    for token in reversed(_MARKDOWN.parse(text)):
        if token.type == "paragraph_open" and token.map is not None:
            begin, end = token.map
            if any(len(line) > WIDTH for line in lines[begin:end]) and not _has_hard_breaks(lines[begin:end]):
                lines[begin:end] = _laid_out(lines[begin:end])
    return "\n".join(lines)


def long_lines(text: str) -> list[str]:
    """Lines over `WIDTH` characters that are prose: in paragraphs and headings, not in tables or code."""
    lines = text.split("\n")
    prose = (token.map for token in _MARKDOWN.parse(text) if token.type in ("paragraph_open", "heading_open"))
    return [line for span in prose if span for line in lines[slice(*span)] if len(line) > WIDTH]


def is_same(before: str, after: str) -> bool:
    """Whether two texts render alike, line ends within paragraphs aside."""
    return _rendered(before) == _rendered(after)


def _rendered(text: str) -> str:
    return " ".join(_MARKDOWN.render(text).split())


def _has_hard_breaks(lines: list[str]) -> bool:
    return any(line.endswith(("  ", "\\")) for line in lines[:-1])


def _laid_out(lines: list[str]) -> list[str]:
    first = _prefix(lines[0])
    rest = _prefix(lines[1]) if len(lines) > 1 else re.sub(r"[^> ]", " ", first)
    content = " ".join(
        [lines[0][len(first) :], *(line.lstrip("> ") if ">" in rest else line.strip() for line in lines[1:])]
    )
    kept = _SPAN.sub(lambda match: match[0].replace(" ", "\0"), content)
    found, prefix = [first], first
    for word in kept.split(" "):
        if found[-1] == prefix:
            found[-1] += word
        elif len(found[-1]) + 1 + len(word) <= WIDTH:
            found[-1] += " " + word
        else:
            prefix = rest
            found[-1], last = found[-1].rsplit(" ", 1) if _BLOCK.fullmatch(word) else (found[-1], "")
            found.append(f"{rest}{last} {word}" if last else rest + word)
    return [line.replace("\0", " ") for line in found]


def _prefix(line: str) -> str:
    match = _MARKERS.match(line)
    return match[0] if match else ""


def main(names: list[str]) -> int:
    """Wrap the files; return 1 if one would render differently (this file is not changed), else 0."""
    if not names:
        listed = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True).stdout  # noqa: S607
        names = listed.split("\n")[:-1]
    failed = False
    for path in map(Path, names):
        before = path.read_text(encoding="utf-8")
        after = wrap(before)
        if not is_same(before, after):
            print(f"{path}: left alone, it would render to other HTML", file=sys.stderr)
            failed = True
        elif after != before:
            path.write_text(after, encoding="utf-8")
            print(path)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
