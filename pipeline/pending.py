"""Unproven engines that can run on this machine, across a whole registry, and their proof."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from builders import backends
from builders.errors import EngineryError
from pipeline.registry import channels, versions
from pipeline.registry.attestations import judged
from pipeline.registry.manifest import EngineEntry, Manifest
from pipeline.registry.names import Reference, version_order
from pipeline.registry.store import Store
from pipeline.registry.trust import require
from pipeline.registry.versions import Located
from pipeline.revalidate import Attested, revalidate
from pipeline.workshop import Workshop


@dataclass(frozen=True)
class Pending:
    """A version with engines that wait for a proof that this machine can give."""

    manifest: Manifest
    engines: tuple[EngineEntry, ...]

    @property
    def reference(self) -> str:
        """'digits@4'."""
        return f"{self.manifest.model}@{self.manifest.version}"


@dataclass(frozen=True)
class Proof:
    """What became of one engine, or (engine None) why its whole version could not be looked at."""

    reference: str
    engine: str | None
    verdict: str
    reason: str

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.verdict in ("proven", "unproven")


def pending(store: Store) -> Iterator[Pending]:
    """Of each model's newest version and of what its channels serve: the unproven engines that run here.

    A version that cannot be read is left out; `enginery verify` names it.
    """
    for model in versions.models(store):
        for version in sorted(_looked_at(store, model), key=version_order):
            try:
                manifest = versions.load(store, model, version)
                engines = tuple(entry for entry in judged(store, manifest) if _waits(entry))
            except EngineryError as error:
                logging.getLogger(__name__).warning("%s@%s is left out: %s", model, version, error)
                continue
            if engines:
                yield Pending(manifest, engines)


def prove(item: Pending, shop: Workshop) -> list[Proof]:
    """Run a version's pending engines here and attach a report to each. What goes wrong is its row: a version that the
    trust policy does not let run, too."""
    try:
        require(shop.store, Located(Reference(item.manifest.model, item.manifest.version), item.manifest))
        digests = {str(entry.digest) for entry in item.engines}
        return [_row(item, found) for found in revalidate(item.manifest, shop, engines=digests)]
    except EngineryError as error:
        return [Proof(item.reference, None, "error", str(error))]


def _looked_at(store: Store, model: str) -> set[str]:
    found = versions.versions(store, model)
    served = {
        channel.version for name in channels.names(store, model) if (channel := channels.read(store, model, name))
    }
    return ({found[-1]} if found else set()) | (served & set(found))


def _waits(entry: EngineEntry) -> bool:
    runs = backends.configure(entry.backend, dict(entry.options)).runs
    return entry.digest is not None and entry.status == "unproven" and runs(entry.hardware) is None


def _row(item: Pending, found: Attested) -> Proof:
    return Proof(item.reference, found.entry.unit, found.verdict, found.reason)
