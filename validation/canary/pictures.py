"""The canary page's pictures: SVG as text, drawn from numbers. Colours come from the page, so light and dark both work.

Nothing that anybody wrote gets into a picture: labels are numbers and words of this module. Positions are in the units
of the view box.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDE, HIGH, LEFT, RIGHT, UPPER, LOWER = 460, 250, 56, 16, 14, 40
BAR_WIDE, BAR_HIGH = 220, 34
SIDES = ("baseline", "candidate")

Json = Mapping[str, Any]
Place = Callable[[float], float]


def seconds_text(value: float) -> str:
    """A latency for people: '12.3 ms'."""
    if not math.isfinite(value):
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def percent_text(value: float) -> str:
    """A share or a slowdown for people, with its sign: '+3.1 %'."""
    return f"{100 * value:+.3g} %".replace("-", "−") if value else "0 %"  # noqa: RUF001 - a real minus sign


def interval_svg(item: Json) -> str:
    """A criterion's interval on an axis on which its margin always stands at the same place, two thirds along."""
    margin = item["margin"] or 1.0
    if item["low"] is None or item["high"] is None:
        return ""

    def x(value: float) -> float:
        return BAR_WIDE * (0.5 + min(max(value / margin, -2.9), 2.9) / 6)

    low, high, point = x(item["low"]), x(item["high"]), x(item["estimate"] or 0.0)
    words = f"from {item['low']:.4g} to {item['high']:.4g}, margin {margin:.4g}"
    return (
        f'<svg class="interval" viewBox="0 0 {BAR_WIDE} {BAR_HIGH}" role="img"><title>{words}</title>'
        f'<rect class="fine" x="0" y="4" width="{x(margin):.1f}" height="26"/>'
        f'<line class="grid" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="4" y2="30"/>'
        f'<line class="margin" x1="{x(margin):.1f}" x2="{x(margin):.1f}" y1="2" y2="32"/>'
        f'<line class="span" x1="{low:.1f}" x2="{max(high, low + 1):.1f}" y1="17" y2="17"/>'
        f'<circle class="point" cx="{point:.1f}" cy="17" r="5"/></svg>'
    )


