"""Plots of reports, by matplotlib."""

import io
import math
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from enginesmith.core.text import format_plain, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def number_text(value: float) -> str:
    """A number with three significant digits: '0.0123', '1.25e6'."""
    return digits_text(value or 0.0, 3)  # no minus sign for -0.0


def digits_text(value: float, digits: int) -> str:
    """A finite number with `digits` significant digits, a real minus sign, and no leading zeros in the exponent."""
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return (mantissa + (f"e{int(exponent)}" if exponent else "")).replace("-", "−")  # noqa: RUF001


def nonfinite_text(value: float) -> str:
    """'NaN', or '∞' with a minus sign if it is negative; '' for a finite number."""
    return "" if math.isfinite(value) else "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"  # noqa: RUF001


def share_text(share: float) -> str:
    """A share in percent: '0', '0.012 %', 'under 0.001 %'."""
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %" if share >= 1e-5 else "under 0.001 %"


def seconds_text(value: float) -> str:
    """A time, given in seconds, with its unit: '12.3 ms'; '' for NaN and infinities."""
    if not math.isfinite(value):
        return ""
    value = float(f"{value:.3g}")  # 999.9 ns are 1 µs, and not 1e+03 ns
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{format_plain(value / size)} {unit}"
    return f"{format_plain(value / 1e-9)} ns" if value else "0 s"


def percent_text(value: float) -> str:
    """A share or a slowdown in percent, with its sign: '+3.1 %'."""
    sign = "−" if value < 0 else "+"  # noqa: RUF001 - a real minus sign
    return f"{sign}{format_plain(100 * abs(value))} %" if value else "0 %"


def decibels_text(value: float) -> str:
    """A whole number of decibels, for an axis."""
    return f"{number_text(value)} dB"


# A matplotlib figure as SVG text in the style of a page.
#
# Callers draw with matplotlib, in the colours of `COLOURS`. Each has a unique value, which is replaced by the CSS
# variable of its name: pictures then follow the page's light and dark schemes and its print style. matplotlib takes
# half a second to import, and is imported only when a picture is drawn.

_NAMES = ("ink", "muted", "line", "card", "accent", "proven-soft", "failed", "failed-fill", "proven-fill",
          "unproven-fill", "refused-fill", "c1", "c2", "c3", "c4", "c5", "c6")  # fmt: skip
COLOURS: Mapping[str, str] = {name: f"#0e0d{index:02x}" for index, name in enumerate(_NAMES)}
# Colours of curves side by side, in this order; further curves repeat them with dashes.
SERIES = tuple(COLOURS[f"c{number}"] for number in range(1, 7))
WIDTH, HEIGHT = 420, 250
# Ticks of an axis of shares.
QUARTERS = tuple((part / 4, f"{25 * part} %") for part in range(5))
_STYLE = Path(__file__).with_name("plots.mplstyle")
# Pixels of a legend: per letter, per entry besides its text, and per row of entries.
_LETTER, _HANDLE, _ROW = 7.5, 44.0, 15
# matplotlib's settings are global in the process: only one drawing at a time may change them.
_LOCK = threading.Lock()
# Styles of a picture in a file of its own.
_STANDALONE = (
    "svg{--ink:#1d2126;--muted:#626a73;--line:#e4e1dc;--accent:#2f5d9e;--card:#fff;--failed:#b3261e;"
    "--c1:#2f5d9e;--c2:#c9831a;--c3:#2b8a72;--c4:#8e4a9e;--c5:#b0453c;--c6:#6d7680;background:var(--card)}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8eaec;--muted:#9aa3ad;--line:#2d333a;--accent:#8db4ec;"
    "--card:#1b1f24;--failed:#ff8f85;"
    "--c1:#8db4ec;--c2:#e3a94f;--c3:#5cc0a5;--c4:#c795d6;--c5:#e98a80;--c6:#a3adb7}}"
    "text{font-family:system-ui,sans-serif;font-variant-numeric:tabular-nums}"
)
# The least and the greatest end of a logarithmic axis.
_SMALLEST, _GREATEST = 1e-140, 1e140


def draw_svg(
    kind: str,
    words: str | Sequence[str],
    draw: "Callable[[Figure], object]",
    size: tuple[int, int] = (WIDTH, HEIGHT),
    *,
    standalone: bool = False,
) -> str:
    """The SVG text of the figure that `draw` fills; the same drawing results in the same bytes.

    kind: CSS class of the picture.  words: the text alternative, or a list of its sentences that `draw` fills.  size:
    width and height in pixels, like font sizes; a legend of several rows adds height.  standalone: whether the picture
    is a file, which cannot use the colours of a page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    muted_keys = ("axes.titlecolor", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor")
    colours: Any = {"grid.color": COLOURS["line"], **dict.fromkeys(muted_keys, COLOURS["muted"])}
    with _LOCK, matplotlib.rc_context(colours, _STYLE), warnings.catch_warnings():
        # Unusual names cause warnings: letters that the font lacks, and legends wider than the picture.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font|constrained_layout not applied")
        figure, buffer = Figure(figsize=(size[0] / 72, size[1] / 72)), io.StringIO()
        draw(figure)
        _add_legends(figure, size)
        empty_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=empty_metadata)  # type: ignore[no-untyped-call]
    alt_text = words if isinstance(words, str) else "; ".join(words)
    return _rewrite(buffer.getvalue(), kind, visible(alt_text), standalone)


def tag(kind: str, title: str = "") -> str:
    """The `gid` for an artist, whose SVG group then has the class `kind` and the tooltip `title`."""
    return f"{kind}:{visible(title)}"


def shorten(text: str, max_length: int = 48) -> str:
    """The text on one line; a text of over `max_length` characters is cut, with an ellipsis."""
    text = visible(" ".join(text.split()))
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def series(index: int) -> dict[str, Any]:
    """Colour and line style of the curve number `index` among several."""
    return {"color": SERIES[index % 6], "linestyle": "--" if index % 12 >= 6 else "-"}


def set_axis(
    axes: "Axes",
    name: Literal["x", "y"],
    ends: tuple[float, float],
    label: str = "",
    *,
    log: bool = False,
    text: Callable[[float], str] = number_text,
    ticks: Sequence[tuple[float, str]] | None = None,
) -> None:
    """Set the scale of an axis from ends[0] to ends[1], both above 0 if it is logarithmic.

    label: the measured quantity with its unit.  ticks: (position, label); None for about five round numbers, formatted
    by `text`.  log: whether the axis is logarithmic.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis = axes.xaxis if name == "x" else axes.yaxis
    if log:
        axes.set(**{f"{name}scale": "log"})
    if ticks is None:
        decades = math.log10(ends[1] / ends[0]) if log else 0.0
        subs = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 3 else (1.0,)
        linear_ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
        axis.set_major_locator(linear_ticks if decades < 0.7 else LogLocator(subs=subs, numticks=7))
        axis.set_major_formatter(lambda value, _: text(value))
    else:
        axis.set_ticks([tick for tick, _ in ticks], [tick_text for _, tick_text in ticks])
    axis.set_minor_locator(NullLocator())
    axes.set(**{f"{name}lim": ends})
    if name == "x":
        axes.set_xlabel(shorten(label, 64))
    else:
        axes.set_title(shorten(label, 64))


