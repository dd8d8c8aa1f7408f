"""Plots: the same bytes each time, the page's colours, words for those who do not see, marks kept within their axes."""

import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from validation.plots.charts import (
    SENTINELS,
    Axis,
    Bars,
    Curve,
    Dot,
    Interval,
    Key,
    Line,
    Plot,
    Point,
    Text,
    ecdf,
    histogram,
    intervals,
    loglog,
    series,
    span_axis,
)
from validation.plots.svg import svg
from validation.plots.texts import number_text, percent_text, seconds_text, share_text

HOSTILE = "</title><script>&\"' $x_1$ 网\x00\x07 " + "W" * 90
UNIT = Axis(0.0, 1.0)


def plots() -> dict[str, Plot]:
    """One of each kind, with names that nobody should write."""
    shares = np.linspace(0, 1, 101)
    curves = [Curve(f"{HOSTILE} {n}", 10.0 ** (shares + n), shares) for n in range(7)]
    rows = [
        Interval(HOSTILE, "from -1 to 2", -1.0, 2.0, 0.5),
        Interval("beyond", "", 7.0, 9.0, 8.0),
        Interval("no interval", "not measured", None, None),
    ]
    roof = Line([1e-2, 1.0, 100.0], [1e8, 1e10, 1e10], "ink")
    points = [Point(HOSTILE, 0.5, 3e9, 0.2), Point("", 50.0, 9e9, 1.0, "c2")]
    return {
        "ecdf": ecdf(curves, Axis(1.0, 1e8, "error", log=True), HOSTILE),
        "intervals": intervals(rows, Axis(-2.0, 3.0, HOSTILE), HOSTILE, 1.0),
        "histogram": histogram(np.linspace(-1, 1, 61), np.arange(60.0), HOSTILE, (-0.5, 0.5)),
        "loglog": loglog(points, [roof], Axis(0.01, 100, "MAC/B", log=True), Axis(1e7, 1e11, log=True), HOSTILE),
    }


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {name: svg(plot) for name, plot in plots().items()}


def test_the_same_data_gives_the_same_bytes(drawn):
    assert {name: svg(plot) for name, plot in plots().items()} == drawn


def test_pictures_have_words_and_only_the_colours_of_a_page(drawn):
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img" and root.find("title").text == root.get("aria-label")
        assert root.get("aria-label").startswith("</title><script>") and "\x00" not in text
        colours = re.findall(r"(?:fill|stroke): ([^;\"]+)", text)
        assert {colour for colour in colours if not colour.startswith("var(--")} <= {"none"}
        assert not any(sentinel in text for sentinel in SENTINELS.values())


def test_pictures_bring_no_ids_links_styles_or_addresses(drawn):
    for text in drawn.values():
        tags = Counter(item.tag for item in ElementTree.fromstring(text).iter())
        assert set(tags) <= {"svg", "title", "g", "path", "text"}
        assert not re.search(r" (id|href|clip-path)=|url\(|<style|font-family|xmlns", text)


def test_no_text_leaves_its_picture(drawn):
    from validation.plots.canvas import text_width

    for text in drawn.values():
        root = ElementTree.fromstring(text)
        width = float(root.get("viewBox").split()[2])
        for item in root.iter("text"):
            ends = {"start": (0, 1), "middle": (0.5, 0.5), "end": (1, 0)}
            anchor = re.search(r"text-anchor: (\w+)", item.get("style"))
            before, after = ends[anchor.group(1) if anchor else "start"]
            x, wide = float(item.get("x")), text_width(item.text)
            assert x - before * wide >= -1 and x + after * wide <= width + 1, item.text


def test_names_are_shortened_and_whole_in_the_title(drawn):
    row = ElementTree.fromstring(drawn["intervals"]).find("g[@class='span']/title").text
    assert "W" * 90 in row
    assert any(item.text.endswith("…") for item in ElementTree.fromstring(drawn["intervals"]).iter("text"))


def test_marks_stay_within_the_axes_whatever_the_data_are():
    marks = (Line([-9, 0.5, math.nan, 9], [math.inf, 0.1, 0.2, -math.inf]), Dot(1e300, -1e300), Bars([-5, 5], [5]))
    root = ElementTree.fromstring(svg(Plot("p", "w", UNIT, UNIT, (*marks, Text(-math.inf, 9, "here")))))
    for path in root.iter("path"):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d"))]
        assert min(numbers) >= 0 and max(numbers) <= 420


