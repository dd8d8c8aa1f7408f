"""Checks a whole registry, and repairs what can be repaired."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from enginesmith.core.errors import EnginesmithError, IntegrityError, is_digest
from enginesmith.core.names import Reference, is_name
from enginesmith.registry import leases
from enginesmith.registry.builds.runs import read_record
from enginesmith.registry.collection.references import find_named_digests, inventory
from enginesmith.registry.evidence.attachments import attachments
from enginesmith.registry.evidence.attestations import attestations
from enginesmith.registry.evidence.canaries import canaries
from enginesmith.registry.evidence.latencies import latency_reports
from enginesmith.registry.latency_series import parse_series
from enginesmith.registry.leases import hold_lease, read_shards, read_state
from enginesmith.registry.manifest import Manifest, Misplaced, load_pinned
from enginesmith.registry.registered_specs import registrations
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import new_blake3_hasher
from enginesmith.registry.store.layout import (
    BLOBS,
    LEASES,
    MODELS,
    RECORDS,
    SERIES,
    blob_key,
    lease_key,
    registered_key,
)
from enginesmith.registry.trust.policy import find_misplaced
from enginesmith.registry.versions import channel_writes, lookup, policies
from enginesmith.registry.versions.lookup import MISSING, engine_sizes, find_lost, is_snapshot
from enginesmith.registry.versions.state import Move, read_channel, read_history

# What a verification finds: problems, some of which are faults.

FAULTS = ("missing", "corrupt", "size", "blake3", "edited", "misplaced", "dangling", "signature", "stale")
# What a channel's snapshot is called among the things that a blob is part of.
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
class Findings:
    """What a verification has found so far. needed: digest -> what it is part of.  unread: whether a manifest could not
    be read.  blake3: digest -> reference -> the digest that it claims."""

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
        """Add a problem."""
        self.problems.append(Problem(kind, what, detail, affects))

    def close(self) -> Verification:
        """The result."""
        return Verification(tuple(self.problems), len(self.manifests), self.blobs, self.size_bytes)


# Reads every byte of blobs again, and compares digests.


def check_blobs(found: Findings, digests: list[str]) -> None:
    """Add what is wrong with these blobs: missing, of other bytes, or of another BLAKE3 than manifests claim."""
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


# Finds what nothing refers to or what was left behind: records, blobs, documents, leases, series.


def check_litter(found: Findings, stored: list[str]) -> None:
    """Add records that count for nothing, blobs that nothing refers to, and files of writers that died."""
    contents = inventory(found.store)
    # By the rules of garbage collection: what it keeps is no orphan, though no manifest names it.
    remembered = find_named_digests(found.store, contents)
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


def check_documents(found: Findings) -> None:
    """Documents that refer to nothing: remains of versions, pins and channels."""
    contents = inventory(found.store)
    there = set(contents.versions)
    models = {model for model, _ in there}
    for (model, version), keys in contents.folders.items():
        if (model, version) not in there:
            for key in keys:
                found.add(
                    "unreferenced", key, f"{model}@{version} has no manifest; `enginesmith registry gc` deletes it"
                )
    for key in contents.others:
        match key.removeprefix(MODELS).split("/"):
            case [model, "pins", name] if (model, name.removesuffix(".json")) not in there:
                found.add("unreferenced", key, "a pin of a version that is not there")
            case [model, "channels", _] if model not in models:
                found.add("dangling", key, f"{model} has no version")
            case [_, "versions", *_]:
                found.add("unreferenced", key, "no model or version can have that name; delete it by hand")
    _check_policies(found, contents.others)


def _check_policies(found: Findings, others: tuple[str, ...]) -> None:
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
        except EnginesmithError as error:
            found.add("edited", key, str(error))


def check_leases(found: Findings) -> None:
    """Leases and garbage marks that cannot be read, and leases of writers that died."""
    try:
        read_shards(found.store, read_state(found.store).shards)
        now = found.store.now()
        over = [lease for lease in leases.list_leases(found.store) if not lease.is_held(now)]
    except IntegrityError as error:
        found.add("edited", LEASES, str(error))
        return
    for lease in over:
        found.add(
            "stray",
            lease_key(lease.id),
            f"lease of a writer that died: {lease.what}; `enginesmith registry gc` deletes it",
        )


def check_series(found: Findings) -> None:
    """Series of latencies that cannot be read, or are not what their keys say."""
    for key in found.store.list(SERIES):
        try:
            parse_series(found.store.read(key) or b"", key)
        except IntegrityError as error:
            found.add("forgotten", key, str(error))


# Mends what a verification found: corrupt blobs are moved away, snapshots are written anew.


@dataclass(frozen=True)
class Repairs:
    """What was mended. blobs: digests of corrupt ones that were moved away.  channels: of which (`model:channel`) the
    snapshots were written anew."""

    blobs: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()


def repair(store: Store, verification: Verification) -> Repairs:
    """Move corrupt blobs away, so that the next build makes them again, and write snapshots anew; the
    marks of rollouts that do not run are removed.

    Raises InputError for a channel of a newer format.
    """
    corrupt = tuple(problem.what for problem in verification.problems if problem.kind == "corrupt")
    for digest in corrupt:
        store.discard(digest)
    channels = {item.what for item in verification.problems if item.kind == "stale" and ":" in item.what}
    for problem in verification.problems:
        if problem.kind in ("missing", "corrupt", "size"):
            named = (affected.rpartition(" ") for affected in problem.affects)
            channels |= {where for where, _, what in named if what == SNAPSHOT}
    for where in sorted(channels):
        model, _, channel = where.partition(":")
        with hold_lease(store, f"refreshing {where}") as guard:
            channel_writes.refresh_channel(guard, model, channel)
    for model, channel in channel_writes.running_rollouts(store):
        channel_writes.clear_marks(store, model, channel)
    return Repairs(corrupt, tuple(sorted(channels)))


# Checks what is served: versions and channels; and notes which blobs they need.


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
        if fault := channel_writes.find_fault(store, channel):
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
    attached = _take_attachments(found, manifest)
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
    for digest, loss in find_lost(found.store, attached | engine_sizes(manifest)).items():
        if loss.kind == "size":  # what is missing is found with the other blobs
            found.add("size", digest, loss.detail, (found.needed[digest][-1],))


def _take_attachments(found: Findings, manifest: Manifest) -> dict[str, int | None]:
    """Check the documents of a version's attachments, and note their blobs: digest -> size in bytes."""
    reference, sizes = f"{manifest.model}@{manifest.version}", dict[str, int | None]()
    try:
        for attached, _ in attachments(found.store, manifest):
            found.needed.setdefault(attached.digest, []).append(f"{reference} attachment {attached.name}")
            sizes[attached.digest] = attached.size_bytes
    except IntegrityError as error:
        found.add("edited", reference, str(error))
    return sizes


# Reads a version or a whole registry again, in the order of its parts.


def verify(
    store: Store, reference: Reference | None = None, progress: Callable[[str], None] = lambda _: None
) -> Verification:
    """Read every byte of a version, or of the whole registry, and compare digests. progress: called with each blob.

    Raises UnknownNameError for an unknown reference; damage is in the result and raises nothing.
    """
    findings = Findings(store, progress)
    if reference is not None:
        take_version(findings, lookup.locate(store, reference).manifest)
        check_blobs(findings, sorted(findings.needed))
        return findings.close()
    for model in lookup.models(store):
        check_model(findings, model)
    take_registered(findings)
    stored = []
    for key in store.list(BLOBS):
        digest = key.rpartition("/")[2]
        if is_digest(digest) and key == blob_key(digest):
            stored.append(digest)
        else:
            findings.add("stray", key, "not the name of a blob")
    stored.sort()
    check_blobs(findings, sorted({*stored, *findings.needed}))
    check_litter(findings, stored)
    check_documents(findings)
    check_leases(findings)
    check_series(findings)
    return findings.close()
