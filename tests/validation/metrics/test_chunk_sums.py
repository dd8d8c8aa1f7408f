import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.metrics.slice_sums import ChunkSums

ODD = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 1e-45, 0.0])


@given(
    st.integers(1, 200),
    st.integers(0, 99),
    st.sampled_from([0.0, 1e-3, -0.9999999, -1.0]),
    st.dictionaries(st.integers(), ODD),
)
def test_chunks_summed_together_equal_single_ones(size, seed, noise, odd):
    expected, errors = np.random.default_rng(seed).normal(size=(2, size)).astype(np.float32)
    actual = expected + np.float32(noise) * (expected if noise < 0 else errors)
    for place, value in odd.items():
        (actual if place % 2 else expected)[place % size] = value
    joint_sums, separate_sums = ChunkSums(0), ChunkSums(0)
    joint_sums.take_span(expected, actual, 16)
    for index in range(0, size, 16):
        separate_sums.take(expected[index : index + 16], actual[index : index + 16])
    for name in ("taken", "count", "max_abs", "peak", "nonfinite", "infinite", "worst"):
        assert getattr(joint_sums, name) == getattr(separate_sums, name), name
    assert joint_sums.sums == pytest.approx(separate_sums.sums, rel=1e-9, abs=1e-12 * separate_sums.sums[1])
    assert joint_sums.sums[2] == pytest.approx(separate_sums.sums[2], rel=1e-6, abs=0)  # where most of it cancels
