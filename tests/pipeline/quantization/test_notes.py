"""Why a graph has nothing of its precision, as its notes say it."""

from enginesmith.core.reports.breakdown import FloatNode
from pipeline.quantization.ranges import QuantizationNotes


def test_each_reason_is_told_once_and_that_of_most_nodes_first() -> None:
    reasons = ["it multiplies two activations"] * 2 + ["K=32 is no multiple of the block"] * 9
    kept = tuple(FloatNode(f"/{index}", "MatMul", why) for index, why in enumerate(reasons))
    idle = str(QuantizationNotes(float_nodes=kept, precision="int4 weights").idle)
    assert idle.count("it multiplies two activations") == idle.count("no multiple of the block") == 1
    assert idle.index("no multiple of the block") < idle.index("it multiplies two activations") and "..." not in idle
