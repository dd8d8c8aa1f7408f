import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.errors import DataError
from pipeline.quantization.ranges import Ranges

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
PAIRS = st.tuples(FLOATS, FLOATS).map(sorted).map(tuple)
RANGES = st.builds(
    Ranges,
    st.dictionaries(st.text(max_size=8), PAIRS, max_size=5),
    st.just("minmax"),
    st.just("a" * 64),
    st.integers(1),
)


@given(RANGES)
def test_json_gives_the_same_ranges_back(ranges: Ranges) -> None:
    assert Ranges.from_json(ranges.to_json()) == ranges and Ranges.from_json(ranges.to_json()).digest == ranges.digest


def test_the_digest_is_over_method_and_ranges_only() -> None:
    ranges = Ranges({"x": (0.0, 1.0), "y": (-1.0, 1.0)}, "minmax", "a" * 64, 8)
    assert ranges.digest == Ranges({"y": (-1.0, 1.0), "x": (0.0, 1.0)}, "minmax", "b" * 64, 9).digest
    assert ranges.digest != Ranges({"y": (-1.0, 1.0), "x": (0.0, 1.5)}, "minmax", "a" * 64, 8).digest
    assert ranges.digest != Ranges(ranges.tensors, "entropy", "a" * 64, 8).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"tensors": {"x": {"range": [1.0, 0.0]}}}, "'x' has the range"),
        ({"tensors": {"x": {"range": [0.0, float("nan")]}}}, "'x' has the range"),
        ({"tensors": {"x": {"range": [0.0, float("inf")]}}}, "'x' has the range"),
        ({"tensors": {"x": {"range": [0.0]}}}, "not a ranges file"),
        ({"tensors": ["x"]}, "not a ranges file"),
        ({"samples": "many"}, "not a ranges file"),
    ],
)
def test_a_wrong_ranges_file_is_refused(change: dict[str, object], message: str) -> None:
    good_document = Ranges({"x": (0.0, 1.0)}, "minmax", "a" * 64, 8).to_json()
    with pytest.raises(DataError, match=message):
        Ranges.from_json(good_document | change)


def test_reach_is_the_larger_magnitude() -> None:
    ranges = Ranges({"x": (-3.0, 2.0)}, "minmax", "a" * 64, 8)
    assert ranges.reach("x") == 3.0 and ranges.reach("y") is None
