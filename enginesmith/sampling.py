"""What a generator is asked, and how it draws the next token of an answer from logits, in numpy."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError

# So many of the likeliest tokens can be drawn; it bounds top_k too. Only these are sorted.
CANDIDATES = 1024
# How many seeds there are: Philox 4x64 has keys of 128 bits.
_SEEDS = 2**128


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is drawn. temperature: 0 takes the likeliest.  top_k: 0 for all.  top_p: 1 for all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


GREEDY = SamplingSettings()


@dataclass(frozen=True)
class Prompt:
    """What a generator answers. tokens: ids, at least one.  most: tokens of the answer; default: until the cache is
    full.  seed: of the numbers that tokens are drawn by.  stop: tokens that end the answer, as its last one."""

    tokens: Sequence[int]
    settings: SamplingSettings = GREEDY
    most: int | None = None
    seed: int = 0
    stop: Collection[int] = ()


def check_prompt(prompt: Prompt, index: int, vocabulary: int) -> None:
    """Raise DataError, which names the prompt by its number, for one that no engine of this vocabulary could answer."""
    _check_settings(prompt.settings, index)
    _check_tokens(prompt, index, vocabulary)
    if not _is_whole(prompt.seed) or not 0 <= prompt.seed < _SEEDS:
        raise DataError(f"prompt {index}: seed is {prompt.seed}; it must be a whole number from 0 to 2^128 - 1")
    if prompt.most is not None and (not _is_whole(prompt.most) or prompt.most < 0):
        raise DataError(f"prompt {index}: most is {prompt.most}; it must be a whole number, 0 or more")


def _check_tokens(prompt: Prompt, index: int, vocabulary: int) -> None:
    given: object = prompt.tokens
    if isinstance(given, str):
        raise DataError(f"prompt {index} is a text; give its bytes to a model over bytes, others the ids of its tokens")
    if not len(prompt.tokens):
        raise DataError(f"prompt {index} has no token; give at least one, such as that of a line's beginning")
    if not isinstance(prompt.stop, Collection):
        raise DataError(f"prompt {index}: stop is {prompt.stop!r}; give the tokens that end an answer, as {{0}}")
    for what, tokens in (("", prompt.tokens), ("stop ", prompt.stop)):
        if wrong := [token for token in tokens if not _is_whole(token) or not 0 <= token < vocabulary]:
            raise DataError(
                f"prompt {index} has {what}token {wrong[0]!r}; the vocabulary has 0 to {vocabulary - 1}, whole numbers"
            )


def _check_settings(settings: SamplingSettings, index: int) -> None:
    """Raise DataError for settings that draw nothing, or that float32 or int64 do not hold."""
    greatest, least = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
    temperature, top_k, penalty = settings.temperature, settings.top_k, settings.repetition_penalty
    wrong = {
        "temperature": (0 <= temperature <= greatest, f"from 0 to {greatest:.1e}"),
        "top_k": (_is_whole(top_k) and 0 <= top_k < 2**63, "a whole number, 0 for all tokens, below 2^63"),
        "top_p": (0 <= settings.top_p <= 1, "from 0 to 1"),
        "repetition_penalty": (least <= penalty <= greatest, f"above 0, from {least:.1e} to {greatest:.1e}"),
    }
    for name, (right, range_) in wrong.items():
        if not right:
            raise DataError(f"prompt {index}: {name} is {getattr(settings, name)}; it must be {range_}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)


def uniforms(seed: int, count: int) -> Array:
    """The first `count` numbers in [0, 1) of a seed, float32: the highest 24 bits of each word of Philox 4x64-10, whose
    key is the seed (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), by numpy's own counter."""
    words = np.random.Philox(key=seed).random_raw(count)
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(count)


def sample(logits: Array, settings: SamplingSettings, uniform: float, seen: Array) -> int:
    """The token that a row of logits [vocabulary] gives, in float64; -1 where a logit, or the greatest, is no number.

    seen: of each token, whether it was read.
    """
    scores = logits.astype(np.float64)
    penalty = settings.repetition_penalty
    scores = np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)
    if np.isnan(scores).any() or not np.isfinite(scores.max()):
        return -1
    if settings.temperature <= 0:
        return int(np.argmax(scores))
    count = min(settings.top_k or CANDIDATES, CANDIDATES)
    order: Array = np.argsort(-scores, kind="stable")[:count]
    weights = np.exp((scores[order] - scores[order[0]]) / settings.temperature)
    if settings.top_p < 1:
        before = (np.cumsum(weights) - weights) / weights.sum()
        weights = weights[: max(1, int(np.count_nonzero(before < settings.top_p)))]
    sums = np.cumsum(weights)
    passed = int(np.count_nonzero(sums <= uniform * sums[-1]))
    return int(order[min(passed, int(np.count_nonzero(weights)) - 1)])
