"""The pages in a browser: verdict, tables and pictures are there, nothing overflows, and all text can be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.core.codec import encode
from enginesmith.core.reports.latency import BucketLatency, LatencyReport
from tests.validation.browser import CHROMIUM, laid_out
from tests.validation.canary.reports import report
from tests.validation.canary.test_page import hostile as hostile_canary
from tests.validation.latency.reports import ENGINE, latency_report
from tests.validation.page_data import version_report
from tests.validation.reporting.test_html import hostile, render
from validation.canary.page import render as render_canary

PICTURES = {"version": 10, "hostile version": 10, "canary": 3}


def widest() -> LatencyReport:
    """A latency report whose table has as much in every cell as there can be."""

    def fill(bucket: BucketLatency) -> BucketLatency:
        quantiles = tuple(replace(item, value=188e-6, low=123e-6, high=19.1e-3) for item in bucket.quantiles)
        more_fields = {"streams": 4, "streams_items_per_s": 123e6, "device_bytes": 999_000_000, "steady": False}
        name = f"{bucket.name} length=128 width=224"
        return replace(bucket, name=name, quantiles=quantiles, runs=199_000, **more_fields)

    result = latency_report(others=0.8)
    return replace(result, buckets=tuple(map(fill, result.buckets)))


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_pages_are_whole_at_every_width(tmp_path: Path) -> None:
    canary = report(tmp_path, 2500, failing=0.02, slower=0.01)
    pages = {
        "version": render({**version_report(), "latencies": {ENGINE: [encode(widest())]}}),
        "hostile version": render(hostile(version_report())),
        "canary": render_canary(hostile_canary(canary)),
    }
    result = laid_out(tmp_path, pages)
    assert len(result) == 15
    for name, seen in result.items():
        page = name.rpartition(" at ")[0]
        assert (seen["overflow"], seen["wide"], seen["cut"], seen["clipped"]) == (0, [], [], []), name
        if page == "version":
            assert "timings" not in seen["scrolled"], f"{name}: a table is cut at its right edge"
        assert seen["text"] >= (10 if seen["width"] >= 420 else 8), (
            f"{name}: text of a picture is {seen['text']:.1f} px high"
        )
        assert seen["svgs"] == PICTURES[page] and seen["tables"] >= 3, name
        assert 0 < seen["verdict"] < (400 if "hostile" not in name else 1200), (
            f"{name}: the verdict is not on the first screen"
        )
        assert seen["colours"] >= 4, f"{name}: the pictures have no colours"
