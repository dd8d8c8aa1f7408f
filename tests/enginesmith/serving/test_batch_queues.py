"""The batching policy: what is ready when, and what is taken, by an independent account of the same words."""

import math

import numpy as np
import pytest

from enginesmith.serving.batcher import BatchQueues


def test_a_queue_is_ready_when_it_is_full_or_its_oldest_request_has_waited():
    queues = BatchQueues[str, int](4, 1.0)
    assert queues.ready_at() == math.inf and queues.take(0.0) is None
    queues.add("a", 1, 2, 10.0)
    assert queues.ready_at() == 11.0 and queues.take(10.9) is None
    assert queues.take(11.0) == ("a", [1])
    queues.add("a", 2, 2, 20.0)
    queues.add("a", 3, 2, 20.1)
    assert queues.ready_at() == -math.inf and queues.take(20.1) == ("a", [2, 3])


def test_the_ready_queue_with_the_oldest_request_comes_first():
    queues = BatchQueues[str, int](2, 5.0)
    queues.add("old", 1, 1, 0.0)
    queues.add("full", 2, 2, 1.0)
    assert queues.take(1.0) == ("full", [2])
    queues.add("full", 3, 2, 2.0)
    assert queues.take(5.0) == ("old", [1])
    assert queues.take(5.0) == ("full", [3])


def test_requests_are_taken_in_order_while_they_fit_and_a_large_first_one_is_taken_alone():
    queues = BatchQueues[str, int](4, 0.0)
    for item, samples in enumerate((3, 2, 1, 9, 1)):
        queues.add("a", item, samples, float(item))
    taken_items = []
    while result := queues.take(100.0):
        taken_items.append(result[1])
    assert taken_items == [[0], [1, 2], [3], [4]]


@pytest.mark.parametrize("seed", range(20))
def test_queues_behave_like_a_list_of_all_requests(seed):
    """The same policy by brute force over one list of waiting requests."""
    rng = np.random.default_rng(seed)
    most, wait_s, queues, waiting_buckets, now = 4, 1.0, BatchQueues[int, int](4, 1.0), [], 0.0
    for item in range(200):
        now += float(rng.exponential(0.3))
        bucket, samples = int(rng.integers(3)), int(rng.integers(1, 4))
        queues.add(bucket, item, samples, now)
        waiting_buckets.append((bucket, item, samples, now))
        if rng.random() < 0.4:
            of = {b: [w for w in waiting_buckets if w[0] == b] for b in {w[0] for w in waiting_buckets}}
            ready_names = [b for b, own in of.items() if sum(w[2] for w in own) >= most or now >= own[0][3] + wait_s]
            expected = None
            if ready_names:
                first_ready = min(ready_names, key=lambda b: of[b][0][3])
                actual_items, total = [], 0
                for w in of[first_ready]:
                    if actual_items and total + w[2] > most:
                        break
                    actual_items.append(w)
                    total += w[2]
                expected = (first_ready, [w[1] for w in actual_items])
                waiting_buckets = [w for w in waiting_buckets if w not in actual_items]
            assert queues.take(now) == expected


def test_all_queues_are_ready_at_the_end():
    queues = BatchQueues[str, int](4, 100.0)
    queues.add("a", 1, 1, 0.0)
    assert queues.take(1.0, all_ready=True) == ("a", [1]) and queues.take(1.0, all_ready=True) is None