def test_an_interval_beyond_the_axis_is_an_arrow_and_has_no_dot(drawn):
    root = ElementTree.fromstring(drawn["intervals"])
    assert len(root.findall("g[@class='beyond']")) == 1
    assert len(root.findall("g[@class='point']")) == 1 and len(root.findall("g[@class='span']")) == 1


def test_a_log_axis_takes_no_zero_and_a_narrow_one_has_labels():
    plot = ecdf([Curve("a", [0.0, 0.02, 0.021], [0, 0.5, 1])], Axis(0.019, 0.022, log=True, text=seconds_text), "w")
    assert "20 ms" in svg(plot)
    assert span_axis([0.0, -1.0], log=True) == (1.0, 10.0)
    assert span_axis([]) == (0.0, 1.0)
    low, high = span_axis([5.0, 5.0], least=1.0, pad=0)
    assert (low, high) == (4.5, 5.5)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(("least", "most"), [(1e299, 1e299), (5e-324, 1.7e308), (-1.7e308, 1.7e308), (5e-324, 5e-324)])
def test_an_axis_around_numbers_at_the_ends_of_what_a_float_holds_is_drawn(least, most, log):
    low, high = span_axis([least, most], log=log, least=0.1)
    assert math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not log)
    axis = Axis(low, high, log=log)
    assert "nan" not in svg(Plot("p", "w", UNIT, axis, (Line([0.0, 1.0], [least, most]), Dot(0.5, most))))


def test_curves_beyond_the_colours_are_dashed():
    names = {series(index) for index in range(12)}
    assert len(names) == 12 and series(0) == ("c1", False) and series(6) == ("c1", True)


def test_a_picture_for_a_file_brings_its_own_colours():
    text = svg(replace(plots()["histogram"], standalone=True))
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "prefers-color-scheme" in text
    curves = [Curve(str(index), [0.0, 1.0], [0.0, 1.0]) for index in range(6)]
    text = svg(replace(ecdf(curves, UNIT, "six"), standalone=True))
    named = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert named >= {"c1", "c6"} and all(text.count(f"--{name}:#") == 2 for name in named)


def test_a_colour_of_each_name_is_in_the_style_sheet_for_light_and_dark():
    from pathlib import Path

    import validation

    light, dark = (
        (Path(validation.__file__).parent / "reporting" / "report.css")
        .read_text()
        .split("@media screen and (prefers-color-scheme: dark)")
    )
    for name in SENTINELS:
        assert f"--{name}:" in light and f"--{name}:" in dark.split("}\n}")[0], name


def test_pages_do_not_need_matplotlib_to_be_imported_and_say_so_when_it_is_missing():
    code = """
import sys
import validation.reporting.html, validation.canary.page, validation.reporting.quantization
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
from tests.validation.plots.test_plots import plots
from validation.plots.svg import svg
print(svg(plots()["ecdf"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install matplotlib" in done.stdout, done.stderr


def test_settings_of_the_process_are_as_before():
    import matplotlib

    before = dict(matplotlib.rcParams)
    svg(Plot("p", "w", UNIT, UNIT, (), (Key("a", "c1"),)))
    assert dict(matplotlib.rcParams) == before


def test_numbers_are_short_and_have_units():
    assert [number_text(value) for value in (0.0, -1.23456, 1e-7, 48200.0)] == ["0", "−1.23", "1e−7", "4.82e4"]  # noqa: RUF001
    assert [share_text(share) for share in (0.0, 2e-7, 0.000123, 0.5)] == ["0", "under 0.001 %", "0.012 %", "50 %"]
    assert [seconds_text(value) for value in (1.5, 0.0123, 45e-6, 3e-9)] == ["1.5 s", "12.3 ms", "45 µs", "3 ns"]
    assert [seconds_text(value) for value in (0.99999, 999.96e-9)] == ["1 s", "1 µs"]
    assert [percent_text(value) for value in (0.031, -0.02, 0.0)] == ["+3.1 %", "−2 %", "0 %"]  # noqa: RUF001
