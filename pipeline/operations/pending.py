"""Unproven engines that can run here or on workers with a GPU, of a whole registry or of one version; their proof."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from enginery.core.errors import EngineryError
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.targets import parse_targets
from enginery.core.names import check_model, check_version, version_order
from enginery.core.types import Target
from enginery.registry.evidence.attestations import JudgedEntry, judge_entries
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store
from enginery.registry.trust import require
from enginery.registry.versions import channels, lookup
from pipeline.compile.run_context import RunContext
from pipeline.operations.revalidate import Attested, revalidate, why_not_here


@dataclass(frozen=True)
class Pending:
    """A version with engines that wait for a proof that this machine, or a worker with a GPU, can give."""

    manifest: Manifest
    engines: tuple[EngineEntry, ...]

    @property
    def reference(self) -> str:
        """'digits@4'."""
        return f"{self.manifest.model}@{self.manifest.version}"


@dataclass(frozen=True)
class PendingProof:
    """What became of one engine, or (engine None) why its whole version could not be looked at."""

    reference: str
    engine: str | None
    verdict: str
    reason: str

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.verdict in ("proven", "unproven")


def list_pending(store: Store, only: str | None = None, on: Target | None = None) -> Iterator[Pending]:
    """Of each model's newest version and of what its channels serve: the unproven engines that run here.

    only: that model alone.  on: see `pending_of`.
    A version that cannot be read is left out; `enginery verify` names it.
    """
    for model in lookup.models(store) if only is None else [check_model(only)]:
        for version in sorted(_looked_at(store, model), key=version_order):
            try:
                found = pending_of(store, model, version, on=on)
            except EngineryError as error:
                logging.getLogger(__name__).warning("%s@%s is left out: %s", model, version, error)
                continue
            if found.engines:
                yield found


def pending_of(store: Store, model: str, version: str, target: str | None = None, on: Target | None = None) -> Pending:
    """The unproven engines of a version that run here; whichever version it is, for whoever asks.

    target: only those for it, as `--target` names one.  on: instead those for this GPU, which workers have; whether
    they run there (compiler, versions) is asked there.
    Raises UnknownNameError, and IntegrityError for a version that cannot be read.
    """
    manifest = lookup.load(store, check_model(model), check_version(version))
    entries = _select_entries(_here(store, manifest), target)
    return Pending(manifest, tuple(entry for entry in entries if _unproven(entry) and _why_not(entry, on) is None))


def why_nothing(store: Store, item: Pending, target: str | None = None, on: Target | None = None) -> str:
    """Why a version has no engine that could be proven here, or on workers. target, on: as for `pending_of`."""
    entries = _select_entries(_here(store, item.manifest), target)
    for_target = f" for {target}" if target else ""
    waiting = [entry for entry in entries if _unproven(entry)]
    if waiting:
        return "; ".join(dict.fromkeys(f"{item.reference}: {_why_not(entry, on)}" for entry in waiting))
    counts = Counter(entry.status for entry in entries if entry.digest)
    there = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    return f"{item.reference} has no unproven engine{for_target}; it has {there}"


def prove(item: Pending, context: RunContext) -> list[PendingProof]:
    """Run a version's pending engines here and attach a report to each. What was proven meanwhile is not run again.

    What goes wrong is its row: a version that the trust policy does not let run, too.
    """
    try:
        require(context.store, item.manifest)
        digests = {str(entry.digest) for entry in item.engines}
        return [_row(item, found) for found in revalidate(item.manifest, context, engines=digests, again=False)]
    except EngineryError as error:
        return [PendingProof(item.reference, None, "error", str(error))]


def _looked_at(store: Store, model: str) -> set[str]:
    found = lookup.versions(store, model)
    served = {
        channel.version for name in channels.names(store, model) if (channel := channels.read(store, model, name))
    }
    return ({found[-1]} if found else set()) | (served & set(found))


def _select_entries(entries: Iterable[EngineEntry], target: str | None) -> list[EngineEntry]:
    """The entries for a target: a generation means its products, too."""
    if target is None:
        return [*entries]
    wanted = parse_targets(target)
    names, generations = {item.name for item in wanted}, {item.sm for item in wanted if item.product is None}
    return [entry for entry in entries if entry.target in names or entry.hardware.sm in generations]


def _here(store: Store, manifest: Manifest) -> list[JudgedEntry]:
    """The engines with the status that they have on this machine's kind of CPU."""
    return [entry.on_cpu(this_kind().name) for entry in judge_entries(store, manifest)]


def _why_not(entry: EngineEntry, on: Target | None) -> str | None:
    """Why an engine cannot be run here, or is not for the GPU that workers have; None when it can, or is."""
    if on is None:
        return why_not_here(entry)
    wanted = entry.hardware
    if wanted.compute_capability == on.compute_capability and wanted.product in (None, on.product):
        return None
    return f"an unproven engine is for {entry.target}, and these workers have {on.name}"


def _unproven(entry: EngineEntry) -> bool:
    return entry.digest is not None and entry.status == "unproven"


def _row(item: Pending, found: Attested) -> PendingProof:
    return PendingProof(item.reference, found.entry.unit, found.verdict, found.reason)
