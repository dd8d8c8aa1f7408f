"""Ranks the engines of a version for a machine, and gives the reason of each rejection.

Engines are ordered by these rules; the first that distinguishes two decides:

1. by fit: built for the same product; for the same compute capability; for another product of that capability (it runs,
   tuned for other clocks and memory); for another capability with hardware compatibility (`core.requirements`);
   portable (target `gpu`); the ONNX model, if the policy allows it;
2. proven before unproven; a CPU engine has the status for the machine's kind of CPU (`JudgedEntry.on_cpu`);
3. by speed, if one is measurably faster on a machine of this kind (`evidence.latencies`), else by accuracy
   (`core.reports.latency`);
4. by the order in the manifest, which is that of the spec's backends.

A proof is not valid for another compute capability: if only proven engines are allowed, a compatible engine of another
capability is rejected.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.core.hardware.evaluation import evaluate
from enginesmith.core.hardware.machine import Machine, generation_of
from enginesmith.core.requirements import Cpu, Gpu, hardware_of
from enginesmith.core.text import join_first
from enginesmith.core.types import accuracy_order
from enginesmith.registry.evidence.attestations import JudgedEntry
from enginesmith.registry.manifest import ON_RANDOM, EngineEntry

PORTABLE = "gpu"
# The target of the version's ONNX model.
FALLBACK = "onnx"
# Reasons to reject an engine, the closest match first: the server does not open it, the machine lacks something, it is
# not proven, it was not built, it has another precision, it is for other hardware.
RejectionKind = Literal["unopened", "unmet", "unproven", "not built", "precision", "hardware"]
_KINDS: tuple[RejectionKind, ...] = get_args(RejectionKind)
_MOST_SHOWN = 4

if TYPE_CHECKING:
    from enginesmith.registry.evidence.latencies import MeasuredSpeed
    from enginesmith.registry.trust.policy import TrustPolicy


def list_targets(units: Iterable[str]) -> str:
    """The targets of units, each once: 'l4, t4'."""
    return ", ".join(dict.fromkeys(unit.split()[0] for unit in units))


@dataclass(frozen=True)
class Policy:
    """Engines that a client accepts. precision: only this one.  proven_only: only those proven on real inputs on this
    kind of machine.

    fallback: 'onnx' uses the version's ONNX model, run by onnxruntime, if no engine fits.
    allow_unsigned: whether attachments that are code are pulled without a signature if no trust policy requires one.
    trust: the signers that a version needs: a trust policy, or its file, which is then read each time; None is the one
    in ENGINESMITH_TRUST_POLICY, if any.
    """

    precision: str | None = None
    proven_only: bool = False
    fallback: Literal["onnx"] | None = None
    trust: "TrustPolicy | Path | str | None" = None
    allow_unsigned: bool = False


@dataclass(frozen=True)
class EngineCandidate:
    """A compatible engine. fit: describes how well it matches the machine.  remarks: facts that could not be checked,
    or differ.

    speed: measured on a machine of this kind; None if it was not measured.
    """

    entry: EngineEntry
    fit: str
    remarks: tuple[str, ...] = ()
    speed: "MeasuredSpeed | None" = None

    def to_json(self) -> dict[str, Any]:
        """The engine's main fields, the fit, the remarks and the speed."""
        field_names = ("unit", "target", "precision", "backend", "status", "reason", "digest", "size_bytes")
        speed = self.speed and asdict(self.speed)
        json_fields = {"fit": self.fit, "remarks": list(self.remarks), "speed": speed}
        return {name: getattr(self.entry, name) for name in field_names} | json_fields


