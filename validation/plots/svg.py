"""A plot as SVG text: what `canvas` draws with matplotlib, rewritten to belong to a page.

Each sentinel colour of the drawing becomes the CSS variable of its name, so that the picture follows the page's light
and dark schemes and its print; ids and styles of matplotlib's own go, and titles come in.
"""

import re
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from enginesmith.core.text import visible
from validation.plots.charts import SENTINELS, Plot

_NAMES = {sentinel: name for name, sentinel in SENTINELS.items()}
_SVG = "http://www.w3.org/2000/svg"
# Styles of a picture in a file of its own.
_STANDALONE = (
    "svg{--ink:#1d2126;--muted:#626a73;--line:#e4e1dc;--accent:#2f5d9e;--card:#fff;--failed:#b3261e;"
    "--c1:#2f5d9e;--c2:#c9831a;--c3:#2b8a72;--c4:#8e4a9e;--c5:#b0453c;--c6:#6d7680;background:var(--card)}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8eaec;--muted:#9aa3ad;--line:#2d333a;--accent:#8db4ec;"
    "--card:#1b1f24;--failed:#ff8f85;"
    "--c1:#8db4ec;--c2:#e3a94f;--c3:#5cc0a5;--c4:#c795d6;--c5:#e98a80;--c6:#a3adb7}}"
    "text{font-family:system-ui,sans-serif;font-variant-numeric:tabular-nums}"
)
_NUMBER = re.compile(r"-?\d+\.\d+")
# Defaults of browsers that matplotlib writes nevertheless.
_IDLE = {"font-weight: 400", "stroke-linejoin: miter", "stroke-linecap: butt", "font-style: normal"}


def svg(plot: Plot) -> str:
    """The picture as SVG text, for a page, or for a file of its own where it is `standalone`.

    The same plot gives the same bytes. Without matplotlib the picture is a text that says so.
    """
    try:
        from validation.plots.canvas import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        picture = _root(plot)
        place = {"x": "0", "y": str(plot.height // 2), "style": "fill: var(--muted)"}
        SubElement(picture, "text", place).text = "This picture needs matplotlib: pip install matplotlib"
    else:
        drawn, plot = draw(plot)
        picture = _root(plot)
        _move(fromstring(drawn), picture)  # noqa: S314 - matplotlib wrote it a moment ago
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
    root = Element("svg", {"xmlns": _SVG, **attributes} if plot.standalone else attributes)
    SubElement(root, "title").text = words
    if plot.standalone:
        SubElement(root, "style").text = _STANDALONE
    return root


def _move(source: Element, target: Element) -> None:
    """Copy paths and texts. Of groups, only those whose id is a class, a colon and a title (`canvas`) become groups."""
    for child in source:
        tag = child.tag.removeprefix(f"{{{_SVG}}}")
        if tag == "g":
            kind, colon, title = child.get("id", "").partition(":")
            inner = target
            if colon and (kind or title):
                inner = SubElement(target, "g", {"class": kind} if kind else {})
            if title:
                SubElement(inner, "title").text = title
            _move(child, inner)
        elif tag in ("path", "text"):
            places = {name: _NUMBER.sub(_short, " ".join(child.get(name, "").split())) for name in ("d", "x", "y")}
            known = {name: value for name, value in places.items() if value}
            SubElement(target, tag, {"style": _style(child.get("style", ""))} | known).text = child.text


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
