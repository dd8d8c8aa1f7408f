import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import validation
from validation.plotting import COLOURS, annotate, draw_svg, series, set_axis, shorten, span, tag

HOSTILE = "</title><script>&\"' $x_1$ 网\x00\x07 " + "W" * 90


def draw(figure) -> None:
    """Curves, a dot and a text, with names that nobody should write."""
    axes = figure.subplots()
    for index in range(8):
        axes.step([1.0, 10.0 + index], [0.0, 1.0], label=shorten(HOSTILE), gid=tag("curve", HOSTILE), **series(index))
    axes.plot(5.0, 0.5, "o", color=COLOURS["accent"], gid=tag("dot"))
    annotate(axes, HOSTILE, (5.0, 0.5), (3, 3))
    set_axis(axes, "x", (1.0, 100.0), HOSTILE, log=True)
    set_axis(axes, "y", (0.0, 1.0), "share")


@pytest.fixture(scope="module")
def drawn() -> str:
    return draw_svg("ecdf", HOSTILE, draw)


def test_the_same_drawing_gives_the_same_bytes(drawn):
    assert draw_svg("ecdf", HOSTILE, draw) == drawn


def test_a_picture_has_text_and_only_the_pages_colours(drawn):
    root = ElementTree.fromstring(drawn)
    assert root.get("class") == "picture ecdf" and root.get("role") == "img"
    assert root.get("aria-label") == root.find("title").text and root.get("aria-label").startswith("</title><script>")
    colours = re.findall(r"(?:fill|stroke): ([^;\"]+)", drawn)
    assert {colour for colour in colours if not colour.startswith("var(--")} == {"none"}
    assert not any(value in drawn for value in COLOURS.values()) and "\x00" not in drawn


def test_a_picture_contains_nothing_active(drawn):
    tags = {item.tag for item in ElementTree.fromstring(drawn).iter()}
    assert tags <= {"svg", "title", "g", "path", "text", "defs", "clipPath", "rect", "use"}
    assert not re.search(r"<style|font-family|xmlns|url\((?!#)| href=\"(?!#)", drawn)


def test_groups_have_classes_and_titles(drawn):
    root = ElementTree.fromstring(drawn)
    curves = root.findall(".//g[@class='curve']")
    assert len(curves) == 8 and "W" * 90 in curves[0].find("title").text
    assert root.find(".//g[@class='dot']/title") is None


def test_curves_without_an_own_colour_are_dashed():
    assert len({tuple(series(index).values()) for index in range(12)}) == 12


@pytest.mark.parametrize(("charts", "above"), [(1, 1), (2, 0)])
def test_a_legend_is_above_single_axes_and_within_several(charts, above):
    figures = []

    def draw_charts(figure) -> None:
        figures.append(figure)
        for index in range(charts):
            figure.add_subplot(charts, 1, index + 1).plot([0, 1], label="runs")

    draw_svg("p", "w", draw_charts)
    assert [len(figure.legends) for figure in figures] == [above]
    assert [axes.get_legend() is None for axes in figures[0].axes] == [bool(above)] * charts


def test_an_axis_ends_beyond_the_values():
    assert span([0.0, -1.0], log=True) == (1.0, 10.0) and span([]) == (0.0, 1.0)
    assert span([5.0, 5.0], least=1.0, pad=0) == (4.5, 5.5)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(("least", "most"), [(1e299, 1e299), (5e-324, 1.7e308), (-1.7e308, 1.7e308)])
def test_an_axis_near_the_float_limits_is_drawn(least, most, log):
    end_span = span([least, most], log=log, least=0.1)
    assert all(map(math.isfinite, end_span)) and end_span[0] < end_span[1] and (end_span[0] > 0 or not log)
    text = draw_svg("p", "w", lambda figure: set_axis(figure.subplots(), "y", end_span, log=log))
    assert "nan" not in text


def test_a_picture_in_a_file_has_its_own_colours():
    text = draw_svg("ecdf", "w", draw, standalone=True)
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg" and "prefers-color-scheme" in text
    named_matches = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert named_matches >= {"c1", "c6"} and all(text.count(f"--{name}:#") == 2 for name in named_matches)


def test_a_colour_of_each_name_is_in_the_style_sheet_for_light_and_dark():
    sheet = (Path(validation.__file__).parent / "reporting" / "report.css").read_text()
    light_part, dark = sheet.split("@media screen and (prefers-color-scheme: dark)")
    for name in COLOURS:
        assert f"--{name}:" in light_part and f"--{name}:" in dark.split("}\n}")[0], name


def test_pages_do_not_import_matplotlib_before_they_draw():
    code = (
        "import sys, validation.reporting.html, validation.canary.page, validation.reporting.quantization\n"
        "assert 'matplotlib' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_process_settings_are_restored():
    import matplotlib

    rcparams_before = dict(matplotlib.rcParams)
    draw_svg("p", "w", draw)
    assert dict(matplotlib.rcParams) == rcparams_before
