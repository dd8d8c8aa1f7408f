"""Reads a version or a whole registry again, and finds what is missing, corrupt, edited, or referred to by nothing.

Problems are data. A *fault* means that something published cannot be served as it was; any other problem wastes space
or repeats work, and harms nothing.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from enginery.core.digest import is_digest
from enginery.core.errors import EngineryError, IntegrityError
from enginery.core.names import Reference, is_name
from enginery.registry import leases
from enginery.registry.collection.inventory import inventory
from enginery.registry.collection.references import find_named_digests
from enginery.registry.ensembles import load_pinned
from enginery.registry.evidence.attestations import attestations
from enginery.registry.evidence.canaries import canaries
from enginery.registry.evidence.latencies import latency_reports
from enginery.registry.evidence.loads import load_reports
from enginery.registry.latency_series import parse_series
from enginery.registry.leases import hold_lease
from enginery.registry.manifest import Manifest, Misplaced
from enginery.registry.marks import read_shards, read_state
from enginery.registry.records import read_record
from enginery.registry.registered_specs import registrations
from enginery.registry.store.base import Store
from enginery.registry.store.files import new_blake3_hasher
from enginery.registry.store.layout import BLOBS, LEASES, MODELS, RECORDS, SERIES, blob_key, lease_key, registered_key
from enginery.registry.trust.requirement import find_misplaced
from enginery.registry.versions import feeds, lookup, policies, refresh
from enginery.registry.versions.lookup import MISSING, engine_sizes, find_lost
from enginery.registry.versions.pointers import read_pointer
from enginery.registry.versions.snapshots import is_snapshot

FAULTS = ("missing", "corrupt", "size", "blake3", "edited", "misplaced", "dangling", "signature", "stale")
# Problems of pointers, which `repair` writes anew.
_POINTERS = ("stale", "unsettled")

# What a feed is called, before its name.
FEED = "feed "
# What a pointer's snapshot is called among the things that a blob is part of.
SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. what: a digest, reference, key or path.  affects: what it was published as part of."""

    kind: str
    what: str
    detail: str
    affects: tuple[str, ...] = ()

    @property
    def fault(self) -> bool:
        """Whether something published cannot be served as it was."""
        return self.kind in FAULTS


@dataclass(frozen=True)
class Verification:
    """What was read and what was found wrong. size_bytes: of all blobs that were read."""

    problems: tuple[Problem, ...]
    versions: int
    blobs: int
    size_bytes: int

    @property
    def sound(self) -> bool:
        """Whether everything published can be served as it was."""
        return not any(problem.fault for problem in self.problems)


@dataclass
class _Findings:
    store: Store
    progress: Callable[[str], None]
    problems: list[Problem] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    needed: dict[str, list[str]] = field(default_factory=dict)
    blake3: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: bool = False
    blobs: int = 0
    size_bytes: int = 0

    def add(self, kind: str, what: str, detail: str, affects: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(kind, what, detail, affects))

    def close(self) -> Verification:
        return Verification(tuple(self.problems), len(self.manifests), self.blobs, self.size_bytes)


def verify(
    store: Store, reference: Reference | None = None, progress: Callable[[str], None] = lambda _: None
) -> Verification:
    """Read every byte of a version, or of the whole registry, and compare digests. progress: called with each blob.

    Raises UnknownNameError for an unknown reference; damage is in the result and raises nothing.
    """
    found = _Findings(store, progress)
    if reference is not None:
        _take(found, lookup.locate(store, reference).manifest)
        _check_blobs(found, sorted(found.needed))
        return found.close()
    for model in lookup.models(store):
        _check_model(found, model)
    _take_registered(found)
    _check_feeds(found)
    stored = []
    for key in store.list(BLOBS):
        digest = key.rpartition("/")[2]
        if is_digest(digest) and key == blob_key(digest):
            stored.append(digest)
        else:
            found.add("stray", key, "not the name of a blob")
    stored.sort()
    _check_blobs(found, sorted({*stored, *found.needed}))
    _check_litter(found, stored)
    _check_documents(found)
    _check_leases(found)
    _check_series(found)
    return found.close()


@dataclass(frozen=True)
class Repairs:
    """What was mended. blobs: digests of corrupt ones that were moved away.  pointers: of which channels
    (`model:channel`) the pointer was written anew, and which feeds."""

    blobs: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()


def repair(store: Store, verification: Verification) -> Repairs:
    """Move corrupt blobs away, so that the next build makes them again, and write pointers and their snapshots anew.

    Raises InputError for a pointer of a newer format.
    """
    corrupt = tuple(problem.what for problem in verification.problems if problem.kind == "corrupt")
    for digest in corrupt:
        store.discard(digest)
    pointers = {item.what for item in verification.problems if item.kind in _POINTERS and ":" in item.what}
    for problem in verification.problems:
        if problem.kind in ("missing", "corrupt", "size"):
            named = (affected.rpartition(" ") for affected in problem.affects)
            pointers |= {where for where, _, what in named if what == SNAPSHOT}
    for where in sorted(pointers):
        model, _, channel = where.partition(":")
        with hold_lease(store, f"refreshing the pointer of {where}") as guard:
            refresh.refresh_channel(guard, model, channel, force=True)
    return Repairs(corrupt, tuple(sorted(pointers)), _repair_feeds(store, verification))


