"""Pictures as files: several plots in one, SVG and PNG."""

from xml.etree import ElementTree

import pytest

from enginesmith.core.errors import InputError, UnavailableError
from validation.plots.charts import Axis, Bars, Dot, Key, Plot, Text
from validation.plots.files import check_picture, save_plots, stack_svg

MARKS = (Bars([0, 1, 2], [1, 2], "c2", title="bars"), Dot(1, 1, "accent"), Text(1, 1, "a text", dx=3))
PLOT = Plot("one", "what it shows", Axis(0, 2), Axis(0, 3), MARKS, (Key("bars", "c2"),))


def test_plots_lie_beneath_each_other():
    root = ElementTree.fromstring(stack_svg([PLOT, PLOT]))
    inner = list(root)
    assert [each.attrib["y"] for each in inner] == ["0", "250"] and root.attrib["viewBox"] == "0 0 420 500"
    assert "a text" in stack_svg([PLOT]) and "--c2:" in stack_svg([PLOT])


def test_a_png_has_two_pixels_for_each_and_the_colours_of_light(tmp_path):
    from matplotlib.image import imread

    save_plots([PLOT, PLOT], tmp_path / "a.png")
    pixels = imread(tmp_path / "a.png")
    assert pixels.shape == (1000, 840, 4) and (pixels[..., 3] == 1).all()
    orange = (abs(pixels[..., :3] - [0xC9 / 255, 0x83 / 255, 0x1A / 255]) < 0.01).all(-1)
    assert orange.mean() > 0.1


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_place_that_cannot_be_written_is_told(tmp_path, ending):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=f"a.{ending}"):
        save_plots([PLOT], tmp_path / "file" / f"a.{ending}")


def test_other_files_are_no_pictures(tmp_path):
    with pytest.raises(InputError, match=r"written as .svg or .png"):
        check_picture(tmp_path / "a.jpg")