def annotate(
    axes: "Axes", text: str, place: tuple[float, float], offset: tuple[float, float], *, top: bool = False, **look: Any
) -> None:
    """Write a text beside a point of the data, moved to the right and up by the given pixels.

    top: whether the point's second coordinate is a share of the axes' height.  look: arguments of matplotlib's text.
    """
    coordinates, look = ("data", "axes fraction") if top else "data", {"color": COLOURS["muted"]} | look
    axes.annotate(shorten(text, 64), place, offset, coordinates, "offset pixels", annotation_clip=False, **look)


def span(values: Sequence[float], *, log: bool = False, pad: float = 0.04, least: float = 0.0) -> tuple[float, float]:
    """Ends (low, high) of an axis around the finite values (the positive ones, if logarithmic).

    pad: added at both ends, as a share of the width.  least: least width, in units of the axis; in decades, if
    logarithmic. Without values the ends are (0, 1), or (1, 10) if logarithmic.
    """
    finite_values = [value for value in values if math.isfinite(value) and (not log or value > 0)]
    if not finite_values:
        return (1.0, 10.0) if log else (0.0, 1.0)
    finite_values = [min(max(value, _SMALLEST if log else -_GREATEST), _GREATEST) for value in finite_values]
    low, high = min(finite_values), max(finite_values)
    low, high = (math.log10(low), math.log10(high)) if log else (low, high)
    width = max(high - low, least, 1e-9 * max(abs(low), abs(high)), 1e-12)
    midpoint = (low + high) / 2
    low, high = midpoint - width * (0.5 + pad), midpoint + width * (0.5 + pad)
    return (10.0 ** max(low, -150.0), 10.0 ** min(high, 150.0)) if log else (low, high)


def _add_legends(figure: "Figure", size: tuple[int, int]) -> None:
    """Add a legend above the figure's only axes, or above the right end of each of several axes."""
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        if not labels:
            continue
        column_count = int(size[0] // (_HANDLE + _LETTER * max(map(len, labels)))) or 1
        if len(figure.axes) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=column_count)
            continue
        row_count = math.ceil(len(labels) / column_count)
        figure.set_figheight((size[1] + _ROW * (row_count - 1)) / 72)  # the data keeps its room
        figure.legend(handles, labels, loc="outside upper left", ncols=column_count)


def _rewrite(svg: str, kind: str, words: str, standalone: bool) -> str:
    """matplotlib's SVG as a picture for a page: without ids, font styles and namespaces, with classes and titles."""
    root = fromstring(svg)  # noqa: S314 - matplotlib wrote it a moment ago
    attrs = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": words, "style": "stroke-linejoin: round"}
    picture = Element("svg", {"class": f"picture {kind}", **attrs})
    if standalone:
        picture.set("xmlns", "http://www.w3.org/2000/svg")
    SubElement(picture, "title").text = words
    if standalone:
        SubElement(picture, "style").text = _STANDALONE
    picture.extend(element for element in root if element.tag.endswith("}g") or element.find("{*}clipPath") is not None)
    for element in picture.iter():
        _rewrite_element(element)
    text = re.sub(r"font-family: [^;\"]*(?:; |(?=\"))", "", tostring(picture, "unicode"))
    return re.sub(r"#0e0d([0-9a-f]{2})", lambda match: f"var(--{_NAMES[int(match[1], 16)]})", text)


def _rewrite_element(element: Element) -> None:
    """Remove the namespace of an element of matplotlib's SVG; a group whose id is a `tag` gets its class and title."""
    element.tag, element.tail = element.tag.rpartition("}")[2], None
    element.text = element.text if element.tag in ("text", "title", "style") else None
    attributes = {name.rpartition("}")[2]: " ".join(value.split()) for name, value in element.attrib.items()}
    name, colon, title = attributes.pop("id", "").partition(":") if element.tag == "g" else ("", "", "")
    if colon:
        attributes["class"] = name
    if title:
        element.insert(0, Element("title"))
        element[0].text = title
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    for name in attributes.keys() & {"d", "x", "y", "transform"}:
        attributes[name] = re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.2f}", attributes[name])
    element.attrib.clear()
    element.attrib.update(attributes)
