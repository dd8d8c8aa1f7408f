"""Sequences of tokens along an output's last axis: how far two are equal, and where they end."""

import math
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array


@dataclass(frozen=True)
class SequenceLimits:
    """How far the engine's sequences must equal the graph's; the worst one counts.

    until: a token, after whose first place tokens may differ; None: none may.  first: the number of leading tokens that
    must be equal, or all up to `until` where these are fewer.  edits: the greatest number of insertions, deletions and
    replacements (Levenshtein 1966), as a share of the longer sequence.
    """

    until: int | None = None
    first: int | None = None
    edits: float | None = None

    def broken(self, expected: Array, actual: Array) -> list[tuple[str, float, float]]:
        """(name, value, limit) of each limit: tokens by which the first difference is too early; the share of edits.

        expected, actual: (..., tokens); NaN where they hold different numbers of sequences.
        """
        fits = expected.shape[:-1] == actual.shape[:-1] and expected.ndim
        pairs = list(zip(rows_of(expected), rows_of(actual), strict=True)) if fits else []
        if (token := self.until) is not None:
            pairs = [(up_to(left, token), up_to(right, token)) for left, right in pairs]
        found = []
        if (first := self.first) is not None:
            early = [max(0, min(first, max(map(len, pair))) - _first_difference(*pair)) for pair in pairs]
            found.append(("sequence first", float(max(early, default=0)) if fits else np.nan, 0.0))
        if self.edits is not None:
            shares = [_edits(*pair) / max(1, *map(len, pair)) for pair in pairs]
            found.append(("sequence edits", float(max(shares, default=0)) if fits else np.nan, self.edits))
        return found


@dataclass(frozen=True)
class SequenceEnd:
    """Where the engine's sequences must end. An end in only one of the two sides always breaks it.

    token: the one that ends a sequence.  apart: places by which ends may differ from the graph's; None: any number.
    pad: the token that must fill the places after the end; None: any.
    """

    token: int
    apart: int | None = None
    pad: int | None = None

    def broken(self, expected: Array, actual: Array) -> list[tuple[str, float, float]]:
        """(name, value, limit): sequences that end on one side alone; most places between ends; other tokens after one.

        expected, actual: (..., tokens); NaN where they hold different numbers of sequences.
        """
        if expected.shape[:-1] != actual.shape[:-1] or not expected.ndim:
            return [("eos", np.nan, 0.0)]
        ends = [_ends(side, self.token) for side in (expected, actual)]
        found = [("eos", float(((ends[0] < 0) != (ends[1] < 0)).sum()), 0.0)]
        both = (ends[0] >= 0) & (ends[1] >= 0)
        if self.apart is not None:
            far = np.abs(ends[0] - ends[1])[both].max(initial=0)
            found.append(("eos apart", float(far), float(self.apart)))
        if self.pad is not None:
            rows = rows_of(actual)
            after = (np.arange(rows.shape[1]) > ends[1][:, None]) & (ends[1][:, None] >= 0)
            found.append(("eos pad", float((after & (rows != self.pad)).sum()), 0.0))
        return found


def rows_of(array: Array) -> Array:
    """The sequences of an array (..., n) as rows (m, n)."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def up_to(sequence: Array, token: int) -> Array:
    """The sequence up to and with the first `token`; all of it where there is none."""
    ends = np.flatnonzero(sequence == token)
    return sequence[: ends[0] + 1] if ends.size else sequence


def _ends(side: Array, token: int) -> Array:
    """The place of the first `token` of each sequence (m,); -1 without one."""
    found = np.pad(rows_of(side) == token, ((0, 0), (0, 1)))  # an empty sequence has no greatest place
    return np.where(found.any(axis=1), found.argmax(axis=1), -1)


def _first_difference(left: Array, right: Array) -> int:
    """The place of the first difference; the length of the shorter sequence where all of it is equal."""
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if differ.size else shorter


def _edits(left: Array, right: Array) -> int:
    """Levenshtein's distance, computed a row of its table at a time."""
    before = steps = np.arange(len(right) + 1)
    for index, token in enumerate(left):
        now = np.concatenate([[index + 1], np.minimum(before[1:] + 1, before[:-1] + (right != token))])
        # An insertion continues from the left: min over j' <= j of now[j'] + (j - j').
        before = np.minimum.accumulate(now - steps) + steps
    return int(before[-1])