def _repair_feeds(store: Store, verification: Verification) -> tuple[str, ...]:
    """Write feeds anew whose shards are lost or that lead elsewhere, by their patterns; one whose root is damaged has
    none that can be read, and stays."""
    named = {item.what for item in verification.problems if item.kind == "stale" and item.what.startswith(FEED)}
    for problem in verification.problems:
        if problem.kind in ("missing", "corrupt"):
            named |= {item.removesuffix(" shard") for item in problem.affects if item.startswith(FEED)}
    mended = []
    for what in sorted(named):
        name = what.removeprefix(FEED)
        with suppress(IntegrityError):
            feeds.set_feed(store, name, feeds.read_feed(store, name).channels)
            mended.append(name)
    return tuple(mended)


def _check_model(found: _Findings, model: str) -> None:
    for version in lookup.versions(found.store, model):
        try:
            _take(found, lookup.load(found.store, model, version))
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


def _check_pointer(found: _Findings, model: str, channel: str) -> None:
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


def _check_feeds(found: _Findings) -> None:
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


def _take_registered(found: _Findings) -> None:
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


def _take(found: _Findings, manifest: Manifest) -> None:
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


def _check_blobs(found: _Findings, digests: list[str]) -> None:
    for digest in digests:
        affects = tuple(found.needed.get(digest, ()))
        if not found.store.has(digest):
            found.add(MISSING.kind, digest, MISSING.detail, affects)
            continue
        found.progress(digest)
        found.blobs += 1
        found.size_bytes += found.store.size(digest)
        actual = found.store.rehash(digest)
        if actual.digest != digest:
            found.add("corrupt", digest, f"its bytes have digest {actual.digest}", affects)
        elif actual.blake3 is not None:
            # A manifest may be wrong about a sound blob: a pull that verifies it by BLAKE3 then fails.
            for reference, claimed in found.blake3.get(digest, {}).items():
                if claimed != actual.blake3:
                    detail = f"says {claimed} of blob {digest}, whose BLAKE3 is {actual.blake3}"
                    found.add("blake3", reference, detail, affects)
    if found.blake3 and new_blake3_hasher() is None:
        found.add("unchecked", "blake3", "the library is not installed, and pulls verify by it; pip install blake3")


def _check_litter(found: _Findings, stored: list[str]) -> None:
    known = inventory(found.store)
    # By the rules of garbage collection: what it keeps is no orphan, though no manifest names it.
    remembered = find_named_digests(found.store, known)
    for key in found.store.list(RECORDS):
        record = read_record(found.store.read(key))
        if record is None or not all(map(found.store.has, record.blobs)):
            found.add("forgotten", key, "unreadable, or its blobs are gone; the step will run again")
        else:
            remembered.update(record.blobs)
    for digest in () if found.unread else stored:  # what a manifest that cannot be read refers to is not known
        if digest not in found.needed and digest not in remembered and not is_snapshot(found.store, digest):
            found.add("orphaned", digest, f"{found.store.size(digest)} bytes that nothing refers to")
    for path in found.store.strays():
        found.add("stray", path, "left behind by a writer that died; the next build cleans it")


def _check_documents(found: _Findings) -> None:
    """Documents that refer to nothing: remains of versions, pins and channels."""
    known = inventory(found.store)
    there = set(known.versions)
    models = {model for model, _ in there}
    for (model, version), keys in known.folders.items():
        if (model, version) not in there:
            for key in keys:
                found.add("unreferenced", key, f"{model}@{version} has no manifest; `enginery gc` deletes it")
    for key in known.others:
        match key.removeprefix(MODELS).split("/"):
            case [model, "pins", name] if (model, name.removesuffix(".json")) not in there:
                found.add("unreferenced", key, "a pin of a version that is not there")
            case [model, "channels", _] if model not in models:
                found.add("dangling", key, f"{model} has no version")
            case [_, "versions", *_]:
                found.add("unreferenced", key, "no model or version can have that name; delete it by hand")
    _check_policies(found, known.others)


def _check_policies(found: _Findings, others: tuple[str, ...]) -> None:
    """Policies that cannot be read. others: keys of documents of models, policies among them."""
    model: str | None
    for key in (*others, *found.store.list("policies/")):
        match key.split("/"):
            case ["policies", name]:
                model = None
            case ["models", model, "policies", name]:
                pass
            case _:
                continue
        try:
            policies.read(found.store, model, name.removesuffix(".json"))
        except EngineryError as error:
            found.add("edited", key, str(error))


def _check_leases(found: _Findings) -> None:
    """Leases and garbage marks that cannot be read, and leases of writers that died."""
    try:
        read_shards(found.store, read_state(found.store).shards)
        over = [lease for lease in leases.list_leases(found.store) if not lease.is_held(leases.now())]
    except IntegrityError as error:
        found.add("edited", LEASES, str(error))
        return
    for lease in over:
        found.add("stray", lease_key(lease.id), f"lease of a writer that died: {lease.what}; `enginery gc` deletes it")


def _check_series(found: _Findings) -> None:
    """Series of latencies that cannot be read, or are not what their keys say."""
    for key in found.store.list(SERIES):
        try:
            parse_series(found.store.read(key) or b"", key)
        except IntegrityError as error:
            found.add("forgotten", key, str(error))