@dataclass(frozen=True)
class EngineRanking:
    """The engines of a version that a machine can use, best first, and the reason for each rejection (unit, reason).

    what: the version, as in 'digits@3'.  lost: rejected engines that would fit, but whose bytes are lost.
    kinds: unit -> kind of its rejection.  remedy: for engines that a server does not open.
    """

    what: str
    machine: Machine
    policy: Policy
    candidates: tuple[EngineCandidate, ...]
    rejected: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, str], ...] = ()
    kinds: Mapping[str, RejectionKind] = field(default_factory=dict, compare=False)
    remedy: str = ""

    def without(self, loss_reasons: Mapping[str, str]) -> "EngineRanking":
        """The ranking without engines whose bytes are lost. loss_reasons: engine's digest -> reason."""
        engines = tuple(engine for engine in self.candidates if engine.entry.digest not in loss_reasons)
        losses = tuple(
            (c.entry.unit, f"lost: {loss_reasons[c.entry.digest or '']}") for c in self.candidates if c not in engines
        )
        return replace(self, candidates=engines, rejected=(*self.rejected, *losses), lost=(*self.lost, *losses))

    def rejecting(self, reject: Callable[[EngineEntry], str | None], remedy: str) -> "EngineRanking":
        """The ranking without engines that a server cannot open. reject: returns the reason, or None for an engine that
        it opens. remedy: how to get one that it opens."""
        reasons = {c.entry.unit: reason for c in self.candidates if (reason := reject(c.entry))}
        engines = tuple(engine for engine in self.candidates if engine.entry.unit not in reasons)
        kinds: dict[str, RejectionKind] = {**self.kinds, **dict.fromkeys(reasons, "unopened")}
        rejections = (*self.rejected, *reasons.items())
        return replace(self, candidates=engines, rejected=rejections, kinds=kinds, remedy=remedy)

    def resolution(self) -> "Resolution":
        """The best engine with the reasons. Raises UnknownNameError with every rejection if no engine is compatible,
        IntegrityError if all compatible ones are lost."""
        if not self.candidates and self.lost:
            loss_lines = [f"  {unit}: {reason}" for unit, reason in self.lost]
            remedy = f"restore their blobs, or build again; `enginesmith registry fsck {self.what}` says more"
            problem = f"every engine of {self.what} that fits {self.machine.name} is lost"
            raise IntegrityError("\n".join([f"{problem}; {remedy}:", *loss_lines]))
        if not self.candidates:
            raise UnknownNameError(self._explain_lack())
        ranked_entries = tuple(candidate.entry for candidate in self.candidates)
        remarks = self.candidates[0].remarks
        return Resolution(ranked_entries[0], _why(self.candidates), ranked_entries, self.rejected, remarks, self.lost)

    def _explain_lack(self) -> str:
        """The reason why no engine fits: the closest rejection and its remedy, and the others in one line."""
        target_text = self.machine.name + (f" in {self.policy.precision}" if self.policy.precision else "")
        if not self.rejected:
            return f"{self.what} has no engine for {target_text}: it has no engines at all; build it"
        texts_by_kind: dict[RejectionKind, list[str]] = {kind: [] for kind in _KINDS}
        for unit, reason in self.rejected:
            texts_by_kind[self.kinds.get(unit, "unmet")].append(f"{unit}: {reason}")
        other_targets = list_targets(unit for unit, _ in self.rejected if self.kinds.get(unit) == "hardware")
        if texts_by_kind.pop("hardware"):
            texts_by_kind["hardware"] = [f"it has engines for {other_targets}"]
        (kind, nearest_text), *other_texts = [
            (kind, message) for kind, texts in texts_by_kind.items() for message in texts
        ]
        remedies: dict[RejectionKind, str] = {
            "unopened": self.remedy,
            "unmet": "give such a machine what it lacks, or build for it as it is",
            "unproven": "build again with real inputs in golden.data"
            if ON_RANDOM in nearest_text
            else f"`enginesmith validate {self.what}` on such a machine proves engines that never ran there",
            "not built": "change that and build again",
            "precision": f"add {self.policy.precision} to the precisions of its spec and build, or ask for another one",
            "hardware": f"add {self.machine.target.name} to the targets of its spec and build, or name another target",
        }
        engine_kind = "proven engine" if kind == "unproven" else "engine"
        message = f"{self.what} has no {engine_kind} for {target_text}: {nearest_text}; {remedies[kind]}"
        other_reasons = join_first([reason for _, reason in other_texts], _MOST_SHOWN, "; ")
        return f"{message}\n  also: {other_reasons}" if other_reasons else message

    def to_json(self) -> dict[str, Any]:
        """The ranking as JSON: the machine, the policy, candidates best first, and the rejected."""
        return {
            "what": self.what,
            "machine": {"target": self.machine.target.name, **asdict(self.machine)},
            "policy": asdict(self.policy),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "rejected": [{"unit": unit, "reason": reason} for unit, reason in self.rejected],
        }


