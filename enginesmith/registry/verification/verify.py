"""Checks a whole registry, and repairs the damage that can be repaired."""

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
from enginesmith.registry.store import layout
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust.policy import find_misplaced
from enginesmith.registry.versions import channel_writes, lookup, policies
from enginesmith.registry.versions.channel_state import Move, read_channel, read_history
from enginesmith.registry.versions.lookup import MISSING, engine_sizes, find_lost, is_snapshot

FAULTS = ("missing", "corrupt", "size", "blake3", "edited", "misplaced", "dangling", "signature", "stale")
# The name of a channel's snapshot in the lists of what a blob is part of.
SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Problem:
    """One problem. what: a digest, reference, key or path.  affects: the published items that it is part of."""

    kind: str
    what: str
    detail: str
    affects: tuple[str, ...] = ()

    @property
    def fault(self) -> bool:
        """Whether published content cannot be served unchanged."""
        return self.kind in FAULTS


@dataclass(frozen=True)
class Verification:
    """The result of a verification. size_bytes: of all blobs that were read."""

    problems: tuple[Problem, ...]
    versions: int
    blobs: int
    size_bytes: int

    @property
    def sound(self) -> bool:
        """Whether all published content can be served unchanged."""
        return not any(problem.fault for problem in self.problems)


@dataclass
class Findings:
    """The findings of a verification so far. needed: digest -> the items that it is part of.  unread: whether a
    manifest was unreadable.  blake3: digest -> reference -> the BLAKE3 that it claims."""

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
        """The result of the verification."""
        return Verification(tuple(self.problems), len(self.manifests), self.blobs, self.size_bytes)


def check_blobs(findings: Findings, digests: list[str]) -> None:
    """Add problems of these blobs: missing, wrong bytes, or another BLAKE3 than manifests claim."""
    for digest in digests:
        dependents = tuple(findings.needed.get(digest, ()))
        if not findings.store.has(digest):
            findings.add(MISSING.kind, digest, MISSING.detail, dependents)
            continue
        findings.progress(digest)
        findings.blobs += 1
        findings.size_bytes += findings.store.size(digest)
        actual_digests = findings.store.rehash(digest)
        if actual_digests.digest != digest:
            findings.add("corrupt", digest, f"its bytes have digest {actual_digests.digest}", dependents)
        else:
            # A manifest may have a wrong BLAKE3 for a sound blob: a pull that verifies by BLAKE3 then fails.
            for reference, claimed_blake3 in findings.blake3.get(digest, {}).items():
                if claimed_blake3 != actual_digests.blake3:
                    detail = f"says {claimed_blake3} of blob {digest}, whose BLAKE3 is {actual_digests.blake3}"
                    findings.add("blake3", reference, detail, dependents)


def check_litter(findings: Findings, blobs: list[str]) -> None:
    """Add unusable records, unreferenced blobs, and files of dead writers."""
    contents = inventory(findings.store)
    # With the rules of garbage collection: blobs that it keeps are no orphans, even if no manifest names them.
    named_digests = find_named_digests(findings.store, contents)
    for key in findings.store.list(layout.RECORDS):
        record = read_record(findings.store.read(key))
        if record is None or not all(map(findings.store.has, record.blobs)):
            findings.add("forgotten", key, "unreadable, or its blobs are gone; the step will run again")
        else:
            named_digests.update(record.blobs)
    for digest in () if findings.unread else blobs:  # the references of an unreadable manifest are unknown
        if digest not in findings.needed and digest not in named_digests and not is_snapshot(findings.store, digest):
            findings.add("orphaned", digest, f"{findings.store.size(digest)} bytes that nothing refers to")
    for path in findings.store.strays():
        findings.add("stray", path, "left behind by a writer that died; the next build cleans it")


def check_documents(findings: Findings) -> None:
    """Add documents without their object: remains of versions, pins and channels."""
    contents = inventory(findings.store)
    versions = set(contents.versions)
    models = {model for model, _ in versions}
    for (model, version), keys in contents.folders.items():
        if (model, version) not in versions:
            for key in keys:
                findings.add(
                    "unreferenced", key, f"{model}@{version} has no manifest; `enginesmith registry gc` deletes it"
                )
    for key in contents.others:
        match key.removeprefix(layout.MODELS).split("/"):
            case [model, "pins", name] if (model, name.removesuffix(".json")) not in versions:
                findings.add("unreferenced", key, "pins a version that does not exist")
            case [model, "channels", _] if model not in models:
                findings.add("dangling", key, f"{model} has no version")
            case [_, "versions", *_]:
                findings.add("unreferenced", key, "no model or version can have that name; delete it by hand")
    _check_policies(findings, contents.others)


