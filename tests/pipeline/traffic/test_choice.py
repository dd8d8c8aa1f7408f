from dataclasses import replace

import numpy as np
import psutil
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.types import Dim, TensorSpec
from pipeline.traffic.buckets import price_profile, remark_on_load
from pipeline.traffic.choice import choose_buckets, search_buckets
from pipeline.traffic.costs import resample_plans, serve_trace
from pipeline.traffic.place import BucketOptions
from tests.pipeline.traffic import instances
from tests.validation.latency.reports import latency_report
from validation.traffic.batching_simulation import BatchPolicy

RNG = np.random.default_rng(0)
TWO_KINDS = np.where(RNG.random(1000) < 0.7, RNG.integers(5, 10, 1000), RNG.integers(30, 36, 1000)).tolist()


def test_two_kinds_of_requests_get_buckets_at_their_maxima():
    task = instances.task_of(instances.trace_of_sizes(TWO_KINDS), BucketOptions(batch=1))
    choice = choose_buckets(task, instances.measure(task.first_sizes()), instances.measure, 3, 0.0)
    assert choice.edges == {"length": (9, 35, 64)}
    plans = {plan.name: plan for plan in choice.plans}
    assert [*plans] == ["chosen", "one profile", "powers of two", "present"]
    assert plans["powers of two"].edges["length"] == (1, 2, 4, 8, 16, 32, 64)
    direct_mean = np.mean([instances.seconds_at(1, 9 if size <= 9 else 35) for size in TWO_KINDS])
    assert plans["chosen"].seconds.value == pytest.approx(direct_mean, rel=0.02)
    assert plans["one profile"].seconds.value == pytest.approx(instances.seconds_at(1, 64), rel=0.02)
    saved_bytes = plans["one profile"].saved
    assert saved_bytes.low < saved_bytes.value < saved_bytes.high and saved_bytes.value == pytest.approx(
        1 - direct_mean / instances.seconds_at(1, 64), rel=0.02
    )
    assert plans["chosen"].saved is None and plans["chosen"].padding < 0.3 < plans["one profile"].padding


def test_chosen_edges_are_timed_themselves():
    requests = []

    def noting(sizes):
        requests.extend(sizes)
        return instances.measure(sizes)

    task = instances.task_of(instances.trace_of_sizes(TWO_KINDS), BucketOptions(batch=1))
    first = task.first_sizes()
    choice = choose_buckets(task, instances.measure(first), noting, 3, 0.0)
    assert {"batch": 1, "length": 35} in [*requests, *first] and {"batch": 1, "length": 9} in [*requests, *first]
    assert {request["length"] for request in [*requests, *first]} >= {8, 16, 32, 64}, "those of powers of two too"
    assert choice.timed == len(first) + len(requests)


def test_a_price_per_bucket_gives_fewer_buckets():
    task = instances.task_of(instances.trace_of_sizes(TWO_KINDS), BucketOptions(batch=1))
    drift = instances.measure(task.first_sizes())
    counts = [len(choose_buckets(task, drift, None, 64, price).edges["length"]) for price in (0.0, 200.0, 1e6)]
    assert counts[0] > counts[1] > counts[2] == 1


def test_with_a_batcher_fewer_buckets_batch_better():
    lengths = np.random.default_rng(1).integers(20, 41, 1500).tolist()
    times = instances.KnownTimes(lambda batch, length: 5e-3 + 1e-6 * batch * length)
    single_task = instances.task_of(instances.trace_of_sizes(lengths, 150.0), BucketOptions(batch=1))
    joint_task = instances.task_of(instances.trace_of_sizes(lengths, 150.0), BucketOptions(batch=8, wait_s=0.02))
    assert joint_task.policy == BatchPolicy(8, 0.02) and single_task.policy is None
    counts = [len(search_buckets(task, times, 64, 0.0)[0][0]) for task in (single_task, joint_task)]
    assert counts[0] > 10 > counts[1]
    _, served_trace = search_buckets(joint_task, times, 64, 0.0)
    many_trace = serve_trace(joint_task.grid, {"length": tuple(range(20, 65))}, times, joint_task.policy)
    assert served_trace.batch > 1.5 * many_trace.batch and served_trace.mean_s < 0.7 * many_trace.mean_s


