"""How many integers of an output an honest kernel decides otherwise, and the agreement that an engine is held to."""

from dataclasses import dataclass

from validation.canary.rates import upper

# As of the other errors of honest rounding: how often near ties fall elsewhere grows with the error's amplitude.
MARGIN = 2.0
# Of a bound that is wrong: one engine in a hundred.
LEVEL = 0.01
# What no measurement makes stricter.
MOST = 1.0


@dataclass(frozen=True)
class Decisions:
    """Of one output: how many elements changed of how many, in the golden cases and by the way to round that changes
    most. together: the most that changed in one sample, since one near tie may move all that is sorted behind it."""

    changed: int
    elements: int
    together: int = 1

    @property
    def share(self) -> float:
        """The share of elements that an engine may decide otherwise."""
        return min(1.0, MARGIN * self.changed / self.elements) if self.elements else 1.0

    def limit(self, kind: str, elements: int) -> float:
        """The agreement that an engine must have on so many elements of a kind of case, at most MOST.

        Golden cases: `share`, and no less than the upper bound of Clopper and Pearson (Biometrika 26, 1934) of what was
        measured, since no near tie among few elements is no proof that the others hold none. Edges are made of the
        same samples: none where there was none; else the upper bound of `share` in as many elements, since a few hold
        more than their share now and then. Elements that change together are one piece of evidence, as in a design
        effect of that size (Korn and Graubard, Survey Methodology 24, 1998).
        """
        if kind == "golden":
            allowed = max(self.share, self._bound(self.changed, self.elements))
        else:
            allowed = self._bound(self.share * elements, elements) if self.changed and elements else 0.0
        return round(MOST - allowed, 4)

    def _bound(self, changed: float, elements: int) -> float:
        return upper(changed / self.together, elements / self.together, LEVEL)

    def __str__(self) -> str:
        return f"honest rounding decides {self.changed} of {self.elements} elements otherwise"
