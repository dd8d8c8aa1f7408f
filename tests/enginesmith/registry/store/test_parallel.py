import threading
from concurrent.futures import Future

import pytest

from enginesmith.registry.store.parallel import side_by_side
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("count", [0, 1, 2, 33, 5000])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    assert list(side_by_side(lambda item: item * 2, range(count), at_once=4)) == [(n, n * 2) for n in range(count)]


def test_requests_run_in_parallel_up_to_a_limit() -> None:
    gate, started_items = threading.Barrier(4, timeout=PATIENCE_S), []

    def work(item: int) -> int:
        started_items.append(item)
        if item % 64 == 0 and item < 256:
            gate.wait()  # passes only when four threads are here, each at the first item of its part
        return item

    results = side_by_side(work, range(4000), at_once=4)
    assert next(results) == (0, 0)
    assert len(started_items) < 2000
    assert sum(1 for _ in results) == 3999


def test_items_of_long_work_are_handed_over_one_by_one() -> None:
    started_items: list[int] = []
    results = side_by_side(started_items.append, range(400), at_once=4, most_in_part=1)
    next(results)
    assert len(started_items) <= 9
    results.close()  # type: ignore[attr-defined]


def test_an_error_is_raised_at_its_item() -> None:
    def work(item: int) -> int:
        if item == 7:
            raise ValueError("seven")
        return item

    items = []
    with pytest.raises(ValueError, match="seven"):
        for item, _ in side_by_side(work, range(20), at_once=2):
            items.append(item)
    assert items == list(range(7))[: len(items)] and len(items) > 4


def test_after_an_error_no_waiting_part_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, cancelled_semaphore, begun_items = Future.cancel, threading.Semaphore(0), []

    def cancel_and_tell(future: "Future[object]") -> bool:
        answer = cancel(future)
        cancelled_semaphore.release()
        return answer

    def work(item: int) -> int:
        begun_items.append(item)
        if item == 0:
            raise ValueError("none")
        if item == 5:  # the first of the second part, while the third one waits for the thread
            cancelled_semaphore.acquire(timeout=2)
            cancelled_semaphore.acquire(timeout=2)
        return item

    monkeypatch.setattr(Future, "cancel", cancel_and_tell)
    with pytest.raises(ValueError, match="none"):
        list(side_by_side(work, range(20), at_once=1))
    assert max(begun_items) < 10
