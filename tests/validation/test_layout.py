"""The pages in a browser: verdict, tables and pictures are there, nothing overflows, and all text can be read."""

from pathlib import Path

import pytest

from tests.validation.browser import CHROMIUM, laid_out
from tests.validation.canary.reports import report
from tests.validation.canary.test_page import hostile as hostile_canary
from tests.validation.page_data import version_report
from tests.validation.test_html import hostile
from validation.canary.page import render as render_canary
from validation.html import render

PICTURES = {"version": 11, "hostile version": 11, "canary": 4}


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_pages_are_whole_at_1280_and_420_pixels(tmp_path: Path) -> None:
    canary = report(tmp_path, 2500, failing=0.02, slower=0.01)
    pages = {
        "version": render(version_report()),
        "hostile version": render(hostile(version_report())),
        "canary": render_canary(hostile_canary(canary)),
    }
    found = laid_out(tmp_path, pages)
    assert len(found) == 6
    for name, seen in found.items():
        page = name.rpartition(" at ")[0]
        assert (seen["overflow"], seen["wide"], seen["cut"]) == (0, [], []), name
        assert seen["text"] >= 10, f"{name}: text of a picture is {seen['text']:.1f} px high"
        assert seen["svgs"] == PICTURES[page] and seen["tables"] >= 3, name
        assert 0 < seen["verdict"] < (400 if "hostile" not in name else 1000), (
            f"{name}: the verdict is not on the first screen"
        )
        assert seen["colours"] >= 4, f"{name}: the pictures have no colours"
