"""The frontier as a picture: quality against the share of the compute in int8, as one self-contained SVG."""

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 56, 20, 24, 48
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}line{stroke:#ddd}.floor{stroke:#c33;stroke-dasharray:5 4}"
    ".predicted{fill:none;stroke:#8ab;stroke-width:2}.run{fill:#147}.chosen{fill:none;stroke:#c33;stroke-width:3}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#444}.run{fill:#8cf}}"
)


def frontier_svg(choice: Mapping[str, Any], floor_db: float | None = None) -> str:
    """The frontier of `Chosen.to_json()`: a line for what single groups predict, dots for what was run."""
    points = [point for point in choice["frontier"] if point["predicted_db"] is not None]
    runs = [point for point in [*points, choice["chosen"]] if point["sqnr_db"] is not None]
    values = [point["predicted_db"] for point in points] + [point["sqnr_db"] for point in runs]
    values += [floor_db] if floor_db is not None else []
    low, high = _decades(values or [0.0])
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="Quality against the share of the multiplications in int8"><style>{STYLE}</style>',
            *_axes(low, high),
            _line(points, low, high),
            *(_dot(point, low, high, "run", 4) for point in runs),
            *(_dot(point, low, high, "chosen", 8) for point in runs[-1:] if choice["chosen"]["sqnr_db"] is not None),
            *([_level(floor_db, low, high)] if floor_db is not None else []),
            "</svg>",
        ]
    )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    return 10 * (min(values) // 10), 10 * (max(values) // 10 + 1)


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _axes(low: float, high: float) -> list[str]:
    parts = []
    for step in range(5):
        x = _x(step / 4)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{25 * step} %</text>')
    for value in range(int(low), int(high) + 1, 10):
        y = _y(value, low, high)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value} dB</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    title = "share of the weighted multiplications in int8 (line: predicted; dots: run; circle: chosen)"
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{title}</text>')
    return parts


def _line(points: Sequence[Mapping[str, Any]], low: float, high: float) -> str:
    path = " ".join(f"{_x(point['share']):.1f},{_y(point['predicted_db'], low, high):.1f}" for point in points)
    return f'<polyline class="predicted" points="{path}"/>'


def _dot(point: Mapping[str, Any], low: float, high: float, kind: str, radius: int) -> str:
    x, y = _x(point["share"]), _y(point["sqnr_db"], low, high)
    title = f"{point['share']:.1%} in int8: {point['sqnr_db']:.1f} dB, {len(point['left'])} groups left in float"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{title}</title></circle>'


def _level(value: float, low: float, high: float) -> str:
    y = _y(value, low, high)
    return f'<line class="floor" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
