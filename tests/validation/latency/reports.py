"""A made-up latency report of realistic size, through the values that real ones are made of."""

from dataclasses import replace

import numpy as np

from builders.backends.optional_methods import NodeTime, RunProfile
from enginesmith.core.reports.breakdown import Roofs
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, LatencyTerms, MachineKind, SystemLoad
from validation.latency.measurement.quantiles import curve, quantiles
from validation.latency.roofline.breakdown import break_down, executed_costs
from validation.latency.roofline.costs import GraphCosts, GraphNode

ENGINE = "e" * 64
ROOFS = Roofs({"float32": 5.2e11, "int8": 1.6e12}, 1.9e10, 5e10, 18 << 20, 2.9e-5, 6e-7)


def bucket(batch: int, count: int = 500, others: float = 0.02) -> BucketLatency:
    rng = np.random.default_rng(batch)
    series = 4e-5 * batch * np.exp(0.05 * rng.standard_normal(count))
    quiet_load = SystemLoad(1.0, 0.3, others, 0.0, 2.0, None, 2)
    return BucketLatency(
        f"batch={batch}", {"batch": batch}, batch, 1e-3, count + 20, 20, True, float(series.mean()), quantiles(series),
        curve(series), 12_000_000 + batch, quiet_load, quantiles(0.9 * series, (0.5,))[0],
    )  # fmt: skip


def profile(layers: int = 14) -> RunProfile:
    nodes = []
    for index in range(layers):
        name = f"/encoder/layers.{index}/attention/output/dense/MatMul"
        shapes = ("float32", (8, 64, 384)), ("float32", (384, 384 * (1 + index % 2)))
        nodes.append(NodeTime(name, "MatMul", 4e-4 + 1e-5 * index, shapes, (("float32", (8, 64, 384)),)))
        tensor = ("float32", (8, 64, 384))
        nodes.append(NodeTime(f"/encoder/layers.{index}/Add", "Add", 6e-5, (tensor, tensor), (tensor,)))
    return RunProfile(nodes, 30, 7e-3)


def latency_report(others: float = 0.02, **changes: object) -> LatencyReport:
    result = profile()
    costs = executed_costs(result)
    graph = GraphCosts([GraphNode(cost, {}, {}) for cost in costs], ["y"], ["/mask/NonZero"])
    usual_report = LatencyReport(
        unit="cpu fp32 onnxruntime",
        engine=ENGINE,
        golden="f" * 64,
        machine=MachineKind("Intel(R) Xeon(R) Processor @ 2.50GHz", "x86_64-avx512-vnni", 2, "Linux", ()),
        created_at="2026-11-20T08:43:35+00:00",
        asked=LatencyTerms(0.1, "few"),
        size_bytes=142_653,
        load_s=0.012,
        loaded_bytes=9_000_000,
        memory_resettable=True,
        buckets=(bucket(1, 300), bucket(8, others=others), bucket(32)),
        import_s=0.09,
        processes=5,
        anatomy=break_down("batch=8", 8e-3, graph, result, ROOFS),
    )
    return replace(usual_report, **changes)