@dataclass(frozen=True)
class Resolution:
    """The chosen engine and the reason. ranked: all compatible engines, best first.  rejected: (unit, reason).

    remarks: facts about the chosen one that could not be checked.  lost: see `EngineRanking`.
    """

    chosen: EngineEntry
    why: str
    ranked: tuple[EngineEntry, ...]
    rejected: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()


def rank_engines(
    entries: Sequence[EngineEntry],
    machine: Machine,
    policy: Policy,
    what: str = "this version",
    timed: "Callable[[Sequence[EngineEntry]], Mapping[str, MeasuredSpeed]]" = lambda _: {},
) -> EngineRanking:
    """Rank a version's engines with their current status (`registry.evidence.attestations.judge_entries`).

    what: the version, for messages.  timed: returns engines' speeds by digest; called only if several are compatible.
    """
    machine = machine.with_installed(requirement for entry in entries for requirement in entry.requires)
    machine_entries = [entry.on_cpu(machine.cpu) if isinstance(entry, JudgedEntry) else entry for entry in entries]
    verdicts = [(entry, _reject(entry, machine, policy)) for entry in machine_entries]
    compatible_entries = [entry for entry, reason in verdicts if reason is None]
    compatible_entries.sort(key=lambda entry: _rank(entry, machine))
    speeds = timed(compatible_entries) if len(compatible_entries) > 1 else {}
    candidates = tuple(
        EngineCandidate(entry, _fit(entry, machine)[1], remarks(entry, machine, speed), speed)
        for entry in _by_speed(compatible_entries, machine, speeds)
        for speed in (speeds.get(entry.digest or ""),)
    )
    rejections = [(entry.unit, *verdict) for entry, verdict in verdicts if verdict is not None]
    reasons = tuple((unit, text) for unit, _, text in rejections)
    return EngineRanking(
        what, machine, policy, candidates, reasons, kinds={unit: kind for unit, kind, _ in reversed(rejections)}
    )


def _reject(entry: EngineEntry, machine: Machine, policy: Policy) -> tuple[RejectionKind, str] | None:
    """The reason why an engine is incompatible with the machine or the policy; None if it is compatible."""
    unmet_findings = [finding for finding in evaluate(entry.requires, machine) if finding.rules_out]
    processor = hardware_of(entry.requires)
    if mismatch := next((finding for finding in unmet_findings if finding.requirement is processor), None):
        # Another kind of CPU counts as one that lacks something.
        return "unmet" if isinstance(processor, Cpu) and machine.is_cpu else "hardware", mismatch.words
    if policy.precision is not None and entry.precision != policy.precision:
        return "precision", f"precision {entry.precision}, not {policy.precision}"
    if not entry.usable:
        return "not built", f"{entry.status}: {entry.reason}"
    if unmet_findings:  # before a missing proof: the engine cannot run there
        return "unmet", unmet_findings[0].words
    if policy.proven_only and entry.status != "proven":
        return "unproven", f"{entry.status}, and only proven engines may be used: {entry.reason}"
    if policy.proven_only and _is_foreign(entry, machine):
        reason = f"proven on {entry.hardware.sm} and not on {machine.target.sm}, and only proven engines may be used"
        return "unproven", reason
    return None


def remarks(entry: EngineEntry, machine: Machine, speed: "MeasuredSpeed | None" = None) -> tuple[str, ...]:
    """Remarks on a compatible engine: facts that could not be checked, or differ without rejecting it."""
    texts = [finding.words for finding in evaluate(entry.requires, machine) if not finding.rules_out]
    if _is_foreign(entry, machine):
        texts.append(f"{entry.status} on {entry.hardware.sm}, and not tried on {machine.target.sm}")
    if speed and speed.busy:
        texts.append("timed on a busy machine")
    return tuple(filter(None, texts))


def _is_foreign(entry: EngineEntry, machine: Machine) -> bool:
    """Whether an engine was built for another compute capability than the machine's, and is not portable."""
    return entry.compute_capability not in (None, machine.compute_capability)


