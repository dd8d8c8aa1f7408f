"""Policies of channels, and the machines that a promotion would leave without an engine."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from enginesmith.core.codec import Excerpt, NewerFormatError, encode, explain_damage, parse_as
from enginesmith.core.errors import ConflictError, Digest, InputError, IntegrityError, UndecidedError, canonical_json
from enginesmith.core.hardware.cpu_kinds import kind_named
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Format
from enginesmith.core.text import join_first, now
from enginesmith.registry.evidence.attestations import Attestation, JudgedEntry, judge_entries
from enginesmith.registry.evidence.canaries import covers, list_served, targets_named
from enginesmith.registry.manifest import ON_RANDOM, EngineEntry, Manifest
from enginesmith.registry.rollouts.rollout_state import RolloutPlan, check_waves
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import policy_key
from enginesmith.registry.versions.channel_state import Channel
from enginesmith.registry.versions.lookup import load_served

if TYPE_CHECKING:
    from enginesmith.registry.trust.signatures import KeySigner

# Losses that a move may cause, as named by `list_losses`; None: any.
AcceptedLosses = Collection[str] | None
_SHOWN = 8


def list_losses(
    store: Store,
    channel: Channel | None,
    manifest: Manifest,
    proven_only: bool,
    counts: Callable[[Attestation], bool] | None = None,
) -> tuple[str, ...]:
    """The engines that a channel serves now and a version lacks: 'sm_89 int8', 'cpu int8 on x86-64-v3'.

    An engine for a whole generation serves each product of it, and engines of all backends count. Empty if the present
    version is unreadable.
    proven_only: whether the channel would serve only proven engines.  counts: as in `judge_entries`.
    Raises IntegrityError for a damaged attestation of the version.
    """
    if channel is None:
        return ()
    try:
        old_entries = judge_entries(store, load_served(store, channel), counts)
    except IntegrityError:
        return ()
    new_entries = judge_entries(store, manifest, counts)
    loss_groups = (_losses(entry, channel.proven_only, new_entries, proven_only) for entry in old_entries)
    return tuple(dict.fromkeys(name for losses in loss_groups for name in losses))


def loss_refusal(
    losses: Sequence[str], accepted_losses: AcceptedLosses, manifest: Manifest, channel: Channel | None
) -> str | None:
    """The reason why a channel refuses a version by which nodes lose engines; None if the losses are accepted."""
    unaccepted_losses = [name for name in losses if accepted_losses is not None and name not in accepted_losses]
    if channel is None or not unaccepted_losses:
        return None
    reference, channel_name = manifest.reference, f"{channel.model}:{channel.name}"
    return (
        f"{channel_name} serves {channel.version}, and {reference} has nothing for "
        f"{join_first(unaccepted_losses, _SHOWN)}; build or validate what is missing, or accept and record the loss "
        "with --accept-loss"
    )


def _losses(
    entry: JudgedEntry, was_proven_only: bool, new_entries: Sequence[JudgedEntry], proven_only: bool
) -> Iterator[str]:
    """The name of a served engine that the new engines do not replace; if they replace it partly, one name per kind of
    CPU that loses it."""
    substitutes = [
        e for e in new_entries if e.precision == entry.precision and e.target in (entry.target, entry.hardware.sm)
    ]

    def is_lost(kind: str | None) -> bool:
        is_served = list_served([entry.on_cpu(kind)], was_proven_only)
        return bool(is_served) and not list_served([e.on_cpu(kind) for e in substitutes], proven_only)

    unit_name = f"{entry.target} {entry.precision}"
    if is_lost(None):
        yield unit_name
    else:
        yield from (f"{unit_name} on {kind}" for kind in entry.on if is_lost(kind))


# Channel policies: which proven engines, canary passes and signatures a channel requires of a version.
#
# A policy is a document of the registry and is checked by the commands that promote. It gives no protection against
# people who can write to the store directly: see docs/concepts/security.md.

OPEN_CHANNELS = ("candidate",)
FORMAT = 1
MAX_BYTES = 1 << 20
REPORT_BYTES = 16 << 20


@dataclass(frozen=True)
class CanaryPass:
    """A canary that passed. report: digest of its report, a blob.  engine: digest of the candidate's engine.
    baseline: digest of the manifest that it was compared with.  target: the target it ran on, '' if unknown."""

    report: str
    engine: str
    baseline: str
    target: str = ""


@dataclass(frozen=True)
class ChannelPolicy:
    """The requirements of a channel on a version.

    proven: targets that each need a proven engine.  canary: every engine of these targets needs a PASS; without targets
    one PASS is enough.  canary_on: GPU generations and kinds of CPU (`canaries.targets_named`) that each need a PASS.
    signed_by: public keys (PEM), one of which must have signed the version. rollout: the waves in which a version
    reaches the channel's nodes; None: all at once.  at, by, why: of its last change.
    """

    proven: tuple[Name, ...] = ()
    canary: bool = False
    canary_on: tuple[Name, ...] = ()
    signed_by: tuple[str, ...] = ()
    at: str = ""
    by: str = ""
    why: str = ""
    rollout: RolloutPlan | None = None
    format: Annotated[int, Format(FORMAT)] = FORMAT


@dataclass(frozen=True)
class _Candidate(Excerpt):
    engine: Digest


@dataclass(frozen=True)
class _Baseline(Excerpt):
    manifest: Digest


@dataclass(frozen=True)
class _CanaryReport(Excerpt):
    verdict: Literal["PASS"]
    candidate: _Candidate
    baseline: _Baseline
    target: str | None = None


def canary_pass(store: Store, report: str) -> CanaryPass:
    """Parse the PASS in a stored canary report. Raises IntegrityError for a blob that is no PASS.

    Reads only these fields: `validation.canary.report` checked that the verdict follows from the criteria when the
    report was stored.
    """
    with explain_damage(f"canary report {report}", "run the canary again"):
        canary_report = parse_as(store.read_blob(report, REPORT_BYTES), REPORT_BYTES, _CanaryReport)
    engine, baseline = canary_report.candidate.engine, canary_report.baseline.manifest
    return CanaryPass(report, engine, baseline, canary_report.target or "")


def read(store: Store, model: str | None, channel: str) -> ChannelPolicy | None:
    """Read the policy of a model's channel, or with model None of this channel for all models; None without one.

    Raises IntegrityError if it is unreadable.
    """
    policy_bytes = store.read(policy_key(model, channel))
    return None if policy_bytes is None else _parse(policy_bytes, model, channel)


def _parse(data: bytes, model: str | None, channel: str) -> ChannelPolicy:
    remedy = "set it again with `enginesmith registry policy set`"
    with explain_damage(f"policy of {model or '*'}:{channel}", remedy):
        return parse_as(data, MAX_BYTES, ChannelPolicy)


def of_channel(store: Store, model: str, channel: str) -> ChannelPolicy:
    """The policy that applies to a channel: the model's own, else the one for all models, else an empty one.

    Raises IntegrityError if it is unreadable.
    """
    return read(store, model, channel) or read(store, None, channel) or ChannelPolicy()


def normalize(policy: ChannelPolicy, where: str) -> ChannelPolicy:
    """A policy with the canonical names of its targets. where: the policy's name, for errors.

    Raises UnknownNameError for an unknown target, InputError for an alias of several targets or a malformed key.
    """
    _signers(policy, where)
    proven_names: set[str] = set()
    for name in policy.proven:
        targets = parse_targets(name)
        if len(targets) != 1:
            target_names = ", ".join(target.name for target in targets)
            raise InputError(f"target {name!r} stands for {target_names}; name the ones needed")
        proven_names.add(targets[0].name)
    if policy.rollout:
        check_waves(policy.rollout.waves)
    return replace(policy, proven=tuple(sorted(proven_names)), canary_on=targets_named(policy.canary_on))


def write(
    store: Store, model: str | None, channel: str, policy: ChannelPolicy, *, by: str = "", why: str = ""
) -> ChannelPolicy:
    """Set a channel's policy and return it; a damaged one is replaced.

    Raises as `normalize`, ConflictError for a concurrent change, and NewerFormatError for a policy of a newer release.
    """
    timestamp = now()
    new_policy = replace(normalize(policy, f"the policy of {model or '*'}:{channel}"), at=timestamp, by=by, why=why)
    key = policy_key(model, channel)
    old_bytes = store.read(key)
    try:
        if old_bytes is not None:
            _parse(old_bytes, model, channel)
    except NewerFormatError:
        raise
    except IntegrityError:
        pass  # replaced, as the error of a damaged policy announces
    try:
        is_written = store.replace(key, canonical_json(encode(new_policy)), old_bytes)
    except UndecidedError:
        is_written = False
    if not is_written:
        raise ConflictError(
            f"the policy of {model or '*'}:{channel} was changed at the same time; read it, and set it again"
        )
    return new_policy


def describe_built_in(channel: str) -> str:
    """Describe the requirements of a channel that apply with any policy."""
    if channel in OPEN_CHANNELS:
        return "any version with a usable engine; a promotion that loses what is served needs --accept-loss"
    return (
        "every engine must be proven on real inputs (or --accept-random-inputs), unless --proven-only serves only the "
        "proven ones; a move that loses what is served needs --accept-loss"
    )


def losses_of_build(channel: str) -> AcceptedLosses:
    """The losses that a build may cause in a channel: any in a channel that accepts every version and shows the spec's
    current result; none in others."""
    return None if channel in OPEN_CHANNELS else ()


def rollout_refusal(policy: ChannelPolicy, manifest: Manifest, channel: str) -> str | None:
    """The reason why a policy forbids a move to all nodes at once; None if no rollout is required."""
    if policy.rollout is None:
        return None
    channel_name, wave_list = f"{manifest.model}:{channel}", ", ".join(map(str, policy.rollout.waves))
    return (
        f"the policy of {channel_name} requires a rollout in waves ({wave_list}): "
        f"`enginesmith rollout start {manifest.reference} {channel_name}`"
    )


def common_refusal(
    manifest: Manifest, entries: Sequence[EngineEntry], name: str, *, proven_only: bool, random_inputs: bool = False
) -> str | None:
    """The reason why a channel refuses a version with any policy; None if it does not. name: the channel's.

    entries: the version's engines with their current status.  random_inputs: whether it accepts those proven on random
    inputs.
    """
    reference = manifest.reference
    unproven_statuses = ("unproven",) if random_inputs else ("unproven", ON_RANDOM)
    proven_entries = [entry for entry in entries if entry.usable and entry.status not in unproven_statuses]
    unproven_entries = [entry for entry in entries if entry.status in unproven_statuses]
    remedy = _remedy(reference, unproven_entries)
    advice = "add --proven-only and the channel serves only the proven ones"
    if not proven_entries and not unproven_entries:
        return f"channel {name!r}: {reference} has no usable engine; `enginesmith show {reference}` says why"
    if proven_only and not proven_entries:
        return f"channel {name!r}: {reference} has no proven engine; {remedy}"
    failing_units = [entry.unit for entry in entries if entry.status == "failed" and entry.digest]
    if failing_units and not proven_only and name not in OPEN_CHANNELS:
        return (
            f"channel {name!r} takes only proven engines; {reference} has failed where it was validated: "
            f"{', '.join(failing_units[:3])}; `enginesmith show {reference}` says why"
            f"{f'; {advice}' if proven_entries else ''}"
        )
    if unproven_entries and not proven_only and name not in OPEN_CHANNELS:
        unit_list = join_first([entry.unit for entry in unproven_entries], 3)
        is_on_random = all(entry.status == ON_RANDOM for entry in unproven_entries)
        engines_text = f"engines that are {ON_RANDOM}" if is_on_random else "unproven ones"
        return (
            f"channel {name!r} takes only proven engines; {reference} has {engines_text}: {unit_list}; "
            f"{remedy}{f', or {advice}' if proven_entries else ''}"
        )
    return None


def _remedy(reference: str, unproven: Sequence[EngineEntry]) -> str:
    """How to prove the engines: run them on their hardware, or provide golden data that measures all checks."""
    remedies = []
    random_entries = [entry for entry in unproven if entry.status == ON_RANDOM]
    if random_entries:
        remedies.append("build again with real inputs in golden.data, or pass --accept-random-inputs")
    if any(entry.is_measured for entry in unproven if entry not in random_entries) or not unproven:
        remedies.append(f"run `enginesmith validate {reference}` on a node with that hardware")
    if unmeasured_entry := next((entry for entry in unproven if not entry.is_measured), None):
        remedies.append(f"build again with other golden data ({unmeasured_entry.unit}: {unmeasured_entry.reason})")
    return " and ".join(remedies)


def refusal(
    policy: ChannelPolicy,
    manifest: Manifest,
    channel: str,
    entries: Sequence[EngineEntry],
    canaries: Sequence[CanaryPass],
    *,
    proven_only: bool,
) -> str | None:
    """The reason why a policy rejects a version, with the rule and the remedy; None if it accepts it.

    entries: the version's engines with their current status.  proven_only: the channel will serve only proven ones.
    """
    policy_name = f"the policy of {manifest.model}:{channel}"
    reference = manifest.reference
    for target in policy.proven:
        if not any(_is_proven(entry, target) for entry in entries):
            return (
                f"{policy_name} needs a proven engine for {target}, and {reference} has none: build one "
                f"(`enginesmith plan` says why there is none), or run `enginesmith validate {reference}` on such a "
                "node; `enginesmith registry policy show` has the rule"
            )
    if not policy.canary and not policy.canary_on:
        return None
    engine_digests = {canary.engine for canary in canaries}
    if not engine_digests and not policy.canary_on:
        return (
            f"{policy_name} needs a canary's PASS: run `enginesmith canary run --candidate {reference} "
            f"--baseline {manifest.model}:{channel}` (or another version, while the channel serves nothing), "
            "then promote with --canary REPORT"
        )
    lacking_targets = [name for name in policy.canary_on if not any(covers(canary.target, name) for canary in canaries)]
    if lacking_targets:
        return (
            f"{policy_name} needs the PASS of a canary on {', '.join(policy.canary_on)}, and there is none of "
            f"{reference} on {', '.join(lacking_targets)}: run one there, and give each report with --canary"
        )
    entries = list_served(entries, proven_only)
    missing_units = [
        entry.unit for entry in entries if entry.target in policy.proven and entry.digest not in engine_digests
    ]
    if missing_units and policy.canary:
        return (
            f"{policy_name} needs a canary's PASS for every engine of {', '.join(policy.proven)}; none ran "
            f"{join_first(missing_units, 3)}: run one for each (--target, --precision), and "
            "give each report with --canary"
        )
    return None


def _is_proven(entry: EngineEntry, target: str) -> bool:
    """Whether an engine is proven on a target, which may be another kind of CPU than it was built for."""
    if kind_named(target) and isinstance(entry, JudgedEntry):
        return entry.on.get(target, ("",))[0] == "proven"
    return entry.target == target and entry.status == "proven"


def signature_refusal(store: Store, policy: ChannelPolicy, manifest: Manifest, channel: str) -> str | None:
    """The reason why a policy rejects a version without a signature by its keys; None if it accepts it.

    Raises InputError for a malformed key in the policy.
    """
    if not policy.signed_by:
        return None
    from enginesmith.registry.trust.policy import find_signers
    from enginesmith.registry.trust.signatures import MANIFEST_FILE

    policy_name = f"the policy of {manifest.model}:{channel}"
    signers = _signers(policy, policy_name)
    valid_signers, refusals = find_signers(store, manifest, signers, MANIFEST_FILE, manifest.to_bytes())
    if valid_signers:
        return None
    reference = manifest.reference
    refusal_text = "; ".join(f"{signer}: {reason}" for signer, reason in refusals.items())
    return (
        f"{policy_name} needs a signature, and none of {reference} counts ({refusal_text}): `enginesmith registry sign "
        f"{reference} --key KEY`"
    )


def _signers(policy: ChannelPolicy, where: str) -> tuple["KeySigner", ...]:
    if not policy.signed_by:
        return ()
    from enginesmith.registry.trust.signatures import KeySigner, key_id_of_pem

    try:
        public_keys = [(key_id_of_pem(pem.encode()), pem.encode()) for pem in policy.signed_by]
    except Malformed as error:
        raise InputError(f"a key of {where} {error}; `openssl ec -in KEY -pubout` writes one") from error
    return tuple(KeySigner("its signer", pem, key_id) for key_id, pem in public_keys)
