"""Nothing is planted, and nothing fires: the same checks over 18 models with other weights, data and shapes.

Half of the engines add their sums up in another order than the graph, as another compiler's kernels would.
"""

from pathlib import Path

import pytest

from enginesmith.core.reports.proof import Check, describe
from enginesmith.core.types import Dim
from enginesmith.registry.verification import verify
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.bench import Bench
from tests.faults.nets import BATCH, MLP, mlp, reordered, rows
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, ranges_of, run
from tests.scheduling import slow_after_first
from validation.contracts.terms import BRIER, ECE, FLIPS, JS, KL, TOP_K

SEEDS = range(18)  # every one of DIMS with every one of TEXTS, in both orders of sums
DIMS = (BATCH, Dim("batch", 1, 3, 7), Dim("batch", 1, 8, 12, (8, 12)))
TEXTS = (MLP, MLP.replace("Relu", "Tanh"), MLP.replace("Relu", "Sigmoid"))
FORM = {"finite": True, "shape": ["batch", 10], "dtype": "float32", "range": [-1e3, 1e3]}
LIKE = {"kl": KL, "js": JS, "flips": FLIPS, "top_k": TOP_K, "ece": ECE, "brier": BRIER}
WHOLE = {"bitwise": {"runs": 3}, "structured": {"logits": FORM}, "distributional": {"rows": {"logits": LIKE}}}
BITS = {"bitwise": {"runs": 2}, "structured": {"logits": FORM}}


def broken(checks: list[Check]) -> list[str]:
    return [describe(check) for check in checks if not check.passed]


@pytest.mark.parametrize("seed", slow_after_first(SEEDS))
def test_no_check_fails_without_a_planted_fault(seed: int, tmp_path: Path) -> None:
    model, data = mlp(seed, TEXTS[seed // 6 % 3]), rows(1000 + seed, 24 + seed)
    labels = run(model, data, optimized=False).argmax(-1)
    bench = Bench(tmp_path / "bench", model, data, dims=(DIMS[seed % 3],), labels=labels)
    engine = bench.engine(reordered(bench.canonical(), seed) if seed % 2 else None)
    items = [*bench.checks, *engine.checks(WHOLE)]
    exported_model, bench.metrics = bench.canonical(), ()  # a floor is the spec's, and int8 may cost decisions by right
    ranges = ranges_of(exported_model, rows(2000 + seed, 64), ("x", "h", "n", "m", "logits"))
    graph, _ = quantize_int8(exported_model, ranges, (CPU, TENSORRT_FP32)[seed % 2])
    items += [*bench.graph_checks(graph, "int8"), *bench.engine(None, graph, "int8").checks(BITS)]
    assert broken(items) == [] and len(items) > 40
    assert [item.case for item in engine.fuzzed(seed=seed).cases if item.outcome == "failed"] == []
    assert verify(bench.store).sound
    if seed % 10 == 0:
        assert not engine.attribution().blamed and not bench.graph_attribution(graph, "int8").blamed
