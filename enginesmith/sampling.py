"""Drawing the next token from logits in numpy: what the sampler of a graph (`builders.onnx_graphs.sampler`) does.

The reference that engines are held to, and what draws for an engine that gives logits alone.
"""

from collections.abc import Sequence

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.sampling import SamplingSettings, sampling_inputs
from enginesmith.core.types import Sampling

_LOWEST = np.finfo(np.float32).min
_NEUTRAL = {"temperature": 0, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "uniform": 0, "allowed": True, "seen": 0}


def first_inputs(sampling: Sampling, rows: int) -> dict[str, Array]:
    """What a sampler is given where the likeliest token is wanted, and none was read before."""
    return {
        spec.name: np.full(spec.at({}), _NEUTRAL[spec.name], dtype_of(spec.dtype))
        for spec in sampling_inputs(sampling, rows)
    }


def settings_inputs(settings: Sequence[SamplingSettings]) -> dict[str, Array]:
    """The settings of each row as inputs of a sampler."""
    return {
        "temperature": np.array([item.temperature for item in settings], np.float32),
        "top_k": np.array([item.top_k for item in settings], np.int64),
        "top_p": np.array([item.top_p for item in settings], np.float32),
        "repetition_penalty": np.array([item.repetition_penalty for item in settings], np.float32),
    }


def uniforms(seed: int, count: int) -> Array:
    """The first `count` numbers in [0, 1) of a seed, float32: the highest 24 bits of each word of Philox 4x64-10, whose
    key is the seed (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), by numpy's own counter."""
    words = np.random.Philox(key=seed).random_raw(count)
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(count)


def sample(
    logits: Array, settings: SamplingSettings, uniform: float, seen: Array, allowed: Array, candidates: int
) -> int:
    """The token that a row of logits [vocabulary] gives, in float64; -1 where none is allowed or a logit of those is no
    number.

    seen: of each token, whether it was read.  allowed: whether it may be drawn.  candidates: as in `Sampling`.
    """
    scores = logits.astype(np.float64)
    penalty = float(np.float32(settings.repetition_penalty))
    scores = np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)
    scores = np.where(allowed, scores, _LOWEST)
    order: Array = np.argsort(-scores, kind="stable")[:candidates]
    best = scores[order[0]]
    if np.isnan(scores).any() or not best > _LOWEST:
        return -1
    temperature = float(np.float32(settings.temperature))
    if temperature <= 0:
        return int(order[0])
    order = order[: settings.top_k] if settings.top_k > 0 else order
    order = order[np.flatnonzero(scores[order] > _LOWEST)]
    weights = np.exp((scores[order] - best) / temperature)
    if settings.top_p < 1:
        before = (np.cumsum(weights) - weights) / weights.sum()
        weights = weights[: max(1, int(np.count_nonzero(before < np.float32(settings.top_p))))]
    sums = np.cumsum(weights)
    passed = int(np.count_nonzero(sums <= uniform * sums[-1]))
    return int(order[min(passed, int(np.count_nonzero(weights)) - 1)])
