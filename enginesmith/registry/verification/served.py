"""Checks what is served: versions and channels; and notes which blobs they need."""

from dataclasses import replace

from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.core.names import Reference, is_name
from enginesmith.registry.ensembles import load_pinned
from enginesmith.registry.evidence.attestations import attestations
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.evidence.latencies import latency_reports
from enginesmith.registry.manifest import Manifest, Misplaced
from enginesmith.registry.registered_specs import registrations
from enginesmith.registry.store.layout import MODELS, registered_key
from enginesmith.registry.trust.requirement import find_misplaced
from enginesmith.registry.verification.findings import SNAPSHOT, Findings
from enginesmith.registry.versions import lookup, refresh
from enginesmith.registry.versions.lookup import engine_sizes, find_lost
from enginesmith.registry.versions.state import Move, read_channel, read_history


def check_model(found: Findings, model: str) -> None:
    """Check the versions and channels of a model."""
    for version in lookup.versions(found.store, model):
        try:
            take_version(found, lookup.load(found.store, model, version))
        except Misplaced as error:
            found.add("misplaced", f"{model}@{version}", str(error))
        except IntegrityError as error:
            found.add("edited", f"{model}@{version}", str(error))
            found.unread = True
    for name in lookup.channel_names(found.store, model):
        _check_channel(found, model, name)


def _check_channel(found: Findings, model: str, name: str) -> None:
    """A channel that leads nowhere, by the channel itself or by its rollout; whose history is damaged; whose snapshots
    have other documents than the versions. Its snapshots, and the canary reports that its moves refer to, are needed.
    """
    where, store = f"{model}:{name}", found.store
    try:
        lookup.locate(store, Reference(model, channel=name))
        channel = read_channel(store, model, name)
        if channel is None:
            return
        if rollout := channel.active_rollout:
            lookup.load_served(store, replace(channel, move=Move(rollout.version, rollout.manifest, "")))
        moves = read_history(store, channel).moves
        if fault := refresh.find_fault(store, channel):
            found.add("stale", where, fault)
    except EnginesmithError as error:
        found.add("dangling", where, str(error))
        return
    for digest in channel.snapshots.values():
        found.needed.setdefault(digest, []).append(f"{where} {SNAPSHOT}")
    for move in moves:
        for digest in move.canary:
            found.needed.setdefault(digest, []).append(f"{where} canary report of the move to {move.version}")


def take_registered(found: Findings) -> None:
    """Add the files of registered specs, which are needed to build them."""
    for name in found.store.children(MODELS):
        model = name.removesuffix("/")
        try:
            items = registrations(found.store, model) if is_name(model) else []
        except IntegrityError as error:
            found.add("edited", registered_key(model), str(error))
            continue
        for item in items:
            for file, digest in item.bundle.files.items():
                found.needed.setdefault(digest, []).append(f"{model}, registered {item.at}: {file}")


def take_version(found: Findings, manifest: Manifest) -> None:
    """Check the documents of a version, and note the blobs that it needs."""
    reference = f"{manifest.model}@{manifest.version}"
    found.manifests.append(manifest)
    for digest, what in manifest.blobs().items():
        found.needed.setdefault(digest, []).append(f"{reference} {what}")
        if claimed := manifest.blake3.get(digest):
            found.blake3.setdefault(digest, {})[reference] = claimed
    try:
        list(attestations(found.store, manifest))
        list(latency_reports(found.store, manifest))
        for verdict in canaries(found.store, manifest):
            found.needed.setdefault(verdict.report, []).append(f"{reference} report of its canary on {verdict.target}")
    except IntegrityError as error:
        found.add("edited", reference, str(error))
    for graph in manifest.graphs:
        try:
            load_pinned(found.store, graph)
        except IntegrityError as error:
            found.add("dangling", reference, str(error))
    # Signatures that cannot be read or are about something else; whose they are only a trust policy can say.
    for key, detail in find_misplaced(found.store, manifest):
        found.add("signature", key, detail, (reference,))
    for digest, loss in find_lost(found.store, engine_sizes(manifest)).items():
        if loss.kind == "size":  # what is missing is found with the other blobs
            found.add("size", digest, loss.detail, (f"{reference} {manifest.blobs()[digest]}",))
