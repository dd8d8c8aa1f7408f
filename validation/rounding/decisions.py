"""How many integers of an output an honest kernel decides otherwise, and the agreement that an engine is held to."""

import math
from dataclasses import dataclass

from validation.statistics.distributions import beta_cdf
from validation.statistics.rates import upper

# As of the other errors of honest rounding: how often near ties fall elsewhere grows with the error's amplitude.
MARGIN = 2
# Elements that one near tie moves, where there are several: two change places.
PAIR = 2
# Of a bound that is wrong: one engine in a hundred.
LEVEL = 0.01
# What no measurement makes stricter.
MOST = 1.0


@dataclass(frozen=True)
class Decisions:
    """Of one output: how many elements changed of how many, in the golden cases and by the way to round that changes
    most. together: the most that changed in one sample, since one near tie may move all that is sorted behind it.
    unmeasured: elements of the other golden cases.  case: those of one, 0 for all that were measured."""

    changed: int
    elements: int
    together: int = 1
    unmeasured: int = 0
    case: int = 0

    def limit(self, kind: str, elements: int) -> float:
        """The agreement that an engine must have on so many elements of a kind of case, at most MOST.

        Edges are made of the golden samples: where no near tie was found in all of these, none is there. Else as many
        elements as the golden cases' share gives in 99 of 100 edges (binomial), since a few may hold more than their
        share, and as often as a case is repeated in an edge that is larger.
        """
        allowed = 0.0
        if kind == "golden":
            allowed = self.share
        elif elements and (self.changed or self.unmeasured):
            distinct = min(elements, self.case or self.elements)
            allowed = self._most(distinct) / distinct
        return math.floor(1e4 * (MOST - allowed)) / 1e4

    @property
    def share(self) -> float:
        """The share of the golden cases' elements that may change.

        Of those that were measured twice as many as did, and no less than one near tie more. Of the others the upper
        bound of Clopper and Pearson (Biometrika 26, 1934), because no near tie among few elements is no proof that the
        rest has none. Elements that change together are one piece of evidence, as in a design effect of that size
        (Korn and Graubard, Survey Methodology 24, 1998).
        """
        known = max(MARGIN * self.changed, self.changed + max(self.together, PAIR))
        others = self._bound_share(self.changed, self.elements) * self.unmeasured
        return min(1.0, (known + others) / (self.elements + self.unmeasured)) if self.elements else 1.0

    def _most(self, elements: int) -> int:
        """The least count of elements that is exceeded in a case of so many with a chance of at most LEVEL."""
        ties = math.ceil(elements / self.together)
        seldom = (beta_cdf(self.share, count + 1.0, float(ties - count)) <= LEVEL for count in range(ties))
        return min(elements, self.together * next((count for count, found in enumerate(seldom) if found), ties))

    def _bound_share(self, changed: float, elements: int) -> float:
        return upper(changed / self.together, elements / self.together, LEVEL)

    def __str__(self) -> str:
        found = f"honest rounding decides {self.changed} of {self.elements} elements otherwise"
        return f"{found}; twice that, and no less than one near tie more"
