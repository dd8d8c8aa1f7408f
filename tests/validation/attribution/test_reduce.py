from hypothesis import given
from hypothesis import strategies as st

from validation.attribution.cuts import reduce


@given(st.integers(1, 40), st.sets(st.integers(0, 39), min_size=1, max_size=6))
def test_a_conjunction_is_reduced_to_its_needed_items(count: int, needed: set[int]) -> None:
    needed = {index % count for index in needed}
    result = reduce(range(count), lambda chosen: needed <= set(chosen), 10_000)
    assert result.items is not None and set(result.items) == needed and result.minimal
    assert result.runs <= count**2 + 3 * count  # the method's own worst case


@given(st.integers(2, 25), st.data())
def test_the_reduced_set_passes_and_is_minimal(count: int, data: st.DataObject) -> None:
    draw = data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=3))

    def passes(chosen) -> bool:
        return any(way <= set(chosen) for way in draw)

    result = reduce(range(count), passes, 10_000)
    assert result.items is not None and passes(result.items)
    assert not any(passes([item_left for item_left in result.items if item_left != item]) for item in result.items)


def test_a_good_order_saves_most_of_the_runs() -> None:
    assert reduce(range(64), lambda chosen: 0 in chosen, 100).runs == 1
    assert reduce(range(64), lambda chosen: {0, 1} <= set(chosen), 100).runs <= 4


def test_reduction_ends_if_nothing_passes_or_the_runs_are_used() -> None:
    result = reduce(range(8), lambda _: False, 100)
    assert result.items is None and not result.minimal and result.runs == 4
    result = reduce(range(64), lambda chosen: {7, 50} <= set(chosen), 10)
    assert result.items is not None and {7, 50} <= set(result.items) and not result.minimal and result.runs == 10
    assert reduce([], lambda _: True, 5).items is None
