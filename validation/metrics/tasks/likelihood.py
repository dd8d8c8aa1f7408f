"""Language models: how likely the tokens that follow are to the candidate, and to the original model."""

from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from validation.metrics.drift import is_exact
from validation.metrics.tasks.scores import NOTHING, Score, TaskValue, output_of
from validation.metrics.tasks.terms import PerplexityTerms


@dataclass(frozen=True)
class Following:
    """What follows each place. expected: the original's log-probabilities [places, vocabulary].

    tokens: [places], negative where none counts; None: every token, as likely as the original has it.
    """

    expected: Array
    tokens: Array | None = None

    def __len__(self) -> int:
        return len(self.expected)


class Perplexity(Score[Following, Array]):
    """The probabilities that logits give, by softmax over the last axis in float64, at all places [.., vocabulary].

    kept_likelihood: geometric mean over the places of q(t) / p(t), of the candidate's probability q of the labelled
    token and the original's p: the original's perplexity over the candidate's. Without labels exp(-KL(p || q)), mean
    over the places, which is the same for tokens drawn from p. Equal models have 1; with labels a candidate may have
    more.  perplexity: exp of the mean of -ln q(t) (Jelinek et al., "Perplexity - a measure of the difficulty of speech
    recognition tasks", 1977); of labels alone.
    """

    def __init__(self, terms: PerplexityTerms) -> None:
        self.terms, self._kept, self._nats, self._places, self._tokens = terms, 0.0, 0.0, 0, 0

    def read_wanted(self, outputs: Tensors) -> Following:
        """The original's log-probabilities, without tokens."""
        return Following(self.read_answers(outputs))

    def read_answers(self, outputs: Tensors) -> Array:
        """Log-probabilities [places, vocabulary]."""
        value = output_of(outputs, self.terms.output)
        if not value.ndim or not value.shape[-1] or is_exact(value):
            what = f"{value.dtype} {value.shape}"
            raise DataError(f"metric output {self.terms.output!r} is {what}; perplexity takes logits [.., vocabulary]")
        return log_softmax(value.astype(np.float64).reshape(-1, value.shape[-1]))

    def read_labels(self, labels: Array) -> Array:
        """Token ids [places]. Raises DataError for what are no integers."""
        if not is_exact(labels):
            raise DataError(f"labels are {labels.dtype}; perplexity takes token ids")
        return labels.reshape(-1)

    def join(self, wanted: Following, labels: Array) -> Following:
        """The original's log-probabilities and the labelled tokens."""
        return Following(wanted.expected, labels.astype(np.int64))

    def add(self, wanted: Following, answers: Array) -> None:
        """Add the places that count. Raises DataError for another vocabulary, and for tokens beyond it."""
        expected, tokens = wanted.expected, wanted.tokens
        if expected.shape != answers.shape:
            raise DataError(f"expected a vocabulary of {expected.shape[1]}, got {answers.shape[1]}")
        if tokens is None:
            chances = np.exp(expected)
            # A token of no chance adds nothing, however unlikely the candidate has it.
            gaps = np.subtract(answers, expected, out=np.zeros_like(answers), where=chances != 0)
            self._kept, self._places = self._kept + float((chances * gaps).sum()), self._places + len(answers)
            return
        if tokens.size and tokens.max() >= answers.shape[1]:
            raise DataError(f"label {tokens.max()} is no token of a vocabulary of {answers.shape[1]}")
        rows = np.flatnonzero(tokens >= 0)
        own, given = (side[rows, tokens[rows]] for side in (expected, answers))
        self._kept, self._nats = self._kept + float((given - own).sum()), self._nats - float(given.sum())
        self._places, self._tokens = self._places + len(rows), self._tokens + len(rows)

    def values(self) -> list[TaskValue]:
        """Both values."""
        names = "kept_likelihood", "perplexity"
        found = [(names[0], self._kept, self._places, NOTHING), (names[1], self._nats, self._tokens, "no labels")]
        with np.errstate(over="ignore"):
            return [
                TaskValue(name, float(np.exp(total / count)) if count else None, "" if count else none)
                for name, total, count, none in found
            ]


def log_softmax(logits: Array) -> Array:
    """Logarithms of the probabilities [places, vocabulary]; NaN in a row with NaN or an infinity above zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
