"""What a generator is asked: a prompt with its settings, what its answer must keep, and whether it can be answered."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.sampling import GREEDY, SamplingSettings

# How many there are: Philox 4x64 has keys of 128 bits.
_SEEDS = 2**128


class TokenConstraint(Protocol):
    """What may follow in one answer, such as what a grammar has."""

    def allowed(self) -> Array | None:
        """Of each token, whether it may come next, bool [vocabulary]; None where the answer is complete."""
        ...

    def take(self, token: int) -> None:
        """Go on behind this token."""
        ...


class Constraint(Protocol):
    """What answers must keep, such as `enginesmith.Grammar`."""

    def begin(self, vocabulary: int) -> TokenConstraint:
        """A constraint of one answer, for logits of this width. Raises DataError where it has no token to begin with,
        or is of another vocabulary."""
        ...


@dataclass(frozen=True)
class Prompt:
    """What a generator answers. tokens: ids, at least one.  most: tokens of the answer; default: until the cache is
    full.  seed: of the numbers that tokens are drawn by.  stop: tokens that end the answer, as its last one.

    constraint: what the answer must keep; one that `most` cuts off is not complete (`Grammar.is_kept_by`).
    """

    tokens: Sequence[int]
    settings: SamplingSettings = GREEDY
    most: int | None = None
    seed: int = 0
    stop: Collection[int] = ()
    constraint: Constraint | None = None


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
