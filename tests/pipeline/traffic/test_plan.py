import numpy as np
import pytest

from enginesmith.core.errors import DataError, InputError
from enginesmith.core.types import Dim, TensorSpec
from pipeline.traffic.choice import OTHERS
from pipeline.traffic.place import BucketOptions, TrafficAtPlace, plan_task, powers_of_two, present_edges
from pipeline.traffic.request_grid import MOST_ALONE, grid_of
from tests.pipeline.traffic.instances import BATCH, INPUTS, LENGTH, task_of, trace_of_sizes
from validation.traffic.batching_simulation import BatchPolicy


def test_the_batcher_fills_the_batch_dim_by_default():
    task = task_of(trace_of_sizes([1, 2, 3]))
    assert task.chosen == ("length",) and task.policy == BatchPolicy(8, 0.0) and task.remarks == ()
    assert task.grid.edges_of("length").tolist() == [1, 2, 3, 64]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BucketOptions(("lenght",)), "'lenght' is not a dynamic dim of the model; .*length"),
        (BucketOptions(("fixed",)), "'fixed' has only the size 7"),
        (BucketOptions(batch=9), r"--batch 9 is more than dims.batch accepts \(1..8\)"),
        (BucketOptions(("batch",), batch=4), "batch gets no buckets of its own if requests are batched"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    dims = (BATCH, LENGTH, Dim("fixed", 7, 7, 7))
    inputs = (*INPUTS, TensorSpec("more", "float32", ("batch", "fixed")))
    with pytest.raises(InputError, match=words):
        task_of(trace_of_sizes([1, 2], fixed=[7, 7]), options, dims, inputs)


def test_without_times_batches_are_unknown():
    untimed_trace = trace_of_sizes([1, 2, 3], None)
    with pytest.raises(DataError, match="no times of arrival, so how batches form is not known"):
        task_of(untimed_trace, BucketOptions(batch=4, max_profiles=2))
    with pytest.raises(DataError, match="no times of arrival"):
        task_of(untimed_trace, BucketOptions(wait_s=0.01, max_profiles=2))
    with pytest.raises(InputError, match=r"a profile has no price.*--most"):
        task_of(untimed_trace)
    task = task_of(untimed_trace, BucketOptions(max_profiles=2))
    assert task.policy is None and "each request is taken to run alone" in task.remarks[0] and task.grid.seconds == 0
    rated_task = task_of(trace_of_sizes([5] * 2000, None), BucketOptions(rate=50.0))
    assert rated_task.policy == BatchPolicy(8, 0.0) and rated_task.grid.seconds == pytest.approx(40.0, rel=0.1)


def test_a_model_without_a_batch_has_no_policy():
    inputs = (TensorSpec("x", "float32", (3, "length")),)
    trace = trace_of_sizes([1, 2, 3])
    assert task_of(trace, dims=(LENGTH,), inputs=inputs).policy is None
    with pytest.raises(InputError, match="cannot be batched"):
        task_of(trace, BucketOptions(batch=4), (LENGTH,), inputs)
    with pytest.raises(InputError, match="no dynamic dim but the batch"):
        task_of(trace, dims=(BATCH,), inputs=(TensorSpec("x", "float32", ("batch", 8)),))
    only_task = task_of(trace, BucketOptions(("batch",)), (BATCH,), (TensorSpec("x", "float32", ("batch", 8)),))
    assert only_task.chosen == ("batch",) and only_task.batch is None and only_task.policy is None


def test_more_buckets_than_sizes_are_remarked():
    task = task_of(trace_of_sizes([4, 9, 9]), BucketOptions(max_profiles=30))
    assert "length has 2 distinct sizes in the traffic" in task.remarks[0]


def test_the_rate_is_that_of_the_real_traffic():
    trace = trace_of_sizes([5] * 1000, 10.0)
    sampled_task = plan_task(INPUTS, (BATCH, LENGTH), TrafficAtPlace(trace, (), sampling=0.25), trace, BucketOptions())
    assert sampled_task.grid.seconds == pytest.approx(25.0, rel=0.1)
    task = plan_task(INPUTS, (BATCH, LENGTH), TrafficAtPlace(trace, (), 0.25), trace, BucketOptions(rate=500.0))
    assert task.grid.seconds == pytest.approx(2.0, rel=0.01)


def test_edges_are_multiples_of_the_dims():
    steps = Dim("length", 16, 160, 160, (), 16)
    task = task_of(trace_of_sizes([3, 17, 33, 60]), dims=(BATCH, steps))
    assert task.grid.edges_of("length").tolist() == [16, 32, 48, 64, 160]
    assert task.edges(powers_of_two) == {"length": (16, 32, 64, 128, 160)}
    assert task.edges(OTHERS["one profile"]) == {"length": (160,)}
    shrunk_task = task_of(trace_of_sizes([3, 17, 33, 60]), BucketOptions(shrink=True), (BATCH, steps))
    assert shrunk_task.grid.edges_of("length").tolist() == [16, 32, 48, 64]
    bucketed_task = task_of(trace_of_sizes([3, 4]), dims=(BATCH, Dim("length", 1, 64, 64, (8, 64))))
    assert bucketed_task.edges(present_edges) == {"length": (8, 64)}


def test_many_sizes_are_thinned_and_long_traces_cut():
    trace = trace_of_sizes(np.random.default_rng(0).integers(1, 5000, 150_000))
    wide_dim = Dim("length", 1, 5000, 5000)
    grid = grid_of(trace, (BATCH, wide_dim), "batch", ("length",), tops={"length": 5000}, at=trace.at)
    assert len(grid.edges[0]) <= MOST_ALONE + 1 and grid.edges[0][-1] == 5000 and len(grid) == 100_000
    assert (grid.edges[0][grid.places[:, 0]] >= grid.sizes[:, 0]).all()
    assert grid.seconds == pytest.approx(trace.at[-1] * 2 / 3, rel=0.05) and (np.diff(grid.at) >= 0).all()


def test_too_many_dims_are_refused():
    names = ("a", "b", "c", "d", "e")
    dims = tuple(Dim(name, 1, 4, 4) for name in names)
    with pytest.raises(InputError, match="b, c, d, e are 4 dims, but at most 3"):
        sizes = {name: [1, 2] for name in names}
        task_of(trace_of_sizes([1, 2], **sizes), dims=dims, inputs=(TensorSpec("x", "int8", names),))