def _check_policies(findings: Findings, others: tuple[str, ...]) -> None:
    """Add unreadable policies. others: keys of documents of models, including policies."""
    model: str | None
    for key in (*others, *findings.store.list("policies/")):
        match key.split("/"):
            case ["policies", name]:
                model = None
            case ["models", model, "policies", name]:
                pass
            case _:
                continue
        try:
            policies.read(findings.store, model, name.removesuffix(".json"))
        except EnginesmithError as error:
            findings.add("edited", key, str(error))


def check_leases(findings: Findings) -> None:
    """Add unreadable leases and garbage marks, and leases of dead writers."""
    try:
        read_shards(findings.store, read_state(findings.store).shards)
        now = findings.store.now()
        expired_leases = [lease for lease in leases.list_leases(findings.store) if not lease.is_held(now)]
    except IntegrityError as error:
        findings.add("edited", layout.LEASES, str(error))
        return
    for lease in expired_leases:
        findings.add(
            "stray",
            layout.lease_key(lease.id),
            f"lease of a writer that died: {lease.what}; `enginesmith registry gc` deletes it",
        )


def check_series(findings: Findings) -> None:
    """Add series of latencies that are unreadable, or do not match their keys."""
    for key in findings.store.list(layout.SERIES):
        try:
            parse_series(findings.store.read(key) or b"", key)
        except IntegrityError as error:
            findings.add("forgotten", key, str(error))


@dataclass(frozen=True)
class Repairs:
    """The repairs. blobs: digests of corrupt ones that were moved away.  channels: those (`model:channel`) whose
    snapshots were written anew."""

    blobs: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()


def repair(store: Store, verification: Verification) -> Repairs:
    """Move corrupt blobs away, so that the next build makes them again, write snapshots anew, and remove the marks of
    rollouts that do not run.

    Raises InputError for a channel of a newer format.
    """
    corrupt_digests = tuple(problem.what for problem in verification.problems if problem.kind == "corrupt")
    for digest in corrupt_digests:
        store.discard(digest)
    channels = {problem.what for problem in verification.problems if problem.kind == "stale" and ":" in problem.what}
    for problem in verification.problems:
        if problem.kind in ("missing", "corrupt", "size"):
            dependent_parts = (dependent.rpartition(" ") for dependent in problem.affects)
            channels |= {channel_name for channel_name, _, part_name in dependent_parts if part_name == SNAPSHOT}
    for channel_name in sorted(channels):
        model, _, channel = channel_name.partition(":")
        with hold_lease(store, f"refreshing {channel_name}") as guard:
            channel_writes.refresh_channel(guard, model, channel)
    for model, channel in channel_writes.running_rollouts(store):
        channel_writes.clear_marks(store, model, channel)
    return Repairs(corrupt_digests, tuple(sorted(channels)))


def check_model(findings: Findings, model: str) -> None:
    """Check the versions and channels of a model."""
    for version in lookup.versions(findings.store, model):
        try:
            take_version(findings, lookup.load(findings.store, model, version))
        except Misplaced as error:
            findings.add("misplaced", f"{model}@{version}", str(error))
        except IntegrityError as error:
            findings.add("edited", f"{model}@{version}", str(error))
            findings.unread = True
    for name in lookup.channel_names(findings.store, model):
        _check_channel(findings, model, name)


