from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import ModelProto

from builders.backends.onnxruntime import OrtSession
from enginesmith.core.reports.proof import Check, describe
from enginesmith.core.types import Precision, QuantizationScheme
from pipeline.quantization.schemes.cast import emulate
from pipeline.quantization.schemes.overrides import Override
from pipeline.quantization.schemes.write import write
from pipeline.quantization.search.repair import QuantizationRecipe, narrow_groups, propose
from pipeline.spec.quantization import Quantization
from tests.pipeline.quantization.search.outlier_nets import all_ranges, noise, outlier_net
from tests.pipeline.quantization.small_nets import CPU, TENSORRT, TENSORRT_FP32, x_net, x_values
from tests.validation.attribution.planted import golden_of, graph, with_names
from validation.attribution.result import Attribution, describe_proposal
from validation.attribution.sweep import attribute
from validation.comparison.sessions import drift_checks
from validation.limits.budget import default_budget
from validation.limits.terms import Budget

LIMITS = Budget(sqnr_db=28.0)


class Bench:
    """The checks of one model against the float model, and the attribution of one of its graphs."""

    def __init__(self, model: ModelProto, arrays: dict[str, np.ndarray], folder: Path, budget: Budget) -> None:
        self.folder, self.golden, self.budget = folder, golden_of(arrays), budget
        onnx.save(model, folder / "float.onnx")
        self.model = model

    def judge(self, candidate: ModelProto) -> Sequence[Check]:
        onnx.save(emulate(candidate), self.folder / "trial.onnx")
        pair = (OrtSession(self.folder / f"{name}.onnx", optimized=False) for name in ("float", "trial"))
        return drift_checks("quantization", *pair, self.golden, self.budget)

    def attributed(self, candidate: ModelProto) -> Attribution:
        pair = graph(self.model, self.folder, "reference"), graph(emulate(candidate), self.folder, "candidate")
        failed_texts = [describe(check) for check in self.judge(candidate) if not check.passed]
        return attribute("quantization", "int8", *pair, self.golden, self.budget, failed_texts)


def recipe_of(
    model: ModelProto, arrays: dict[str, np.ndarray], precision: Precision, scheme: object
) -> QuantizationRecipe:
    return QuantizationRecipe(model, precision, scheme, all_ranges(model, arrays), (), {}, True)


@pytest.mark.parametrize("scheme", [CPU, TENSORRT, TENSORRT_FP32])
def test_the_one_group_that_breaks_the_graph_is_left_in_float(scheme: QuantizationScheme, tmp_path: Path) -> None:
    model = with_names(outlier_net())
    recipe = recipe_of(model, noise(64), "int8", scheme)
    bench = Bench(model, noise(64), tmp_path, LIMITS)
    narrow_model = recipe.write()[0]
    judgement_before = bench.judge(narrow_model)
    assert not all(check.passed for check in judgement_before)
    result = bench.attributed(narrow_model)
    assert result.rows[0].node == "MatMul_u"
    message = propose(recipe, result, judgement_before, bench.judge)
    assert message.groups == 3 and message.leave == (("MatMul_u",),) and message.minimal and message.runs == 1
    spec = Quantization(**yaml.safe_load(message.snippet)["quantization"])
    rules = [Override(item.match, item.precision) for item in spec.overrides]
    pasted_path, _ = write(model, "int8", scheme, recipe.ranges, rules)
    assert all(check.passed for check in bench.judge(pasted_path))
    (quality,) = [change for change in message.quality if change.before.name == "sqnr_db"]
    assert quality.before.value < 28 <= quality.after.value
    assert any("with 1 of 3 groups in float" in line for line in describe_proposal(message))


def test_the_specs_rules_stay_in_front(tmp_path: Path) -> None:
    model = with_names(outlier_net())
    recipe = replace(recipe_of(model, noise(64), "int8", CPU), rules=(Override("*_z", "fp32"),))
    bench = Bench(model, noise(64), tmp_path, LIMITS)
    narrow_model = recipe.write()[0]
    message = propose(recipe, bench.attributed(narrow_model), bench.judge(narrow_model), bench.judge)
    assert message.groups == 2
    assert [item.match for item in message.overrides] == ["*_z", "MatMul_u"]


def test_without_a_passing_choice_nothing_is_proposed(tmp_path: Path) -> None:
    model = with_names(outlier_net())
    recipe = recipe_of(model, noise(64), "int8", CPU)
    bench = Bench(model, noise(64), tmp_path, Budget(max_abs=-1.0))
    narrow_model = recipe.write()[0]
    message = propose(recipe, bench.attributed(narrow_model), bench.judge(narrow_model), bench.judge)
    assert message.leave is None and "no proposal" in next(describe_proposal(message))


def test_overflowing_nodes_of_a_cast_stay_in_fp32(tmp_path: Path) -> None:
    text = "a = MatMul(x, w) b = Mul(a, k) c = Mul(a, b) d = Sqrt(c) y = Div(d, k)"
    model = with_names(x_net(text, k=np.float32(8000)))
    recipe = QuantizationRecipe(model, "fp16", None, None, (), {}, True)
    bench = Bench(model, x_values(), tmp_path, default_budget("quantization", "fp16"))
    narrow_graph = recipe.write()[0]
    result = bench.attributed(narrow_graph)
    assert len(narrow_groups(recipe, result)) == 5
    message = propose(recipe, result, bench.judge(narrow_graph), bench.judge)
    assert {name for group in message.leave for name in group} >= {"Mul_c"} and len(message.leave) <= 2
