from typing import Any

import pytest

from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import SpecError
from pipeline.compile.steps.keys import metrics_of
from pipeline.spec.model import ModelSpec, load_spec
from tests.pipeline.projects import Project
from validation.metrics.tasks.terms import AccuracyMetric, TaskMetric, TextMetric, TopKMetric

CTC = {"name": "ctc", "output": "logits", "floor": 0.9}


def with_metric(project: Project, metric: Any, labels: str | None = "label") -> ModelSpec:
    golden = {"data": "golden.npz", "metric": metric} | ({"labels": labels} if labels else {})
    project.change_spec(golden=golden)
    return load_spec(project.spec)


def mistakes(project: Project, metric: Any, labels: str | None = "label") -> list[str]:
    with pytest.raises(SpecError) as error:
        with_metric(project, metric, labels)
    return [line.removeprefix(f"{project.spec}:").partition(": ")[2] for line in error.value.lines]


def test_the_simplest_metric_is_one_accuracy(project: Project) -> None:
    spec = with_metric(project, {"output": "logits", "floor": 0.5})
    assert metrics_of(spec) == (AccuracyMetric("logits", floor=0.5, against="labels"),)
    assert with_metric(project, None) and metrics_of(load_spec(project.spec)) == ()


def test_several_metrics_are_read_in_order_and_survive_json(project: Project) -> None:
    spec = with_metric(
        project, [{**CTC, "space": 3, "word_error": 0.1}, {"name": "top_k", "output": "logits", "floor": None}]
    )
    first_metric, metric = metrics_of(spec)
    assert first_metric == TextMetric("logits", space=3, floor=0.9, word_error=0.1, against="labels")
    assert first_metric.limits == {"equal_texts": 0.9, "word_error": 0.1}
    assert metric == TopKMetric("logits", against="labels")
    assert decode(encode(first_metric), TaskMetric) == first_metric and decode(encode(metric), TaskMetric) == metric
    assert metrics_of(ModelSpec.model_validate(spec.model_dump(mode="json"))) == metrics_of(spec)


@pytest.mark.parametrize(
    ("labels", "against", "expected"),
    [("label", None, "labels"), (None, None, "original"), ("label", "original", "original")],
)
def test_given_labels_count_unless_the_original_is_named(project, labels, against, expected) -> None:
    (result,) = metrics_of(with_metric(project, CTC | ({"against": against} if against else {}), labels))
    assert result.against == expected


def test_vectors_are_compared_with_the_originals_despite_labels(project: Project) -> None:
    (result,) = metrics_of(with_metric(project, {"name": "embeddings", "output": "logits", "floor": 0.9}))
    assert result.against == "original"


@pytest.mark.parametrize(
    ("decides", "lifted"),
    [(False, ""), (True, "fp16 bf16 fp8 int8 int8-dynamic int4"), (["fp32", "int8"], "fp32 int8"), ([], "")],
)
def test_a_metric_decides_for_reduced_or_named_precisions(project: Project, decides: Any, lifted: str) -> None:
    spec = with_metric(project, {**CTC, "decides": decides})
    precisions = ("fp32", "fp16", "bf16", "fp8", "int8", "int8-dynamic", "int4")
    assert [name for name in precisions if metrics_of(spec, name)[0].decides] == lifted.split()
    assert not metrics_of(spec)[0].decides


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({**CTC, "name": "CTC"}, ["golden.metric: metric 'CTC' is not known; did you mean 'ctc'?"]),
        ({**CTC, "blnk": 1}, ["golden.metric.blnk: unknown key; did you mean 'blank'?"]),
        ([CTC, {**CTC, "name": "top_k", "flor": 1}], ["golden.metric.1.flor: unknown key; did you mean 'floor'?"]),
        (
            {**CTC, "floor": 2, "blank": "a"},
            ["golden.metric.floor: 2: must be 1 or less", "golden.metric.blank: 'a': must be a whole number"],
        ),
        ({**CTC, "word_error": 0.1}, ["golden.metric: word_error needs to know where words end; give space: INDEX"]),
        ({"name": "tokens", "output": "logits"}, ["has no limit; give floor: VALUE, equal_sequences: VALUE, or"]),
        ({**CTC, "floor": None, "decides": True}, ["metric ctc decides nothing without a limit; give floor: VALUE"]),
        ({**CTC, "decides": ["int9"]}, ["golden.metric.decides.0: 'int9' is not known; did you mean 'int"]),
        ([CTC, CTC], ["golden: there is a metric ctc of 'logits' before it; leave one out"]),
        ({**CTC, "output": "z"}, ["golden.metric.output 'z' is not one of the outputs ['logits']"]),
        (
            [CTC, {"name": "detection", "output": "logits", "scores": "s", "floor": 0.5}],
            ["golden.metric.1.scores 's' is not one of the outputs ['logits']"],
        ),
        (
            {"name": "detection", "output": "logits", "floor": 0.5, "nms": 0.4, "least_score": 0.2},
            ["least_score needs to know the scores", "nms needs to know the scores"],
        ),
        (
            {"name": "detection", "output": "logits", "floor": 0.5, "head": True, "classes": "logits"},
            ["a head has its own classes; leave it out"],
        ),
        ("ctc", ["golden.metric: 'ctc': must be a mapping of keys to values"]),
    ],
)
def test_each_mistake_is_a_line_of_its_own(project: Project, metric: Any, message: list[str]) -> None:
    actual = mistakes(project, metric)
    assert len(actual) == len(message), actual
    assert all(any(text in line for line in actual) for text in message), actual


def test_metrics_that_need_labels_are_refused_without_labels(project: Project) -> None:
    (line,) = mistakes(project, {"output": "logits", "floor": 0.9}, None)
    assert "metric accuracy needs labels; name the array that holds them, or take top_k" in line
    (line,) = mistakes(project, {**CTC, "against": "labels"}, None)
    assert "metric ctc needs labels; name the array that holds them" in line
    (line,) = mistakes(project, {"name": "embeddings", "output": "logits", "floor": 0.9, "against": "labels"})
    assert "golden.metric.against: 'labels' is not known; known: original" in line
