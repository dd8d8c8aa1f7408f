"""How far one model's probabilities of the next token are from another's, position by position."""

import numpy as np

from enginesmith.arrays import Array


def kl_divergence(expected: Array, actual: Array) -> Array:
    """D(P || Q) of each row in nats, float64 [n], of the probabilities that logits [n, vocabulary] give by softmax.

    The sum of p (log p - log q) (Kullback and Leibler, "On Information and Sufficiency", 1951). A logit of -inf is a
    token that never comes: nothing where it is expected, an infinity where only the other one has it. NaN stays NaN.
    """
    p, q = _log_softmax(expected), _log_softmax(actual)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q))
    # Equal probabilities give sums a rounding below 0.
    divergence: Array = np.maximum(terms.sum(-1), 0.0)
    return divergence


def top_k_agreement(expected: Array, actual: Array, k: int) -> Array:
    """Of each row of logits [n, vocabulary], the share of the k likeliest tokens that are among the other's k, [n]; of
    equals the lower ids. A row with a NaN agrees in nothing."""
    k = min(k, expected.shape[-1])
    first, second = (np.argsort(-side, axis=-1, kind="stable")[:, :k] for side in (expected, actual))
    shares = (first[:, :, None] == second[:, None, :]).any(2).mean(1)
    return np.where(np.isnan(actual).any(-1), 0.0, shares)


def _log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = wide - wide.max(-1, keepdims=True)
        found: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found
