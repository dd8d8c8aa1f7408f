"""The report's pictures: SVG as text, drawn with numbers that come out of a record.

Colours come from the page (CSS variables, so that light and dark both work); whatever text a record holds is escaped
here, because the template takes a picture as it is. Positions are in the units of the view box.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Json = Mapping[str, Any]

# A histogram: view box, the plot's margins and its height.
WIDTH, HEIGHT, SIDE, TOP, FLOOR = 340, 150, 10, 22, 122
# A frontier.
WIDE, HIGH, LEFT, RIGHT, UPPER, LOWER = 440, 250, 48, 14, 12, 42
# What is worse than so many decibels is drawn there: noise ten times the signal is as bad as any other.
LEAST_DB = -10.0
# SQNR in the JSON of a choice of outputs that hold NaN, infinities, or noise where nothing was expected.
BROKEN_DB = -100.0
# Of a picture that stands alone, as a file; a page brings its own.
STANDALONE = (
    "svg{--ink:#1d2126;--muted:#626a73;--line:#e4e1dc;--accent:#2f5d9e;--card:#fff;--failed:#b3261e;"
    "background:var(--card);font:13px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e8eaec;--muted:#9aa3ad;--line:#2d333a;--accent:#8db4ec;"
    "--card:#1b1f24;--failed:#ff8f85}}"
    "text{fill:var(--muted)}.strong{fill:var(--ink);stroke:var(--card);stroke-width:4px;paint-order:stroke}"
    ".grid{stroke:var(--line)}.predicted{fill:none;stroke:var(--accent);stroke-width:1.5;opacity:.55}"
    ".run{fill:var(--accent)}.chosen{fill:none;stroke:var(--ink);stroke-width:2}"
    ".floor{stroke:var(--failed);stroke-dasharray:5 4}"
)


def number_text(value: float) -> str:
    """Three significant digits, with a real minus sign."""
    text = f"{value:.3g}" if value else "0"
    mantissa, _, exponent = text.partition("e")
    return (mantissa + (f"e{int(exponent)}" if exponent else "")).replace("-", "−")  # noqa: RUF001


def histogram_svg(tensor: Json) -> str:
    """How a tensor's values lie within what its format holds: counts on a log scale, what is clipped in another colour.

    tensor: an activation of a quantization record, with its 'histogram'.
    """
    (low, high), counts = tensor["histogram"]["span"], tensor["histogram"]["counts"]
    start, end = tensor["range"]
    width = (high - low) / len(counts) or 1.0
    bars = [(low + index * width, low + (index + 1) * width, count) for index, count in enumerate(counts)]
    parts = {
        "in": [bar for bar in bars if start <= (bar[0] + bar[1]) / 2 <= end],
        "out": [bar for bar in bars if not start <= (bar[0] + bar[1]) / 2 <= end],
    }
    most = float(max([*counts, 1.0]))

    def x(value: float) -> float:
        return SIDE + float(value - low) / ((high - low) or 1.0) * (WIDTH - 2 * SIDE)

    words = (
        f"Histogram of {tensor['name']}: values from {number_text(tensor['seen'][0])} to "
        f"{number_text(tensor['seen'][1])}; the format holds {number_text(start)} to {number_text(end)}; "
        f"{share_text(tensor['clipped'])} are clipped."
    )
    return "".join(
        [
            f'<svg class="histogram" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(words)}</title>',
            *(f'<path class="{kind}" d="{_bars(some, x, most)}"/>' for kind, some in parts.items()),
            f'<line class="base" x1="{SIDE}" x2="{WIDTH - SIDE}" y1="{FLOOR}" y2="{FLOOR}"/>',
            *_ends(x(start), x(end), start, end),
            *_ticks(low, high, x),
            "</svg>",
        ]
    )


def share_text(share: float) -> str:
    """A share for people: '0', '0.012 %', 'under 0.001 %'."""
    if share == 0:
        return "0"
    return f"{100 * share:.2g} %" if share >= 1e-5 else "under 0.001 %"


def _bars(bars: Sequence[tuple[float, float, float]], x: Any, most: float) -> str:
    parts = []
    for left, right, count in bars:
        if count > 0:
            height = max(math.log1p(count) / math.log1p(most) * (FLOOR - TOP - 6), 1.0)
            a, b = x(left) + 0.4, x(right) - 0.4
            parts.append(f"M{a:.1f} {FLOOR}v{-height:.1f}H{b:.1f}V{FLOOR}z")
    return "".join(parts)


def _ends(left: float, right: float, start: float, end: float) -> list[str]:
    """Where the format's range ends: a line at each end, with its value."""
    parts = []
    for x, value in ((left, start), (right, end)):
        anchor = "start" if x < WIDTH * 0.2 else "end" if x > WIDTH * 0.8 else "middle"
        parts.append(f'<line class="range" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{FLOOR}"/>')
        parts.append(
            f'<text class="strong" x="{x:.1f}" y="{TOP - 10}" text-anchor="{anchor}">{number_text(value)}</text>'
        )
    if abs(right - left) < 70:  # no room for two labels
        parts.pop(1)
    return parts