def test_the_choice_never_costs_more_than_the_alternatives():
    """An engine that is always busy: costs of single buckets say that narrow ones are best, and full batches are."""
    lengths = np.random.default_rng(1).integers(1, 65, 1000).tolist()
    task = instances.task_of(instances.trace_of_sizes(lengths, 1e9), BucketOptions(batch=8, wait_s=0.002))
    times = [instances.latency(sizes, 5e-5 + 1e-7 * sizes["batch"] * sizes["length"]) for sizes in task.first_sizes()]
    choice = choose_buckets(task, times, None, 64, 0.0)
    assert all(plan.saved.value >= 0.0 for plan in choice.plans[1:]), choice.plans
    assert "one engine cannot carry this rate" in remark_on_load(choice)[0]
    (one_plan,) = [plan for plan in choose_buckets(task, times, None, 1, 0.0).plans if plan.name == "chosen"]
    assert one_plan.profiles == 1
    idle_task = instances.task_of(instances.trace_of_sizes(lengths, 10.0), BucketOptions(batch=8, wait_s=0.002))
    assert remark_on_load(choose_buckets(idle_task, times, None, 64, 0.0)) == ()


def test_two_dims_share_one_number_of_profiles():
    rng = np.random.default_rng(2)
    trace = instances.trace_of_sizes(rng.integers(1, 65, 400), width=rng.choice([3, 30], 400))
    inputs = (TensorSpec("image", "float32", ("batch", "length", "width")),)
    dims = (instances.BATCH, instances.LENGTH, Dim("width", 1, 32, 32))
    task = instances.task_of(trace, BucketOptions(batch=1), dims, inputs)
    choice = choose_buckets(task, instances.measure(task.first_sizes()), instances.measure, 8, 0.0)
    assert choice.edges["width"] == (3, 32) and len(choice.edges["length"]) == 4
    only_task = instances.task_of(trace, BucketOptions(("width",), batch=1), dims, inputs)
    assert choose_buckets(only_task, instances.measure(only_task.first_sizes()), None, 8, 0.0).edges.keys() == {"width"}


def test_a_size_beyond_recorded_times_names_the_timing_command():
    task = instances.task_of(instances.trace_of_sizes([3, 50]), BucketOptions(batch=1))
    with pytest.raises(DataError, match=r"length=3 is beyond what was timed.*enginesmith profile"):
        choose_buckets(
            task,
            [instances.latency({"batch": 1, "length": 8}, 1.0), instances.latency({"batch": 1, "length": 64}, 2.0)],
            None,
            4,
            0,
        )


def test_intervals_contain_the_truth_for_most_samples():
    """Of 40 traces of one process, 95 % intervals of what is saved hold the saving over a long trace in 33 at least."""
    rng = np.random.default_rng(5)
    times = instances.KnownTimes()

    def saved(sizes, seed):
        task = instances.task_of(instances.trace_of_sizes(sizes, seed=seed), BucketOptions(batch=1))
        plans = [serve_trace(task.grid, {"length": edges}, times, None) for edges in ((10, 64), (64,))]
        resamples = resample_plans(plans, seed)
        return 1 - plans[0].mean_s / plans[1].mean_s, np.quantile(1 - resamples[0] / resamples[1], (0.025, 0.975))

    def draw(count):
        return np.where(rng.random(count) < 0.5, 5, 40)

    truth, _ = saved(draw(100_000), 0)
    assert sum(low <= truth <= high for low, high in (saved(draw(300), seed)[1] for seed in range(40))) >= 33


def test_a_profile_costs_its_build_and_its_share_of_the_memory():
    report = latency_report()
    max_bytes = max(bucket.memory_bytes for bucket in report.buckets)
    loaded = replace(report, loaded_bytes=max_bytes - psutil.virtual_memory().total // 1000, memory_resettable=True)
    result = price_profile(loaded, 3.0, None)
    assert result.seconds_a_day == pytest.approx(3.0 + 86.4, rel=0.01) and "3 s of compiling" in result.words
    unknown_price = price_profile(replace(loaded, memory_resettable=False), None, None)
    assert unknown_price.seconds_a_day == 0.0 and "no build on record" in unknown_price.words
    assert price_profile(loaded, 3.0, 7.5).seconds_a_day == 7.5
