"""The engines of a version for one machine or several, as far as a server of the layout can open them."""

from collections.abc import Sequence
from enum import Enum

from enginesmith.client.layouts.base import Layout, without_rejected
from enginesmith.client.locate import judge_located, rank_located
from enginesmith.client.resolve import EngineRanking, Policy
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.machine import Machine
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import Located


class AllGenerations(Enum):
    """In the place of machines: every compute capability that a version has an engine for."""

    ALL = "all"


ALL_GENERATIONS = AllGenerations.ALL


def rank_each(
    store: Store,
    located: Located,
    machines: Sequence[Machine] | AllGenerations,
    policy: Policy,
    layout: Layout,
    *,
    sure: bool = True,
) -> tuple[Located, list[EngineRanking]]:
    """The version, and for each machine the ranking of its engines. sure: as of `rank_located`.

    Raises as `rank_located`, UnknownNameError where no engine is for a GPU and all generations are asked for, and
    InputError for several machines and a layout of one.
    """
    if isinstance(machines, AllGenerations):
        machines = _find_generations(store, located, policy)
    if len(machines) > 1 and not layout.several:
        raise InputError("engines for several targets lie together in Triton's layout alone; give --layout triton")
    found = [rank_located(store, located, machine, policy, sure=sure) for machine in machines]
    return found[0][0], [without_rejected(ranking, layout) for _, ranking in found]


def _find_generations(store: Store, located: Located, policy: Policy) -> list[Machine]:
    """A machine for each compute capability that a usable engine of the version is built for."""
    located, entries = judge_located(store, located, policy)
    found = {entry.compute_capability for entry in entries if entry.usable and entry.compute_capability}
    if not found:
        what = f"{located.manifest.model}@{located.manifest.version}"
        raise UnknownNameError(f"{what} has no engine for a GPU; name a target")
    return [Machine(capability) for capability in sorted(found)]
