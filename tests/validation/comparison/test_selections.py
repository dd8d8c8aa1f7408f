import numpy as np
import pytest
from onnx import parser

from builders.onnx_graphs.structure import find_selected
from enginesmith.core.reports.proof import Check
from validation.comparison.selections import Selections, selected_of
from validation.comparison.sessions import StageComparison
from validation.golden.golden_set import Case
from validation.limits.budget import Budgets, OutputLimits, default_budget
from validation.metrics.tasks.terms import DetectionMetric

SAMPLES, ROWS = 40, 12
KINDS = {"boxes": "each", "scores": "each", "classes": "each", "count": "count"}


def detections(seed: int = 0) -> dict[str, np.ndarray]:
    """Five clear boxes per sample, and seven of almost no score, of four classes, the last of which is rare."""
    rng = np.random.default_rng(seed)
    scores = np.sort(np.where(np.arange(ROWS) < 5, 0.8, 0.01) * rng.uniform(0.5, 1, (SAMPLES, ROWS)))[:, ::-1]
    low, size = rng.uniform(0, 200, (SAMPLES, ROWS, 2)), rng.uniform(10, 40, (SAMPLES, ROWS, 2))
    classes = rng.choice(4, (SAMPLES, ROWS), p=[0.5, 0.3, 0.15, 0.05])
    boxes = np.concatenate([low, low + size], axis=2)
    count = (scores > 0.25).sum(axis=1, keepdims=True)
    return {"boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32), "classes": classes, "count": count}


def failed(expected, actual, kinds=None) -> set[str]:
    comparison = StageComparison("quantization", None, {}, selections=Selections(kinds or KINDS))
    comparison.add(Case("0", "golden", {"x": np.zeros((SAMPLES, 1))}, {}), expected, actual)
    checks: list[Check] = [*comparison.checks(OutputLimits(Budgets(default_budget("quantization", "int8"))))]
    assert any(check.name == "max_selected_changed" for check in checks)
    return {check.name for check in checks if not check.passed}


def with_rows(outputs, change) -> dict[str, np.ndarray]:
    """Rows, changed by a function of them, in the order of their scores."""
    changed_golden = change({name: array.copy() for name, array in outputs.items()})
    order = np.argsort(-changed_golden["scores"], axis=1, kind="stable")
    moved_axes = {
        name: np.take_along_axis(changed_golden[name], order[..., None] if name == "boxes" else order, 1)
        for name in ("boxes", "scores", "classes")
    }
    return {**moved_axes, "count": (changed_golden["scores"] > 0.25).sum(axis=1, keepdims=True)}


def noisy(outputs):
    rng = np.random.default_rng(1)
    return outputs | {
        "scores": np.abs(outputs["scores"] + rng.normal(0, 0.02, outputs["scores"].shape)).astype(np.float32),
        "boxes": outputs["boxes"] + rng.normal(0, 1, outputs["boxes"].shape).astype(np.float32),
    }


def without_class(index):
    return lambda outputs: outputs | {"scores": np.where(outputs["classes"] == index, 0.001, outputs["scores"])}


def half_of_all(outputs):
    return outputs | {"scores": np.where(np.arange(ROWS) % 2, 0.001, outputs["scores"])}


def same_sizes(outputs):
    low = outputs["boxes"][..., :2]
    return outputs | {"boxes": np.concatenate([low, low + 25], axis=2)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("change", "check"),
    [
        (noisy, None),
        (without_class(3), "max_classes_lost"),
        (half_of_all, "max_selected_changed"),
        (same_sizes, "max_selected_changed"),
    ],
)
def test_near_ties_may_swap_and_lost_rows_fail(change, check, packed) -> None:
    expected = detections()
    actual = with_rows(expected, change)
    kinds = KINDS
    if packed:  # one output of box, score and class
        kinds = {"y": "each"}
        expected, actual = (
            {
                "y": np.concatenate([of["boxes"], of["scores"][..., None], of["classes"][..., None]], 2).astype(
                    np.float32
                )
            }
            for of in (expected, actual)
        )
    assert (check in failed(expected, actual, kinds)) if check else not failed(expected, actual, kinds)


def test_lists_of_other_lengths_are_compared_by_their_matches() -> None:
    rows = np.stack([np.zeros(60), np.arange(60) % 3, np.arange(60) * 7 % 30], axis=1).astype(np.int64)
    assert not failed({"selected": rows}, {"selected": rows[np.arange(60) != 7][::-1]}, {"selected": "all"})
    failed_checks = failed({"selected": rows}, {"selected": rows[rows[:, 1] < 2]}, {"selected": "all"})
    assert failed_checks == {"max_selected_changed", "max_classes_lost"}
    assert "max_selected_changed" in failed({"selected": rows}, {"selected": rows[:0]}, {"selected": "all"})


def graph(nodes: str, outputs: str, inputs: str = "float[batch,8,4] boxes, float[batch,3,8] scores"):
    constants = "int64[1] k = {5}, float[1] least = {0.5}"
    header = '<ir_version: 8, opset_import: ["": 17]>'
    return parser.parse_model(f"{header} g ({inputs}) => ({outputs}) <{constants}> {{ {nodes} }}").graph


def test_selected_rows_are_found_in_the_graph() -> None:
    nms = "chosen = NonMaxSuppression(boxes, scores, k, least, least)"
    assert find_selected(graph(nms, "int64[n,3] chosen")) == {"chosen": "all"}
    top = "values, ids = TopK(first, k) count = ReduceSum<keepdims=1>(ids) mixed = MatMul(values, w)"
    outputs = "float[batch,5] values, int64[batch,5] ids, int64[batch,1] count, float[batch,5] mixed"
    result = graph(top, outputs, "float[batch,8] first, float[5,5] w")
    assert find_selected(result) == {"values": "each", "ids": "each", "count": "count"}
    single_graph = graph("values, ids = TopK(first, k)", "int64[batch,5] ids", "float[batch,8] first")
    assert find_selected(single_graph) == {}, "the order of ids is all that they say"
    metric = DetectionMetric("values", floor=0.9, decides=("int8",))
    assert selected_of(result, {"argmax_agreement": 0.9}, ()) == selected_of(result, {}, (metric,)) == {}
