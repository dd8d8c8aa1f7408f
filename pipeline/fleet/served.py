"""What the catalog's references stand for now: each version read once, many at a time."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from enginery.client.pull import look
from enginery.client.resolve import Policy
from enginery.core.errors import EngineryError, UnavailableError
from enginery.core.hardware.targets import parse_targets
from enginery.core.types import Target
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.keys import registered_key
from pipeline.fleet.catalog import Demand

# Requests on their way at once, for a registry that is far away.
_AT_ONCE = 16


@dataclass(frozen=True)
class Served:
    """A demand and what it names. engines: with the status they have today.  proven_only: what the channel asks.

    targets, precisions: of the spec; None where it does not say.  problem: why there is nothing to serve, in words; ''
    where there is.  registered: whether the registry keeps the model's spec, so that it can be built again by an event.
    """

    demand: Demand
    version: str | None = None
    engines: tuple[EngineEntry, ...] = ()
    proven_only: bool = False
    targets: tuple[Target, ...] | None = None
    precisions: tuple[str, ...] | None = None
    problem: str = ""
    registered: bool = True

    @property
    def name(self) -> str:
        """'digits@3'."""
        model = self.demand.reference.model
        return model if self.version is None else f"{model}@{self.version}"


def read_served(store: Store, demands: Sequence[Demand]) -> tuple[Served, ...]:
    """Look at every demand's version, in the order of the demands.

    A model that is not there, damaged, or not signed as the trust policy asks has its problem in words, and keeps
    nobody from the others. Raises UnavailableError when the registry is out of reach.
    """
    references = list(dict.fromkeys(demand.reference for demand in demands))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(references, pool.map(lambda item: _look(store, Demand(item)), references), strict=True))
    return tuple(replace(found[demand.reference], demand=demand) for demand in demands)


def _look(store: Store, demand: Demand) -> Served:
    try:
        located, engines = look(store, demand.reference, Policy())
    except UnavailableError:
        raise
    except EngineryError as error:
        return Served(demand, problem=str(error))
    manifest = located.manifest
    facts = (_targets(manifest), _words(manifest, "precisions"))
    kept = store.read(registered_key(manifest.model)) is not None
    return Served(demand, manifest.version, engines, located.proven_only, *facts, registered=kept)


def _targets(manifest: Manifest) -> tuple[Target, ...] | None:
    """The targets of the spec that a version was built from, as far as this Enginery knows them."""
    names = _words(manifest, "targets")
    try:
        return None if names is None else tuple(target for name in names for target in parse_targets(name))
    except EngineryError:
        return None


def _words(manifest: Manifest, name: str) -> tuple[str, ...] | None:
    found = manifest.spec.get(name)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else None
