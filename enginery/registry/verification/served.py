"""Checks what is served: versions, channels, pointers, feeds; and notes which blobs they need."""

from enginery.core.errors import EngineryError, IntegrityError
from enginery.core.names import Reference, is_name
from enginery.registry.ensembles import load_pinned
from enginery.registry.evidence.attestations import attestations
from enginery.registry.evidence.canaries import canaries
from enginery.registry.evidence.latencies import latency_reports
from enginery.registry.evidence.loads import load_reports
from enginery.registry.manifest import Manifest, Misplaced
from enginery.registry.registered_specs import registrations
from enginery.registry.store.layout import MODELS, registered_key
from enginery.registry.trust.requirement import find_misplaced
from enginery.registry.verification.findings import FEED, SNAPSHOT, Findings
from enginery.registry.versions import feeds, lookup, refresh
from enginery.registry.versions.lookup import engine_sizes, find_lost
from enginery.registry.versions.pointers import read_pointer


def check_model(found: Findings, model: str) -> None:
    """Check the versions, channels and pointers of a model."""
    for version in lookup.versions(found.store, model):
        try:
            take_version(found, lookup.load(found.store, model, version))
        except Misplaced as error:
            found.add("misplaced", f"{model}@{version}", str(error))
        except IntegrityError as error:
            found.add("edited", f"{model}@{version}", str(error))
            found.unread = True
    for name in lookup.channel_names(found.store, model):
        try:
            lookup.locate(found.store, Reference(model, channel=name))
            channel = lookup.read_channel(found.store, model, name)
        except EngineryError as error:
            found.add("dangling", f"{model}:{name}", str(error))
            continue
        _check_pointer(found, model, name)
        # The canary reports that a channel's moves refer to must be kept.
        for move in channel.history if channel else ():
            for digest in move.canary:
                what = f"{model}:{name} canary report of the move to {move.version}"
                found.needed.setdefault(digest, []).append(what)


def _check_pointer(found: Findings, model: str, channel: str) -> None:
    """A pointer that leads elsewhere than its channel, or with other documents than the version has; and one that is
    missing, or was left marked."""
    where = f"{model}:{channel}"
    try:
        if fault := refresh.find_fault(found.store, model, channel):
            found.add("stale" if fault[0] else "unsettled", where, f"its pointer: {fault[1]}")
        pointer = read_pointer(found.store, model, channel)
    except EngineryError as error:
        found.add("stale", where, str(error))
        return
    for served in pointer.versions if pointer else ():
        if served.snapshot:
            found.needed.setdefault(served.snapshot, []).append(f"{where} {SNAPSHOT}")


def check_feeds(found: Findings) -> None:
    """Feeds that lead elsewhere than the pointers do, or cannot be read; their shards are needed."""
    for name in feeds.feed_names(found.store):
        what = f"{FEED}{name}"
        try:
            if faults := feeds.find_feed_faults(found.store, name):
                found.add("stale", what, "; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if faults[3:] else ""))
            for digest in filter(None, feeds.read_feed(found.store, name).shards):
                found.needed.setdefault(digest, []).append(f"{what} shard")
        except IntegrityError:  # told above
            continue
        except EngineryError as error:
            found.add("stale", what, str(error))


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
        list(load_reports(found.store, manifest))
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