def _check_channel(findings: Findings, model: str, name: str) -> None:
    """Add a channel whose version is missing, in the channel or its rollout; whose history is damaged; or whose
    snapshots differ from the versions' documents. Its snapshots, and the canary reports of its moves, are needed."""
    channel_name, store = f"{model}:{name}", findings.store
    try:
        lookup.locate(store, Reference(model, channel=name))
        channel = read_channel(store, model, name)
        if channel is None:
            return
        if rollout := channel.active_rollout:
            lookup.load_served(store, replace(channel, move=Move(rollout.version, rollout.manifest, "")))
        moves = read_history(store, channel).moves
        if fault := channel_writes.find_fault(store, channel):
            findings.add("stale", channel_name, fault)
    except EnginesmithError as error:
        findings.add("dangling", channel_name, str(error))
        return
    for digest in channel.snapshots.values():
        findings.needed.setdefault(digest, []).append(f"{channel_name} {SNAPSHOT}")
    for move in moves:
        for digest in move.canary:
            findings.needed.setdefault(digest, []).append(f"{channel_name} canary report of the move to {move.version}")


def take_registered(findings: Findings) -> None:
    """Add the files of registered specs, which building them needs."""
    for name in findings.store.children(layout.MODELS):
        model = name.removesuffix("/")
        try:
            entries = registrations(findings.store, model) if is_name(model) else []
        except IntegrityError as error:
            findings.add("edited", layout.registered_key(model), str(error))
            continue
        for registration in entries:
            for file, digest in registration.bundle.files.items():
                findings.needed.setdefault(digest, []).append(f"{model}, registered {registration.at}: {file}")


def take_version(findings: Findings, manifest: Manifest) -> None:
    """Check the documents of a version, and record the blobs that it needs."""
    reference = manifest.reference
    findings.manifests.append(manifest)
    for digest, role in manifest.blobs().items():
        findings.needed.setdefault(digest, []).append(f"{reference} {role}")
        if claimed_blake3 := manifest.blake3.get(digest):
            findings.blake3.setdefault(digest, {})[reference] = claimed_blake3
    attachment_sizes = _take_attachments(findings, manifest)
    try:
        list(attestations(findings.store, manifest))
        list(latency_reports(findings.store, manifest))
        for verdict in canaries(findings.store, manifest):
            findings.needed.setdefault(verdict.report, []).append(
                f"{reference} report of its canary on {verdict.target}"
            )
    except IntegrityError as error:
        findings.add("edited", reference, str(error))
    for graph in manifest.graphs:
        try:
            load_pinned(findings.store, graph)
        except IntegrityError as error:
            findings.add("dangling", reference, str(error))
    # Unreadable signatures, or of other documents; only a trust policy can tell whose they are.
    for key, detail in find_misplaced(findings.store, manifest):
        findings.add("signature", key, detail, (reference,))
    for digest, loss in find_lost(findings.store, attachment_sizes | engine_sizes(manifest)).items():
        if loss.kind == "size":  # missing ones are found with the other blobs
            findings.add("size", digest, loss.detail, (findings.needed[digest][-1],))


def _take_attachments(findings: Findings, manifest: Manifest) -> dict[str, int | None]:
    """Check the documents of a version's attachments, and record their blobs: digest -> size in bytes."""
    reference, sizes = manifest.reference, dict[str, int | None]()
    try:
        for attachment, _ in attachments(findings.store, manifest):
            findings.needed.setdefault(attachment.digest, []).append(f"{reference} attachment {attachment.name}")
            sizes[attachment.digest] = attachment.size_bytes
    except IntegrityError as error:
        findings.add("edited", reference, str(error))
    return sizes


def verify(
    store: Store, reference: Reference | None = None, progress: Callable[[str], None] = lambda _: None
) -> Verification:
    """Read every byte of a version, or of the whole registry, and compare digests. progress: called with each blob.

    Raises UnknownNameError for an unknown reference; damage is part of the result.
    """
    findings = Findings(store, progress)
    if reference is not None:
        take_version(findings, lookup.locate(store, reference).manifest)
        check_blobs(findings, sorted(findings.needed))
        return findings.close()
    for model in lookup.models(store):
        check_model(findings, model)
    take_registered(findings)
    stored_digests = []
    for key in store.list(layout.BLOBS):
        digest = key.rpartition("/")[2]
        if is_digest(digest) and key == layout.blob_key(digest):
            stored_digests.append(digest)
        else:
            findings.add("stray", key, "not the name of a blob")
    stored_digests.sort()
    check_blobs(findings, sorted({*stored_digests, *findings.needed}))
    check_litter(findings, stored_digests)
    check_documents(findings)
    check_leases(findings)
    check_series(findings)
    return findings.close()