def _fit(entry: EngineEntry, machine: Machine) -> tuple[int, str]:
    if entry.target == FALLBACK:
        return 5, "the ONNX model itself, for onnxruntime"
    if entry.target == PORTABLE:
        return 4, "portable"
    if _is_foreign(entry, machine):
        return 3, f"built for {entry.target}, and compatible with {_reach(entry)}"
    if entry.cpu not in (None, machine.cpu) and machine.cpu:
        return 0 if entry.status == "proven" else 1, f"built for {entry.cpu} CPUs, and this is {machine.cpu}"
    if entry.cpu:
        return 0, f"built for {entry.cpu} CPUs"
    if entry.product == machine.product:
        return 0, f"built for {machine.name}"
    if entry.product is None:
        return 1, f"built for {machine.target.sm}, this GPU's compute capability"
    return 2, f"tuned for {entry.product}, another product of {machine.target.sm}; it runs here, perhaps slower"


def _reach(entry: EngineEntry) -> str:
    """The other GPUs that an engine runs on: 'every generation from Ampere on'."""
    processor = hardware_of(entry.requires)
    if not isinstance(processor, Gpu) or processor.match == "family":
        return "its family"
    generation = generation_of(processor.capability)
    return f"every generation from {generation.family.capitalize() if generation else processor.capability} on"


def _by_speed(
    ranked: Sequence[EngineEntry], machine: Machine, speeds: "Mapping[str, MeasuredSpeed]"
) -> Iterator[EngineEntry]:
    """Yield the engines; those with equal fit and proof are ordered by measured speed, then by accuracy."""

    if not speeds:
        yield from ranked
        return
    from enginesmith.core.reports.latency import order_by_evidence

    def is_faster(one: EngineEntry, other: EngineEntry) -> bool:
        return is_faster_by_evidence(speeds.get(one.digest or ""), speeds.get(other.digest or ""))

    for _, tied_entries in itertools.groupby(ranked, key=lambda entry: _rank(entry, machine)[:2]):
        yield from order_by_evidence(list(tied_entries), is_faster)


def is_faster_by_evidence(one: "MeasuredSpeed | None", other: "MeasuredSpeed | None") -> bool:
    """Whether an engine was measurably faster than another, at the same sizes."""
    if one is None or other is None or one.buckets != other.buckets:
        return False
    from enginesmith.core.reports.latency import is_shorter

    return is_shorter(one.interval, other.interval)


def _rank(entry: EngineEntry, machine: Machine) -> tuple[int, bool, int, bool, str]:
    """The rank of an engine by the rules that need no speeds."""
    is_foreign = entry.cpu != machine.cpu
    accuracy = accuracy_order(entry.precision)
    return _fit(entry, machine)[0], entry.status != "proven", accuracy, is_foreign, entry.target


def _why(candidates: Sequence[EngineCandidate]) -> str:
    """The reason why the first candidate was chosen: its fit, precision and status, compared with the others."""
    leader, other_entries = candidates[0], [candidate.entry for candidate in candidates[1:]]
    summary = f"{leader.fit}; {leader.entry.precision}, {leader.entry.status}"
    if not other_entries:
        return f"{summary}; the only engine that fits"
    if comparison := _comparison(candidates):
        return f"{summary}; {comparison}"
    return f"{summary}; preferred to {join_first([f'{entry.unit} ({entry.status})' for entry in other_entries], 3)}"


def _comparison(candidates: Sequence[EngineCandidate]) -> str | None:
    """The first candidate's advantages over those of equal fit and status, as text: faster, or more accurate; None
    without any."""
    leader = candidates[0]
    peers = [peer for peer in candidates[1:] if (peer.fit, peer.entry.status) == (leader.fit, leader.entry.status)]
    speeds = {peer.entry.unit: peer.speed for peer in peers if is_faster_by_evidence(leader.speed, peer.speed)}
    chosen_s = leader.speed.seconds if leader.speed else 1.0
    ratios = [f"{unit} takes {speed.seconds / chosen_s:.2f} times as long" for unit, speed in speeds.items() if speed]
    clock_note = ", by time inside the runtime" if leader.speed and leader.speed.timed == "runtime" else ""
    claim = "the fastest" if len(speeds) == len(peers) else "faster"
    claims = [f"{claim} on this kind of machine{clock_note}: {join_first(ratios, 3)}"] if ratios else []
    if coarser_units := [
        peer.entry.unit
        for peer in peers
        if peer.entry.unit not in speeds
        and accuracy_order(leader.entry.precision) < accuracy_order(peer.entry.precision)
    ]:
        claims.append(
            f"more accurate than {join_first(coarser_units, 3)} (not shown to be faster on this kind of machine)"
        )
    return "; ".join(claims) or None
