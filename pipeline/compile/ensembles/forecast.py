"""What a build of an ensemble would do: what it would do to each graph, and what follows for the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from enginesmith.core.ensemble import ENSEMBLE
from enginesmith.core.types import PRECISIONS, Precision, Target, TensorSpec
from pipeline.compile.ensembles.chain import ChainedGraph
from pipeline.compile.ensembles.proof import ProveEnsemble, limits_of, metrics_of, prove
from pipeline.compile.ensembles.whole import WholeData
from pipeline.compile.forecast import Forecast, UnitForecast
from pipeline.compile.run_context import NotOnRecord, RunContext
from pipeline.compile.steps.engines import build
from pipeline.spec.ensembles.model import LoadedEnsemble
from pipeline.spec.model import ModelSpec
from pipeline.values import EngineBlob, Exported, Json

# Of the actions of its graphs, the one that decides what becomes of the whole is the first of these.
_DECIDING = ("refused", "failed", "unknown", "build")


@dataclass(frozen=True)
class ForecastGraph:
    """What a build would do to a graph. exported: None where that is not on record.  wanted: as of `CompiledGraph`."""

    forecast: Forecast
    exported: Exported | None
    wanted: tuple[Sequence[Target], Sequence[Precision]]


@dataclass(frozen=True)
class WholeUnit:
    """An ensemble for a target in a precision. action: 'build' where it would be proven, 'cached', 'refused', 'failed'
    or 'unknown'."""

    target: str
    precision: str
    action: str
    reason: str

    def to_json(self) -> Json:
        """What `enginesmith plan --json` prints of it."""
        return {**vars(self), "backend": ENSEMBLE}


@dataclass(frozen=True)
class EnsembleForecast:
    """What a build of an ensemble would do. graphs: by name, in order.  units: of the whole."""

    model: str
    graphs: Mapping[str, Forecast]
    units: tuple[WholeUnit, ...]

    def to_json(self) -> Json:
        """What `enginesmith plan --json` prints."""
        graphs = {name: found.to_json() for name, found in self.graphs.items()}
        return {"model": self.model, "graphs": graphs, "units": [unit.to_json() for unit in self.units]}

    def count(self, action: str) -> int:
        """How many units of the whole and of its graphs have this action."""
        own = sum(unit.action == action for unit in self.units)
        return own + sum(found.count(action) for found in self.graphs.values())


@dataclass(frozen=True)
class ForecastEnsemble:
    """An ensemble whose graphs were foreseen. chain: of the exported graphs, as far as they are on record.

    outputs: of the whole, empty where a graph is not exported.  records: context of `open_records`.
    """

    loaded: LoadedEnsemble
    graphs: Mapping[str, ForecastGraph]
    chain: tuple[ChainedGraph, ...]
    golden: WholeData
    records: RunContext
    outputs: tuple[TensorSpec, ...] = field(default=())

    def foresee(self) -> EnsembleForecast:
        """What a build would do."""
        units = tuple(self._foresee(*unit) for unit in self._list_units())
        return EnsembleForecast(
            self.loaded.spec.model, {name: item.forecast for name, item in self.graphs.items()}, units
        )

    def _list_units(self) -> list[tuple[Target, Precision]]:
        targets = dict.fromkeys(target for item in self.graphs.values() for target in item.wanted[0])
        asked = {precision for item in self.graphs.values() for precision in item.wanted[1]}
        return [(target, each) for target in targets for each in PRECISIONS if each in asked]

    def _foresee(self, target: Target, precision: Precision) -> WholeUnit:
        chosen = {name: self._choose(name, spec, target, precision) for name, spec in self.loaded.graphs.items()}
        for action in _DECIDING:
            for name, found in chosen.items():
                if isinstance(found, str):
                    return WholeUnit(target.name, precision, "refused", f"graph {name!r} has no engine: {found}")
                if found.action == action:
                    action = "build" if action == "build" else action
                    return WholeUnit(target.name, precision, action, f"graph {name!r}: {found.reason}")
        known = {name: found for name, found in chosen.items() if isinstance(found, UnitForecast)}
        again = next((name for name, found in known.items() if found.proven_again), None)
        if again:
            return WholeUnit(target.name, precision, "build", f"graph {again!r}: {known[again].reason}")
        return self._recall(target, precision, known)

    def _choose(self, name: str, spec: ModelSpec, target: Target, precision: Precision) -> UnitForecast | str:
        """A graph's unit, the first of those that come soonest to an engine; else why there is none."""
        own = precision if precision in spec.precision_list() else spec.precision_list()[0]
        units = self.graphs[name].forecast.units
        found = [unit for unit in units if (unit.item.target, unit.item.precision) == (target, own)]
        order = ("cached", "build", "unknown", "failed", "refused")
        return min(found, key=lambda unit: order.index(unit.action), default=f"its spec has no {target.name} {own}")

    def _recall(self, target: Target, precision: Precision, known: Mapping[str, UnitForecast]) -> WholeUnit:
        """The unit, all of whose engines are there: 'cached' where its proof is on record."""
        blobs = dict[str, EngineBlob]()
        for name, found in known.items():
            if found.unit is not None:
                blobs[name] = build(found.unit, self.loaded.graphs[name], self.records).blob
        asked = limits_of(self.loaded.spec, precision), metrics_of(self.loaded.spec, precision)
        request = ProveEnsemble(self.golden, self.chain, blobs, self.outputs, precision, *asked)
        unit = f"{target.name} {precision} {ENSEMBLE}"
        try:
            prove(request, unit, self.records)
        except NotOnRecord:
            reason = "its engines are there; the whole is proven: no such proof is on record"
            return WholeUnit(target.name, precision, "build", reason)
        return WholeUnit(target.name, precision, "cached", "engines and proof are on record")
