"""The decisions of one simulated run, recorded so that the run can be repeated and made shorter."""

import random
from collections.abc import Callable, Sequence


class Choices:
    """Decisions as whole numbers; 0 is always the quiet one: no fault, no switch to another actor.

    seed: of the random decisions.  script: decisions that are taken in place of random ones; after its end all are 0.
    """

    def __init__(self, seed: int, script: Sequence[int] | None = None) -> None:
        self.random = random.Random(seed)
        self._draw = self.random.random
        self._script = script
        self.taken: list[int] = []

    def pick(self, probability: float, options: int) -> int:
        """0, or with this probability one of 1 to `options`."""
        if not (options and probability):
            return 0
        draw = self._draw()
        value = 1 + int(draw / probability * options) if draw < probability else 0
        if self._script is not None:
            position = len(self.taken)
            value = min(self._script[position], options) if position < len(self._script) else 0
        self.taken.append(value)
        return value


def shorten(script: Sequence[int], still_fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """The decisions with as many of them set to 0 as still fail; what is 0 at the end is cut off.

    Delta debugging: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002.
    """
    kept_places = [place for place, value in enumerate(script) if value]

    def expand(places: Sequence[int]) -> list[int]:
        place_set = set(places)
        return [value if place in place_set else 0 for place, value in enumerate(script)]

    size = max(1, len(kept_places) // 2)
    while kept_places:
        start, is_shorter = 0, False
        while start < len(kept_places):
            rest = kept_places[:start] + kept_places[start + size :]
            if still_fails(expand(rest)):
                kept_places, is_shorter = rest, True
            else:
                start += size
        if size == 1 and not is_shorter:
            break
        size = max(1, size // 2)
    shorter_script = expand(kept_places)
    return shorter_script[: max(kept_places, default=-1) + 1]
