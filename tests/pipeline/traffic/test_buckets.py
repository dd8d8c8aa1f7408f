"""The price of a profile, and engines without a report."""

from dataclasses import replace

import psutil
import pytest

from pipeline.traffic.buckets import price_profile
from tests.validation.latency.reports import latency_report


def test_a_profile_costs_its_build_and_its_share_of_the_memory():
    report = latency_report()
    most = max(bucket.memory_bytes for bucket in report.buckets)
    loaded = replace(report, loaded_bytes=most - psutil.virtual_memory().total // 1000, memory_resettable=True)
    found = price_profile(loaded, 3.0, None)
    assert found.seconds_a_day == pytest.approx(3.0 + 86.4, rel=0.01) and "3 s of compiling" in found.words
    unknown = price_profile(replace(loaded, memory_resettable=False), None, None)
    assert unknown.seconds_a_day == 0.0 and "no build on record" in unknown.words
    assert price_profile(loaded, 3.0, 7.5).seconds_a_day == 7.5
