"""Plots, one beneath the other, as a file of their own: SVG, or PNG in light colours."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring, register_namespace, tostring

from enginesmith.core.errors import InputError
from enginesmith.registry.store.files import make_folder, reachable, write_whole
from validation.plots.charts import Plot
from validation.plots.svg import svg

SUFFIXES = (".svg", ".png")
_SVG = "http://www.w3.org/2000/svg"


def check_picture(path: Path) -> None:
    """Raise InputError for a file that would be no picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: pictures are written as {' or '.join(SUFFIXES)}; name the file so")


def save_plots(plots: Sequence[Plot], path: Path) -> None:
    """Write plots of equal width. Raises InputError for another ending, ModuleNotFoundError for PNG without matplotlib.

    Raises UnavailableError where it cannot be written.
    """
    check_picture(path)
    if path.suffix.lower() == ".svg":
        write_whole(path, stack_svg(plots).encode())
        return
    from validation.plots.canvas import write_png

    with reachable(f"writing {path}"):
        make_folder(path.parent)
        write_png(plots, path)


def stack_svg(plots: Sequence[Plot]) -> str:
    """The plots as one SVG text; its text alternative is that of each."""
    register_namespace("", _SVG)
    drawn = [fromstring(svg(replace(plot, standalone=True))) for plot in plots]  # noqa: S314 - written a moment ago
    root, top = Element(f"{{{_SVG}}}svg"), 0
    for picture in drawn:
        _, _, width, height = (int(number) for number in picture.attrib["viewBox"].split())
        picture.attrib |= {"y": str(top), "width": str(width), "height": str(height)}
        root.append(picture)
        top += height
    root.attrib["viewBox"] = f"0 0 {max(plot.width for plot in plots)} {top}"
    return tostring(root, "unicode") + "\n"
