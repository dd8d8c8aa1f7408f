"""The catalog of models that must be served, with their machines, and the versions that its references name now.

docs/guides/fleet.md has one. Without a catalog, every model with a channel needs an engine for every GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from enginesmith.client.locate import VersionLocator, judge_located
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnavailableError
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.names import Reference
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.core.types import Precision, Target
from enginesmith.registry.evidence.latencies import MeasuredSpeed, latencies, newest_on, speeds_of
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import registered_key
from enginesmith.registry.versions.lookup import DEFAULT_CHANNELS, catalogue
from pipeline.fleet.groups import Hardware
from pipeline.fleet.inventory import RuntimeName, Version
from pipeline.spec.document import Kind, load_document
from pipeline.spec.source import Channel, ModelName, SpecPart, TargetName, VersionName

GPUS = parse_targets("gpu")
# A model that the chart's `helm test` leaves in the registry; no machine serves it.
SELFTEST = "enginesmith-helm-test"


class Serve(SpecPart):
    """One model, and where and how it must be served."""

    model: ModelName
    channel: Channel | None = Field(None, description="default: stable, where the model has it, else candidate")
    version: VersionName | None = None
    on: tuple[TargetName, ...] = Field(("gpu",), min_length=1, description="l4, sm_90, hopper, gpu, cpu, all")
    precisions: tuple[Precision, ...] = Field((), description="each of these must be there; default: any one")
    proven: bool = Field(False, description="whether only a proven engine will do; the channel may ask for it anyway")

    @model_validator(mode="before")
    @classmethod
    def _bare_on(cls, data: object) -> object:
        """Restore the key `on`: YAML reads the bare word as true, and Helm writes it as the text 'true'."""
        if isinstance(data, dict) and "on" not in data:
            return {("on" if key is True or key == "true" else key): value for key, value in data.items()}
        return data

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.channel is not None and self.version is not None:
            raise ValueError("has both channel and version; keep one")
        return self


class CatalogFile(SpecPart):
    """A catalog file."""

    serve: tuple[Serve, ...] = Field(min_length=1)
    runtimes: dict[RuntimeName, Version] = Field({}, description="versions of what serves, by the package's name")
    planned: dict[RuntimeName, Version] = Field({}, description="versions that are coming, also of the `driver`")


@dataclass(frozen=True)
class Demand:
    """A model that must be served. on: the hardware.  precisions: each needs an engine; empty: any one does.  proven:
    whether only a proven engine is accepted.  reference: the version."""

    reference: Reference
    on: tuple[Target, ...] = GPUS
    precisions: tuple[Precision, ...] = ()
    proven: bool = False

    def wants(self, hardware: Hardware) -> bool:
        """Whether the demand includes this hardware. `on` with every known GPU generation includes unknown GPUs."""
        wants_all_gpus = not hardware.machine.is_cpu and set(GPUS) <= set(self.on)
        return wants_all_gpus or hardware.is_one_of(self.on)


@dataclass(frozen=True)
class Catalog:
    """All demands. runtimes: versions in use.  planned: future versions, also of the 'driver'. Both by the package's
    name, as in `Machine.runtimes`.  source: of the catalog, for messages."""

    demands: tuple[Demand, ...]
    runtimes: tuple[tuple[str, str], ...] = ()
    planned: tuple[tuple[str, str], ...] = ()
    source: str = ""


KIND = Kind(CatalogFile, "a catalog", "serve, runtimes, planned", "docs/guides/fleet.md has one")


def load_catalog(path: Path) -> Catalog:
    """Read a catalog. Raises SpecError with one line per mistake."""
    document, _ = load_document(path, KIND)
    demands = tuple(
        Demand(
            Reference(entry.model, entry.version, entry.channel),
            tuple(target for name in entry.on for target in parse_targets(name)),
            entry.precisions,
            entry.proven,
        )
        for entry in document.serve
    )
    return Catalog(demands, tuple(document.runtimes.items()), tuple(document.planned.items()), str(path))


def whole_registry(store: Store) -> Catalog:
    """A catalog of every model with a channel, on every GPU. Lists keys; reads no documents."""
    demands = []
    for entry in catalogue(store):
        if entry.channels and entry.model != SELFTEST:
            default_names = [name for name in DEFAULT_CHANNELS if name in entry.channels]
            demands.append(Demand(Reference(entry.model, channel=[*default_names, *entry.channels][0])))
    return Catalog(tuple(demands), source=f"every model with a channel in {store.uri}")


# The number of concurrent requests; a registry may have a long latency.
_AT_ONCE = 16


@dataclass(frozen=True)
class Served:
    """A demand and the version that it names. engines: with their present status.  proven_only: whether the channel
    refuses unproven engines.

    targets, precisions: of the spec; None if it has none.  problem: why no version can be served; '' if one can.
    registered: whether the registry has the model's spec, which an event can then build again.
    reports: reads the latency reports of the engines (`evidence.latencies.latencies`).
    """

    demand: Demand
    version: str | None = None
    engines: tuple[EngineEntry, ...] = ()
    proven_only: bool = False
    targets: tuple[Target, ...] | None = None
    precisions: tuple[str, ...] | None = None
    problem: str = ""
    registered: bool = True
    reports: Callable[[], Mapping[str, list[LatencyReport]]] = field(default=dict, compare=False, repr=False)

    def find_speeds(self, machine: Machine, engines: Sequence[EngineEntry]) -> dict[str, MeasuredSpeed]:
        """Measured speeds of engines on this kind of machine, by digest; a pull ranks engines by them."""
        engine_digests = {entry.digest for entry in engines}
        newest_reports = newest_on(self.reports(), machine)
        return speeds_of({digest: report for digest, report in newest_reports.items() if digest in engine_digests})

    @property
    def name(self) -> str:
        """The model and its version: 'digits@3'; only the model if no version is served."""
        model = self.demand.reference.model
        return model if self.version is None else f"{model}@{self.version}"


def read_served(store: Store, demands: Sequence[Demand]) -> tuple[Served, ...]:
    """The version of every demand, in the order of the demands; versions are read concurrently, each once.

    `problem` is set for a model that is missing, damaged, or not signed as the trust policy requires.
    Raises UnavailableError if the registry cannot be reached.
    """
    references = list(dict.fromkeys(demand.reference for demand in demands))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        map_function = map if len(references) < 2 else pool.map  # one reference needs no threads
        served_models = dict(
            zip(references, map_function(lambda reference: _look(store, Demand(reference)), references), strict=True)
        )
    return tuple(replace(served_models[demand.reference], demand=demand) for demand in demands)


def _look(store: Store, demand: Demand) -> Served:
    try:
        location = VersionLocator(store, checked=True).locate(demand.reference)
        version, engines = judge_located(store, location, Policy())
    except UnavailableError:
        raise
    except EnginesmithError as error:
        return Served(demand, problem=str(error))
    manifest = version.manifest
    targets = parse_spec_targets(manifest.spec.get("targets"))
    spec_precisions = manifest.spec.get("precisions")
    precisions = tuple(map(str, spec_precisions)) if isinstance(spec_precisions, list | tuple) else None
    is_registered = store.read(registered_key(manifest.model)) is not None

    @cache
    def read_reports() -> Mapping[str, list[LatencyReport]]:
        try:
            return latencies(version.documents or store, manifest)
        except IntegrityError:  # `enginesmith registry fsck` names the damage; without times, accuracy ranks engines
            return {}

    return Served(
        demand,
        manifest.version,
        engines,
        version.proven_only,
        targets,
        precisions,
        registered=is_registered,
        reports=read_reports,
    )


def parse_spec_targets(names: object) -> tuple[Target, ...] | None:
    """The targets that a manifest's spec names; None without a list, or if this release does not know one of them."""
    if not isinstance(names, list | tuple):
        return None
    try:
        return tuple(target for name in names for target in parse_targets(str(name)))
    except EnginesmithError:
        return None
