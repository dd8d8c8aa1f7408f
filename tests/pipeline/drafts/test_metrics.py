import pytest
import yaml

from enginesmith.core.types import TensorSpec
from pipeline.drafts.facts import FoundModel, suggest_metric
from pipeline.drafts.text import write_spec
from pipeline.spec.sections import Golden

IMAGE = [TensorSpec("x", "float32", ("batch", 3, 48, 160))]
SQUARE = [TensorSpec("images", "float32", ("batch", 3, 320, 320))]
TEXT = [TensorSpec("input_ids", "int64", ("batch", "sequence"))]

PAST = TensorSpec("past_key_values.0.key", "float32", ("batch", 2, "past", 8))
PRESENT = TensorSpec("present.0.key", "float32", ("batch", 2, "past + sequence", 8))
DECODER = [*TEXT, TensorSpec("position_ids", "int64", ("batch", "sequence")), PAST]


def output(name, *shape, dtype="float32"):
    return TensorSpec(name, dtype, shape)


@pytest.mark.parametrize(
    ("inputs", "outputs", "name"),
    [
        (IMAGE, [output("softmax_11.tmp_0", "batch", 20, 6625)], "ctc"),
        (IMAGE, [output("softmax_11.tmp_0", "batch", "d1", 6625)], "ctc"),
        (SQUARE, [output("output0", "batch", 22, 2100)], "detection"),
        (IMAGE, [output("output0", "batch", 22, "(floor(height/2) + 1)*(floor(width/2) + 1)")], "detection"),
        (IMAGE, [output("labels", "n", dtype="int64"), output("boxes", "n", 4), output("scores", "n")], "detection"),
        (IMAGE, [output("logits", "batch", 1000)], "top_k"),
        (TEXT, [output("logits", "batch", "sequence", 30522)], "tokens"),
        (TEXT, [output("last_hidden_state", "batch", "sequence", 384)], "embeddings"),
        (TEXT, [output("sentence_embedding", "batch", 384)], "embeddings"),
        (DECODER, [output("logits", "batch", "sequence", 300), PRESENT], "perplexity"),
        (TEXT, [output("logits", "batch", 2)], None),
        (IMAGE, [output("mask", "batch", 2, 48, 160)], None),
        (IMAGE, [output("y", "batch")], None),
        (IMAGE, [output("y")], None),
        (IMAGE, [], None),
    ],
)
def test_evident_metrics_are_suggested_in_spec_format(inputs, outputs, name):
    result = suggest_metric(inputs, outputs)
    assert result.get("name") == name
    if name:
        assert Golden.model_validate({"data": "golden.npz", "metric": result}).metrics[0].name == name


@pytest.mark.parametrize("golden", [None, "golden.npz"])
def test_the_suggestion_is_a_comment_that_can_be_pasted(golden):
    metric = {"name": "ctc", "output": "y: 1", "floor": 0.98}
    text = write_spec(FoundModel("m", {"onnx": "m.onnx"}, (), ("y",), metric=metric), None, golden)
    (line,) = [line for line in text.splitlines() if "# metric:" in line]
    assert yaml.safe_load(line.strip().removeprefix("# "))["metric"] == metric
    assert "metric" not in (yaml.safe_load(text).get("golden") or {})
