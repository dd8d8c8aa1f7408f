"""ONNX's own node tests: those of operators that are known pass, the others are refused with a reason."""

import re

import pytest

from builders.onnx_ops.graph import known_operators
from builders.onnx_torch.arrays import TORCH
from tests.builders.onnx_torch import node_cases

# The expected outputs are of a reference that takes scale * size, unrounded, for the resized length; onnxruntime, whose
# graphs are the yardstick here, and PyTorch take the length itself, and give what is given here.
OTHERWISE = {"test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners"}
# Of them every case of opset 13 and later is to pass, as far as torch has the types.
WHOLE = ("test_add", "test_relu", "test_softmax", "test_conv_", "test_gather", "test_layer_normalization", "test_slice")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, node_cases.Outcome]:
    return {outcome.case: outcome for outcome in node_cases.outcomes()}


@pytest.mark.slow
def test_no_result_is_wrong_and_no_error_is_torchs(outcomes):
    failed_reasons = {name: outcome.reason for name, outcome in outcomes.items() if outcome.kind == "failed"}
    assert failed_reasons.keys() == OTHERWISE, failed_reasons


def test_most_cases_pass(outcomes):
    """A floor, raised with the table of operators; what is refused is in the table that the module prints."""
    assert sum(outcome.kind == "passed" for outcome in outcomes.values()) >= 1486


def test_every_refusal_names_its_cause_and_a_remedy(outcomes):
    for outcome in outcomes.values():
        if outcome.kind == "refused":
            assert re.search(r"'|opset|local functions|Cast|QuantizeLinear", outcome.reason), outcome
            assert re.search(r"; |only tensors", outcome.reason), outcome


def test_no_operator_case_is_refused_for_a_missing_operator(outcomes):
    """Unless the graph has another one beside it."""
    for case in node_cases.cases():
        kinds = {node.op_type for node in case.model.graph.node}
        if kinds <= known_operators(TORCH) and {node.domain for node in case.model.graph.node} <= {"", "ai.onnx"}:
            assert "does not know this operator" not in outcomes[case.name].reason, case.name


@pytest.mark.parametrize("prefix", WHOLE)
def test_common_operators_are_complete(outcomes, prefix):
    chosen = {name: outcome for name, outcome in outcomes.items() if name.startswith(prefix)}
    missed_reasons = {name: outcome.reason for name, outcome in chosen.items() if outcome.kind != "passed"}
    assert len(chosen) >= 2
    assert all("torch has no operators" in reason for reason in missed_reasons.values()), missed_reasons
