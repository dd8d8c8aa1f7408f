"""What the keys of steps hold of installed packages."""

from typing import Any

import pytest

from pipeline.compile.steps.keys import code_key, unreached_by
from pipeline.compile.steps.proofs import CheckEngine
from pipeline.spec.model import ModelSpec

DECODER: dict[str, Any] = {
    "model": "words",
    "source": {"onnx": "words.onnx"},
    "inputs": {
        "ids": {"dtype": "int64", "shape": ["batch", 1]},
        "past": {"dtype": "float32", "shape": ["batch", 4]},
    },
    "state": {"past": {"output": "present", "initial": 0}},
    "targets": ["cpu"],
    "dims": {"batch": {"min": 1, "max": 4}},
    "sampling": {"ids": "ids", "logits": "logits"},
}


@pytest.mark.parametrize("constraint", [None, {"regex": "[a-z]+"}])
def test_a_library_of_grammars_counts_for_proofs_with_one_alone(constraint: dict[str, str] | None) -> None:
    """Who installs it does not prove every engine anew."""
    prompts = {"given": ["a"], "most": 4} | ({"constraint": constraint} if constraint else {})
    spec = ModelSpec.model_validate(DECODER | {"sampling": DECODER["sampling"] | {"prompts": prompts}})
    versions = code_key(CheckEngine, without=unreached_by(spec))["versions"]
    assert ("llguidance" in versions) == (constraint is not None)
    assert "numpy" in versions
