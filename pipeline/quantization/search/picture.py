"""The frontier of a choice as a picture of its own, light and dark: SVG."""

from collections.abc import Mapping
from typing import Any

from validation.reporting.pictures import frontier_svg as drawn


def frontier_svg(choice: Mapping[str, Any]) -> str:
    """The frontier of a choice's JSON: a line for what single groups predict, dots for what was run."""
    points = [_point(point) for point in choice["frontier"]]
    floor = choice["floor"] or {}
    return drawn(points, _point(choice["chosen"]), floor.get("sqnr_db"), standalone=True)


def _point(point: Mapping[str, Any]) -> dict[str, Any]:
    return {**point, "left": len(point["left"])}
