"""What builds will probably take, from what builds took."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from enginery.core.types import BuildRequest
from enginery.registry.runs.history import Expectation, History
from enginery.registry.store.base import Store

Predictor = Callable[[str, BuildRequest], Expectation | None]


@dataclass(frozen=True)
class Hours:
    """The sum of predictions. hours: of GPU workers, in which a build for a generation holds one of its workers.

    units: how many it is the sum of.  fewest, most: finished builds that one of those predictions rests on.
    unknown: units without a prediction.
    """

    hours: float
    units: int
    fewest: int
    most: int
    unknown: int

    @property
    def words(self) -> str:
        """For people."""
        if not self.units:
            return "how long it takes is not known: no build like these is on record" if self.unknown else "nothing"
        units = f"{self.units} unit" + ("s" if self.units > 1 else "")
        builds = str(self.most) if self.fewest == self.most else f"{self.fewest} to {self.most}"
        rest = f"; {self.unknown} more of unknown length" if self.unknown else ""
        return f"about {self.hours:.2f} GPU hours for {units}, each predicted from {builds} finished builds{rest}"

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)


def total(forecasts: Iterable[Expectation | None]) -> Hours:
    """The sum, and how much of it is not known."""
    items = list(forecasts)
    known = [(item.seconds, item.builds) for item in items if item is not None and item.seconds is not None]
    builds = [count for _, count in known] or [0]
    hours = sum(seconds for seconds, _ in known) / 3600
    return Hours(hours, len(known), min(builds), max(builds), len(items) - len(known))


def predictor(store: Store) -> Predictor:
    """What the registry's own history of builds says."""
    return History(store).predict
