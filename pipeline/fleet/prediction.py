"""What builds will probably take, from what builds took."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from builders.types import BuildRequest
from pipeline.registry.store import Store


class Forecast(Protocol):
    """A prediction, as `pipeline.history` makes it. seconds: None when nothing like it ended well.  builds: how many it
    rests on.  basis: which, in words."""

    @property
    def seconds(self) -> float | None:
        """Wall clock."""
        ...

    @property
    def builds(self) -> int:
        """How many builds it rests on."""
        ...

    @property
    def basis(self) -> str:
        """Which builds those are."""
        ...


Predictor = Callable[[str, BuildRequest], Forecast | None]


@dataclass(frozen=True)
class Hours:
    """The sum of predictions. hours: of GPU workers, in which a build for a generation holds one of its workers.

    units: how many it is the sum of.  builds: how many finished builds those rest on.  unknown: units without one.
    """

    hours: float
    units: int
    builds: int
    unknown: int

    @property
    def words(self) -> str:
        """For people."""
        if not self.units:
            return "how long it takes is not known: no build like these is on record" if self.unknown else "nothing"
        rest = f"; {self.unknown} more of unknown length" if self.unknown else ""
        units = f"{self.units} unit" + ("s" if self.units > 1 else "")
        return f"about {self.hours:.2f} GPU hours for {units}, predicted from {self.builds} finished builds{rest}"


def total(forecasts: Iterable[Forecast | None]) -> Hours:
    """The sum, and how much of it is not known."""
    items = list(forecasts)
    known = [(item.seconds, item.builds) for item in items if item is not None and item.seconds is not None]
    hours = sum(seconds for seconds, _ in known) / 3600
    return Hours(hours, len(known), sum(builds for _, builds in known), len(items) - len(known))


def predictor(store: Store) -> Predictor:
    """What the registry's own history of builds says."""
    try:
        from pipeline.history import History  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return nothing_known
    found: Predictor = History(store).expected
    return found


def nothing_known(model: str, request: BuildRequest) -> Forecast | None:  # noqa: ARG001 - a predictor
    """The predictor of a registry without a history."""
    return None
