"""Published engines that wait for a proof which this machine, or a worker with a GPU, can give: of models and of
ensembles."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.targets import parse_targets
from enginesmith.core.names import check_model, check_version, version_order
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions import lookup
from pipeline.compile.run_context import RunContext
from pipeline.operations.revalidate import (
    ensemble_not_here,
    revalidate,
    why_not_here,
    why_unmeasured,
)


@dataclass(frozen=True)
class Pending:
    """A version, and those of its engines that wait for a proof that this machine or a worker with a GPU can give."""

    manifest: Manifest
    engines: tuple[EngineEntry, ...]

    @property
    def reference(self) -> str:
        """'digits@4'."""
        return f"{self.manifest.model}@{self.manifest.version}"


@dataclass(frozen=True)
class PendingProof:
    """The verdict on one engine; with engine None, why its whole version could not be tried ('error')."""

    reference: str
    engine: str | None
    verdict: str
    reason: str

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.verdict in ("proven", "unproven")


def list_pending(store: Store, only: str | None = None, on: Target | None = None) -> Iterator[Pending]:
    """Of each model's newest version and of the versions that its channels serve, the unproven engines that run here.

    only: that model alone.  on: as for `pending_of`.
    A version that cannot be read is left out with a warning; `enginesmith registry fsck` names it too.
    """
    for model in lookup.models(store) if only is None else [check_model(only)]:
        found = lookup.versions(store, model)
        channel_list = (lookup.read_channel(store, model, name) for name in lookup.channel_names(store, model))
        served = {channel.version for channel in channel_list if channel}
        for version in sorted({*found[-1:], *(served & set(found))}, key=version_order):
            try:
                pending = pending_of(store, model, version, on=on)
            except EnginesmithError as error:
                logging.getLogger(__name__).warning("%s@%s is left out: %s", model, version, error)
                continue
            if pending.engines:
                yield pending


def pending_of(store: Store, model: str, version: str, target: str | None = None, on: Target | None = None) -> Pending:
    """The unproven engines of a version that run here.

    target: only those for it, as `--target` names one.  on: instead those for this GPU, which Ray's workers have;
    whether they run there (compiler, versions) is asked there.
    Raises UnknownNameError, and IntegrityError for a version that cannot be read.
    """
    manifest = lookup.load(store, check_model(model), check_version(version))
    waiting = filter(_is_unproven, _select_entries(store, manifest, target))
    return Pending(manifest, tuple(entry for entry in waiting if _why_not(store, manifest, entry, on) is None))


def why_nothing(store: Store, item: Pending, target: str | None = None, on: Target | None = None) -> str:
    """Why a version has no engine that could be proven here, or on workers. target, on: as for `pending_of`."""
    entries = _select_entries(store, item.manifest, target)
    if waiting := [entry for entry in entries if _is_unproven(entry)]:
        reasons = (_why_not(store, item.manifest, entry, on) for entry in waiting)
        return "; ".join(dict.fromkeys(f"{item.reference}: {reason}" for reason in reasons))
    counts = Counter(entry.status for entry in entries if entry.digest)
    there = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    return f"{item.reference} has no unproven engine{f' for {target}' if target else ''}; it has {there}"


def prove(item: Pending, context: RunContext) -> list[PendingProof]:
    """Run a version's pending engines here and attach a report to each; those proven meanwhile are not run again.

    An error is the row of its version, also where the trust policy does not let the version run.
    """
    try:
        require(context.store, item.manifest)
        digests = {str(entry.digest) for entry in item.engines}
        found = revalidate(item.manifest, context, engines=digests, again=False)
        return [PendingProof(item.reference, each.entry.unit, each.verdict, each.reason) for each in found]
    except EnginesmithError as error:
        return [PendingProof(item.reference, None, "error", str(error))]


def _select_entries(store: Store, manifest: Manifest, target: str | None) -> list[EngineEntry]:
    """The entries for a target, with the status that they have on this machine's kind of CPU; None for all targets. A
    GPU generation includes its products."""
    entries = [entry.on_cpu(this_kind().name) for entry in judge_entries(store, manifest)]
    if target is None:
        return [*entries]
    wanted = parse_targets(target)
    names, generations = {item.name for item in wanted}, {item.sm for item in wanted if item.product is None}
    return [entry for entry in entries if entry.target in names or entry.hardware.sm in generations]


def _is_unproven(entry: EngineEntry) -> bool:
    return entry.digest is not None and entry.status == "unproven"


def _why_not(store: Store, manifest: Manifest, entry: EngineEntry, on: Target | None) -> str | None:
    """Why an engine cannot be proven here, or is not for the GPU `on` of the workers; None when it can, or is. That of
    an ensemble cannot where one of its graphs cannot, and none can where a part is not measured."""
    if unknown := why_unmeasured(entry, store):
        return unknown
    if on is None:
        return ensemble_not_here(store, manifest, entry) if manifest.graphs else why_not_here(entry)
    wanted = entry.hardware
    if wanted.compute_capability == on.compute_capability and wanted.product in (None, on.product):
        return None
    return f"an unproven engine is for {entry.target}, and these workers have {on.name}"