def ecdf_svg(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Both distribution functions over a logarithmic axis of latency."""
    values = [x for curve in curves.values() for x, _ in curve if x > 0]
    if not values:
        return ""
    place, ticks = _logarithmic(values)
    lines = [
        f'<path class="{name}" d="{_steps([(place(max(x, min(values))), _share(p)) for x, p in curves[name]])}"/>'
        for name in SIDES
    ]
    levels = [(p, f"{100 * p:.3g} %") for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _plot(
        "ecdf",
        "Share of requests answered within a latency, on both sides",
        [*_upright(place, ticks), *_level(_share, levels), *lines, _below("latency, logarithmic")],
    )


def over_time_svg(windows: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Median (whole lines) and 90th percentile (thin ones) in windows of time."""
    rows = [row for name in SIDES for row in windows[name]]
    if not rows:
        return ""
    most = max(row[0] for row in rows) or 1.0
    place, ticks = _logarithmic([value for row in rows for value in row[1:] if value > 0], vertical=True)

    def x(value: float) -> float:
        return LEFT + value / most * (WIDE - LEFT - RIGHT)

    lines = [
        f'<path class="{name} {style}" d="{_line([(x(row[0]), place(row[column])) for row in windows[name]])}"/>'
        for name in SIDES
        for column, style in ((2, "thin"), (1, ""))
    ]
    marks = [(most * part, _span_text(most * part, most)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _plot(
        "over-time",
        "Latency over the time of the canary, on both sides",
        [*_upright(x, marks), *_level(place, ticks), *lines, _below("time since the first request")],
    )


def differences_svg(rows: Sequence[Json], margins: Mapping[float, float]) -> str:
    """The slowdown at each quantile with its interval; margins: probability -> margin, where one is tested."""
    if not rows:
        return ""
    ends = [value for row in rows for value in (row["low"], row["high"])] + [0.0, *margins.values()]
    low, high = max(float(min(ends)), -0.9), min(float(max(ends)), 3.0)
    pad = 0.08 * (high - low or 0.1)
    low, high = low - pad, high + pad

    def y(value: float) -> float:
        return UPPER + (high - min(max(value, low), high)) / (high - low) * (HIGH - UPPER - LOWER)

    gap = (WIDE - LEFT - RIGHT) / len(rows)
    parts = [*_level(y, [(value, percent_text(value)) for value in _round_steps(low, high)])]
    parts.append(f'<line class="zero" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    for index, row in enumerate(rows):
        x = LEFT + gap * (index + 0.5)
        parts.append(
            f'<line class="span" x1="{x:.1f}" x2="{x:.1f}" y1="{y(row["low"]):.1f}" y2="{y(row["high"]):.1f}"/>'
        )
        parts.append(f'<circle class="point" cx="{x:.1f}" cy="{y(row["slowdown"]):.1f}" r="4"/>')
        if (margin := margins.get(row["p"])) is not None:
            ends_at = f'x1="{x - gap * 0.36:.1f}" x2="{x + gap * 0.36:.1f}"'
            parts.append(f'<line class="margin" {ends_at} y1="{y(margin):.1f}" y2="{y(margin):.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HIGH - LOWER + 17}" text-anchor="middle">p{100 * row["p"]:.4g}</text>')
    return _plot("differences", "Slowdown of the candidate at each quantile", [*parts, _below("quantile of latency")])


def _plot(kind: str, words: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg class="plot {kind}" viewBox="0 0 {WIDE} {HIGH}" role="img"><title>{words}</title>{body}</svg>'


def _share(p: float) -> float:
    return UPPER + (1.0 - p) * (HIGH - UPPER - LOWER)


def _logarithmic(values: Sequence[float], *, vertical: bool = False) -> tuple[Place, list[tuple[float, str]]]:
    """Where a latency lies, and where the axis has labels: 1, 2, 5, 10, ... as many as there is room for."""
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = (low, high) if high - low > 0.05 else (low - 0.05, high + 0.05)
    steps: list[float] = [1, 2, 5] if high - low < 1.6 else [1, 3] if high - low < 3 else [1]
    if high - low < 0.5:
        steps = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]
    marks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    marks = [mark for mark in marks if low <= math.log10(mark) <= high]
    every = math.ceil(len(marks) / 6) or 1

    def place(value: float) -> float:
        part = (math.log10(max(value, 1e-12)) - low) / (high - low)
        return UPPER + (1 - part) * (HIGH - UPPER - LOWER) if vertical else LEFT + part * (WIDE - LEFT - RIGHT)

    return place, [(mark, seconds_text(mark)) for mark in marks[::every]]


def _upright(place: Place, marks: Sequence[tuple[float, str]]) -> list[str]:
    parts = []
    for value, text in marks:
        x = place(value)
        anchor = "end" if x > WIDE - RIGHT - 20 else "middle"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{UPPER}" y2="{HIGH - LOWER}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HIGH - LOWER + 17}" text-anchor="{anchor}">{text}</text>')
    return parts


def _level(place: Place, marks: Sequence[tuple[float, str]]) -> list[str]:
    parts = []
    for value, text in marks:
        y = place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return parts


def _round_steps(low: float, high: float) -> list[float]:
    """Some five round numbers between two ends."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * part for part in (1, 2, 5, 10) if rough <= power * part), power * 10)
    return [round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _span_text(seconds: float, most: float) -> str:
    """A time on an axis that ends at `most`: one unit for all of it."""
    unit, size = ("h", 3600.0) if most >= 7200 else ("min", 60.0) if most >= 300 else ("s", 1.0)
    return f"{seconds / size:.3g} {unit}"


def _below(text: str) -> str:
    return f'<text x="{(LEFT + WIDE - RIGHT) / 2}" y="{HIGH - 5}" text-anchor="middle">{text}</text>'


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _steps(points: Sequence[tuple[float, float]]) -> str:
    """A stair: along, then up."""
    if not points:
        return ""
    first, *rest = points
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
