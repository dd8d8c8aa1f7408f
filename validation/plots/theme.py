"""From matplotlib's SVG to one that belongs to a page: its colours are the page's, it has words, and no ids or styles.

Drawings use one sentinel colour per name; here each becomes the CSS variable of that name, so that the page's light and
dark, and its print, are the picture's too.
"""

import re
from typing import get_args
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from enginery.core.text import visible
from validation.plots.charts import Colour, Plot

COLOURS: tuple[Colour, ...] = get_args(Colour)
SENTINELS = {name: f"#0e0d{index:02x}" for index, name in enumerate(COLOURS)}
_NAMES = {sentinel: name for name, sentinel in SENTINELS.items()}
SVG = "http://www.w3.org/2000/svg"
# Of a picture that stands alone, as a file; a page brings its own.
STANDALONE = (
    "svg{--ink:#1d2126;--muted:#626a73;--line:#e4e1dc;--accent:#2f5d9e;--card:#fff;--failed:#b3261e;"
    "background:var(--card)}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8eaec;--muted:#9aa3ad;--line:#2d333a;--accent:#8db4ec;"
    "--card:#1b1f24;--failed:#ff8f85}}"
    "text{font-family:system-ui,sans-serif;font-variant-numeric:tabular-nums}"
)
_NUMBER = re.compile(r"-?\d+\.\d+")
# What matplotlib writes and a browser takes anyway.
_IDLE = {"font-weight: 400", "stroke-linejoin: miter", "stroke-linecap: butt", "font-style: normal"}


def apply_theme(drawn: str, plot: Plot) -> str:
    """The page's SVG of matplotlib's, where the id of a mark's group is its class, a colon, and its title."""
    picture = _root(plot)
    _move(fromstring(drawn), picture)  # noqa: S314 - matplotlib wrote it a moment ago
    return tostring(picture, "unicode")


def draw_missing(plot: Plot) -> str:
    """In the place of a picture that cannot be drawn here."""
    picture = _root(plot)
    words = SubElement(picture, "text", {"x": "0", "y": str(plot.height // 2), "style": "fill: var(--muted)"})
    words.text = "This picture needs matplotlib: pip install matplotlib"
    return tostring(picture, "unicode")


def _root(plot: Plot) -> Element:
    words = visible(plot.words)
    attributes = {
        "class": f"picture {plot.kind}",
        "viewBox": f"0 0 {plot.width} {plot.height}",
        "role": "img",
        "aria-label": words,
        "style": "stroke-linejoin: round",
    }
    root = Element("svg", {"xmlns": SVG, **attributes} if plot.standalone else attributes)
    SubElement(root, "title").text = words
    if plot.standalone:
        SubElement(root, "style").text = STANDALONE
    return root


def _move(source: Element, target: Element) -> None:
    """Copy the shapes, and of the groups only those that mean something."""
    for child in source:
        tag = child.tag.removeprefix(f"{{{SVG}}}")
        if tag == "g":
            kind, colon, title = child.get("id", "").partition(":")
            inner = target
            if colon and (kind or title):
                inner = SubElement(target, "g", {"class": kind} if kind else {})
            if title:
                SubElement(inner, "title").text = title
            _move(child, inner)
        elif tag in ("path", "text"):
            SubElement(target, tag, _attributes(child)).text = child.text


def _attributes(shape: Element) -> dict[str, str]:
    found = {name: _NUMBER.sub(_short, " ".join(shape.get(name, "").split())) for name in ("d", "x", "y")}
    return {"style": _style(shape.get("style", ""))} | {name: value for name, value in found.items() if value}


def _short(match: re.Match[str]) -> str:
    return f"{float(match.group()):.2f}".rstrip("0").rstrip(".")


def _style(text: str) -> str:
    kept = []
    for item in (part.strip() for part in text.split(";")):
        name, _, value = item.partition(":")
        if not item or name == "font-family" or item in _IDLE:
            continue
        named = _NAMES.get(value.strip())
        kept.append(f"{name}: var(--{named})" if named else _NUMBER.sub(_short, item))
    return "; ".join(kept)
