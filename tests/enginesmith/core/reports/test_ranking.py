from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.reports.latency import is_shorter, order_by_evidence
from enginesmith.core.types import PRECISIONS, accuracy_order


def test_every_precision_has_a_rank() -> None:
    assert len({accuracy_order(name) for name in PRECISIONS}) == len(PRECISIONS)
    assert sorted(["int4", "int8", "fp16", "fp32", "mystery"], key=accuracy_order)[::4] == ["fp32", "mystery"]


INTERVALS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted).map(tuple), max_size=7)


@given(INTERVALS)
def test_a_measurably_faster_item_comes_first_and_else_the_preferred_one(times: list[tuple[int, int]]) -> None:
    result = order_by_evidence(range(len(times)), lambda one, other: is_shorter(times[one], times[other]))
    assert sorted(result) == list(range(len(times)))
    for place, item in enumerate(result):
        assert not any(is_shorter(times[later_item], times[item]) for later_item in result[place:])
        beaten = [other for other in result[place:] if any(is_shorter(times[x], times[other]) for x in result[place:])]
        assert item == min(set(result[place:]) - set(beaten))
