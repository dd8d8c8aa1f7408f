"""From what a spec asks to the score that measures it."""

from collections.abc import Callable, Mapping
from typing import Any

from validation.metrics.tasks.classes import Accuracy, TopK
from validation.metrics.tasks.detection import Detection
from validation.metrics.tasks.embeddings import Embeddings
from validation.metrics.tasks.likelihood import Perplexity
from validation.metrics.tasks.regression import Regression
from validation.metrics.tasks.scores import Score
from validation.metrics.tasks.segmentation import Segmentation
from validation.metrics.tasks.signals import Signals
from validation.metrics.tasks.terms import TaskTerms
from validation.metrics.tasks.texts import Texts
from validation.metrics.tasks.tokens import Tokens

MEASURES: Mapping[str, Callable[[Any], Score[Any, Any]]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "detection": Detection,
    "ctc": Texts,
    "embeddings": Embeddings,
    "regression": Regression,
    "segmentation": Segmentation,
    "si_sdr": Signals,
    "tokens": Tokens,
    "perplexity": Perplexity,
}


def score_of(terms: TaskTerms) -> Score[Any, Any]:
    """An empty score of a kind of task metric, by its name."""
    return MEASURES[terms.name](terms)
