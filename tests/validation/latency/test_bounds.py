"""The roofline turns with what is planted: a product is arithmetic, an addition is bytes, tiny nodes are overhead.

The limits and the times are measured on this machine, one right after the other. A neighbour can slow down either of
them alone, so that what is not seen at once is measured again, twice at most.
"""

import numpy as np
import pytest

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from enginesmith.core.reports.breakdown import NodeCost, Roofs
from enginesmith.core.types import BuildRequest, Engine, Target, TensorSpec
from tests.validation.latency import nets
from validation.latency.measurement.loop import latencies
from validation.latency.roofline.breakdown import break_down, diagnose_node, diagnose_run
from validation.latency.roofline.costs import graph_costs, measure_roofs

PLANTED = {"compute": nets.huge_product, "bandwidth": nets.big_addition, "overhead": nets.many_tiny}


@pytest.mark.parametrize("bound", PLANTED)
def test_a_planted_bound_is_found(bound, tmp_path):
    path = nets.save(PLANTED[bound](), tmp_path / "net.onnx")
    for _ in range(3):
        result = measured(path, tmp_path)
        rows = result.profile.nodes
        seen_bounds = {result.diagnosis.bound, bound if bound == "overhead" else rows[0].diagnosis.bound}
        if seen_bounds == {bound} and result.diagnosis.clear:
            break
    assert seen_bounds == {bound}
    assert result.diagnosis.clear
    assert len(rows) == result.graph.nodes
    assert {row.cost.macs for row in rows} == {768**3 if bound == "compute" else 0}


def measured(path, folder):
    roofs = measure_roofs(lambda part: OrtSession(part, optimized=False), folder, ["float32"], 0.02)
    backend = OnnxRuntime()
    with backend.open_part(path) as session:
        specs = session.inputs
        inputs = {spec.name: np.ones(spec.shape, np.float32) for spec in specs}
        seconds = float(np.min(latencies(lambda: session.run(inputs), 0.05)))
    request = BuildRequest("a" * 64, "fp32", Target("cpu"), "onnxruntime", tuple(specs), (), ())
    profile = backend.profile(Engine(request, path, "a" * 64, 1, ".onnx"), inputs, 10, folder)
    graph = graph_costs(path, [TensorSpec("x", "float32", tuple(specs[0].shape))], {})
    return break_down("static", seconds, graph, profile, roofs)


LIMITS = Roofs({"float32": 1e9, "int8": 4e9}, 1e8, 1e9, 1000, 1e-5, 1e-6)


def cost(operations=0, moved=0, dtype="float32"):
    return NodeCost("n", "Op", dtype, operations // 2, operations, moved, 0)


def test_shares_are_minimum_times_over_the_measured_one():
    message = diagnose_run(1e-3, [cost(400_000, 900), cost(400_000, 0, "int8")], LIMITS, 1000, kernels_s=0.9e-3)
    assert message.compute == pytest.approx(0.5) and message.bandwidth == pytest.approx(0.0009)
    assert message.overhead == pytest.approx(0.012) and message.outside == pytest.approx(0.1)
    assert message.bound == "compute" and message.clear
    # More than the cache holds comes from memory, ten times slower.
    assert diagnose_run(1e-3, [cost(0, 2000)], LIMITS, 1001).bandwidth == pytest.approx(0.02)
    slow_diagnosis = diagnose_run(1.0, [cost(400_000)], LIMITS, 0)
    assert slow_diagnosis.bound == "compute" and not slow_diagnosis.clear
    assert diagnose_node(1e-6, cost(10, 10), LIMITS, 10).bound == "overhead"


def test_a_minimum_time_beyond_the_run_gives_no_bound():
    message = diagnose_run(1e-5, [cost(20_100)], LIMITS, 1000, kernels_s=1.2e-5)
    assert (message.outside, message.bound, message.clear) == (None, None, False)
    assert {message.compute, message.bandwidth, message.overhead} == {None}
    noise = diagnose_run(1e-3, [cost(1_050_000)], LIMITS, 1000)
    assert (noise.compute, noise.bound) == (1.0, "compute"), "two measurements differ a little"
    far = diagnose_node(1e-6, cost(4_000), LIMITS, 10)
    assert (far.bound, far.clear, far.compute) == ("compute", True, None), "far larger than the others"
