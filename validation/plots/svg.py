"""A plot as SVG text."""

from validation.plots.charts import Plot
from validation.plots.theme import draw_missing


def svg(plot: Plot) -> str:
    """The picture as SVG text, to be put into a page, or into a file of its own (`standalone`).

    The same plot gives the same bytes. Without matplotlib it is a picture that says what is missing.
    """
    try:
        from validation.plots.canvas import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return draw_missing(plot)
    return draw(plot)