def _ticks(low: float, high: float, x: Any) -> list[str]:
    step = 10 ** math.floor(math.log10((high - low) or 1.0))
    step *= next((part for part in (0.2, 0.5, 1, 2, 5) if (high - low) / (step * part) <= 5), 5)
    values = [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [
        f'<text x="{min(max(x(value), SIDE + 8), WIDTH - SIDE - 8):.1f}" y="{FLOOR + 17}" text-anchor="middle">'
        f"{number_text(value)}</text>"
        for value in values
    ]


def frontier_svg(points: Sequence[Json], chosen: Json, floor_db: float | None = None, style: str = "") -> str:
    """Quality against the share of the multiplications in int8: a line for what single groups predict, dots for what
    was run, a ring around what was chosen.

    points, chosen: with share, predicted_db, sqnr_db (either None) and left, the number of groups in float.
    style: a style sheet, for a picture outside a page.
    """
    predicted = [point for point in points if point["predicted_db"] is not None]
    runs = [point for point in [*points, chosen] if point["sqnr_db"] is not None]
    values = [point["predicted_db"] for point in predicted] + [point["sqnr_db"] for point in runs]
    drawn = [max(value, LEAST_DB) for value in values]
    low, high = _decades([*drawn, *([floor_db] if floor_db is not None else [])] or [0.0])

    def y(value: float) -> float:
        return UPPER + (high - max(value, low)) / (high - low) * (HIGH - UPPER - LOWER)

    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="frontier" viewBox="0 0 {WIDE} {HIGH}" role="img">',
            "<title>Quality against the share of the weighted multiplications in int8</title>",
            f"<style>{style}</style>" if style else "",
            *_axes(low, high, y),
            *([_level(floor_db, y(floor_db))] if floor_db is not None else []),
            _line([(_x(point["share"]), y(point["predicted_db"])) for point in predicted]),
            *(_dot(point, y(point["sqnr_db"])) for point in runs),
            _ring(chosen, y(chosen["sqnr_db"])) if chosen["sqnr_db"] is not None else "",
            "</svg>",
        ]
    )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    return 10 * (min(values) // 10), 10 * (max(values) // 10 + 1)


def _x(share: float) -> float:
    return LEFT + share * (WIDE - LEFT - RIGHT)


def _axes(low: float, high: float, y: Any) -> list[str]:
    parts = []
    for step in range(5):
        x = _x(step / 4)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{UPPER}" y2="{HIGH - LOWER}"/>')
        anchor = "end" if step == 4 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HIGH - LOWER + 17}" text-anchor="{anchor}">{25 * step} %</text>')
    each = 10 * math.ceil((high - low) / 60)
    for value in range(int(low), int(high) + 1, each):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{number_text(value)} dB</text>')
    middle = (LEFT + WIDE - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HIGH - 6}" text-anchor="middle">share of the multiplications in int8</text>')
    return parts


def _line(points: Sequence[tuple[float, float]]) -> str:
    parts = "".join(f"L{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="predicted" d="M{parts[1:]}"/>' if points else ""


def _dot(point: Json, y: float) -> str:
    return (
        f'<circle class="run" cx="{_x(point["share"]):.1f}" cy="{y:.1f}" r="4"><title>{_told(point)}</title></circle>'
    )


def _ring(point: Json, y: float) -> str:
    x = _x(point["share"])
    return f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="8"><title>{_told(point)}</title></circle>'


def _told(point: Json) -> str:
    share, quality = f"{100 * point['share']:.1f} %", decibels_text(point["sqnr_db"])
    return f"{share} in int8: {quality}, {int(point['left'])} groups left in float"


def decibels_text(sqnr_db: float | None) -> str:
    """SQNR of a model's outputs for people, as the JSON of a choice has it."""
    if sqnr_db is None:
        return "no loss"
    return "broken" if sqnr_db <= BROKEN_DB else f"{sqnr_db:.1f} dB"


def _level(value: float, y: float) -> str:
    line = f'<line class="floor" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text class="strong" x="{LEFT + 8}" y="{y - 6:.1f}">floor {number_text(value)} dB</text>'
