"""What nodes would lose by a move of a channel: targets and precisions that it serves now and would not serve then."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from enginesmith.core.errors import IntegrityError
from enginesmith.core.text import join_first
from enginesmith.registry.evidence.attestations import Attestation, JudgedEntry, judge_entries
from enginesmith.registry.evidence.canaries import list_served
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import load_served
from enginesmith.registry.versions.state import Channel

# Losses that a move may have, as `list_losses` names them; None: any.
AcceptedLosses = Collection[str] | None
_SHOWN = 8


def list_losses(
    store: Store,
    channel: Channel | None,
    manifest: Manifest,
    proven_only: bool,
    counts: Callable[[Attestation], bool] | None = None,
) -> tuple[str, ...]:
    """What a channel serves now and would not serve of a version: 'sm_89 int8', 'cpu int8 on x86-64-v3'.

    An engine for a whole generation serves each product of it, and any backend's engine counts. Nothing is lost where
    what the channel serves cannot be read.
    proven_only: whether it would serve proven engines alone.  counts: as of `judge_entries`.
    Raises IntegrityError for a damaged attestation of the version.
    """
    if channel is None:
        return ()
    try:
        before = _judge(store, load_served(store, channel), counts)
    except IntegrityError:
        return ()
    after = _judge(store, manifest, counts)
    found = (_losses(entry, channel.proven_only, after, proven_only) for entry in before)
    return tuple(dict.fromkeys(name for names in found for name in names))


def loss_refusal(
    losses: Sequence[str], accepted: AcceptedLosses, manifest: Manifest, channel: Channel | None
) -> str | None:
    """The reason why a channel does not accept a version by which nodes lose engines; None where that is accepted."""
    unaccepted = [name for name in losses if accepted is not None and name not in accepted]
    if channel is None or not unaccepted:
        return None
    reference, where = f"{manifest.model}@{manifest.version}", f"{channel.model}:{channel.name}"
    return (
        f"{where} serves {channel.version}, and {reference} has nothing for {join_first(unaccepted, _SHOWN)}; build or "
        "validate what is missing, or accept and record the loss with --accept-loss"
    )


def _judge(store: Store, manifest: Manifest, counts: Callable[[Attestation], bool] | None) -> list[JudgedEntry]:
    """The engines and the compile caches of a version, as engines of a precision of their own."""
    caches = judge_entries(store, replace(manifest, engines=manifest.caches, graphs=()), counts)
    named = (replace(entry, precision=f"{entry.precision} (compile cache)") for entry in caches)  # type: ignore[arg-type]
    return [*judge_entries(store, manifest, counts), *named]


def _losses(
    entry: JudgedEntry, was_proven_only: bool, after: Sequence[JudgedEntry], proven_only: bool
) -> Iterator[str]:
    """The name of an engine that is served now, and nothing in its place would be; else the kinds of CPU of which that
    holds."""
    alike = [item for item in after if item.precision == entry.precision and _reaches(item, entry)]

    def is_lost(kind: str | None) -> bool:
        is_served = list_served([entry.on_cpu(kind)], was_proven_only)
        return bool(is_served) and not list_served([item.on_cpu(kind) for item in alike], proven_only)

    name = f"{entry.target} {entry.precision}"
    if is_lost(None):
        yield name
    else:
        yield from (f"{name} on {kind}" for kind in entry.on if is_lost(kind))


def _reaches(engine: JudgedEntry, other: JudgedEntry) -> bool:
    return engine.target in (other.target, other.hardware.sm)
