"""The HTML page of a model version: one self-contained file, without scripts or network.

A page shows texts from specs and compilers' logs, which anybody may have written. So the templates escape everything,
control characters too, and no such text becomes an address, a class or an id.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from enginesmith.core.text import format_bytes, visible
from validation.plots.texts import digits_text, nonfinite_text, percent_text, seconds_text
from validation.reporting.overview import overview
from validation.reporting.stages import format_bound
from validation.reporting.version_document import VersionDocument

if TYPE_CHECKING:
    from jinja2 import Environment


def render(version: VersionDocument) -> str:
    """The HTML page of a version."""
    return templates().get_template("reporting/report.html.j2").render(**vars(overview(version)))


@cache
def templates() -> "Environment":
    """The Jinja environment of all pages, of versions and of canaries, with the filters that they use."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("validation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_show,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bound": format_bound,
        "element": lambda value, digits=7: nonfinite_text(value) or digits_text(value, digits),
        "bytes": format_bytes,
        "metric": metric_text,
        "shape": shape_text,
        "when": time_text,
        "seconds": lambda value: "" if value is None else seconds_text(value),
        "percent": lambda value: "" if value is None else percent_text(value),
    }
    return environment


def _show(value: object) -> object:
    """What an expression of a template writes: control characters in plain text become visible; markup stays."""
    return visible(value) if type(value) is str else value


def metric_text(value: float | None, name: str) -> str:
    """The value of the metric `name`, with its unit; '' for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return nonfinite_text(value)
    if name.endswith("_db"):
        return f"{value:.1f} dB"
    if name == "nonfinite":
        return f"{value:.0f}"
    if name.startswith("max_"):
        return f"{value:.2g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if value not in (0, 1) else f"{value:.0f}"


def shape_text(shape: Sequence[int | str]) -> str:
    """Sizes and names of dims, or 'scalar'."""
    return " × ".join(map(str, shape)) or "scalar"  # noqa: RUF001 - a multiplication sign


def time_text(timestamp: str) -> str:
    """'2026-01-31 08:43 UTC' for an ISO 8601 time in UTC."""
    return f"{timestamp[:10]} {timestamp[11:16]} UTC"
