"""Ranks the engines of a version for a machine, and says why each of the others is rejected.

Engines are ordered by these rules, the first that tells two apart decides:

1. by fit: built for the very product; for the same compute capability; for another product of that capability (it runs,
   tuned for other clocks and memory); for another capability with hardware compatibility (`core.requirements`);
   portable (target `gpu`); the ONNX model, if the policy allows it;
2. proven before unproven; a CPU engine has the status that it has on the machine's kind of CPU (`JudgedEntry.on_cpu`);
3. by speed, where all that are equal so far were timed on a machine of this kind (`evidence.latencies`), else by
   precision, in the order that is usually fastest on this kind of hardware: a narrow GPU engine that is larger than the
   fp16 engine of its target and backend comes behind that one;
4. by the order in the manifest, which is that of the spec's backends.

A proof says nothing about another compute capability: where only proven engines may be used, a compatible engine of
another capability is rejected.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.hardware.evaluation import evaluate
from enginery.core.hardware.gpu_generations import generation_of
from enginery.core.hardware.machine import Machine
from enginery.core.requirements import Gpu, hardware_of
from enginery.core.text import format_bytes, join_first
from enginery.registry.evidence.attestations import JudgedEntry
from enginery.registry.evidence.latencies import MeasuredSpeed
from enginery.registry.manifest import EngineEntry

PORTABLE = "gpu"
# The target that stands for the version's ONNX model.
FALLBACK = "onnx"

# On GPUs narrower is faster. CPUs have int8 kernels, but run fp16 through casts to fp32, slower than fp32 itself.
GPU_PREFERENCE = ("int8", "fp8", "int4", "fp16", "bf16", "fp32", "int8-dynamic")
_NARROWER = ("int8", "fp8", "int4")
CPU_PREFERENCE = ("int8", "int8-dynamic", "fp32", "int4", "bf16", "fp16", "fp8")


if TYPE_CHECKING:
    from enginery.registry.trust.policy import TrustPolicy


@dataclass(frozen=True)
class Policy:
    """What a client accepts. precision: only this one.  proven_only: no engine that never ran on its hardware.

    fallback: 'onnx' takes the version's ONNX model, to be run by onnxruntime, where no engine fits.
    kind: 'cache' asks for a compile cache of torch (`enginery.warm_start`) in the place of an engine.
    trust: whose signatures a version needs: a trust policy, or its file, which is then read each time; None is the one
    that ENGINERY_TRUST_POLICY names, if any.
    """

    precision: str | None = None
    proven_only: bool = False
    fallback: Literal["onnx"] | None = None
    kind: Literal["engine", "cache"] = "engine"
    trust: "TrustPolicy | Path | str | None" = None


@dataclass(frozen=True)
class EngineCandidate:
    """A compatible engine. fit: how well it matches the machine, in words.  remarks: what could not be checked, or
    differs.

    speed: as measured on a machine of this kind; None where it was not measured.
    """

    entry: EngineEntry
    fit: str
    remarks: tuple[str, ...] = ()
    speed: MeasuredSpeed | None = None

    def to_json(self) -> dict[str, Any]:
        """The engine's main fields, the fit, the remarks and the speed."""
        names = ("unit", "target", "precision", "backend", "status", "reason", "digest", "size_bytes")
        speed = self.speed and asdict(self.speed)
        details = {"fit": self.fit, "remarks": list(self.remarks), "speed": speed}
        return {name: getattr(self.entry, name) for name in names} | details


@dataclass(frozen=True)
class EngineRanking:
    """Which of a version's engines a machine can use, best first, and why not each of the others (unit, reason).

    what: the version, as in 'digits@3'.  lost: those of the rejected that would do, and whose bytes are lost.
    """

    what: str
    machine: Machine
    policy: Policy
    candidates: tuple[EngineCandidate, ...]
    rejected: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, str], ...] = ()

    def without(self, lost: Mapping[str, str]) -> "EngineRanking":
        """The ranking without engines whose bytes are lost. lost: engine's digest -> reason."""
        sound = tuple(item for item in self.candidates if item.entry.digest not in lost)
        gone = tuple((c.entry.unit, f"lost: {lost[c.entry.digest or '']}") for c in self.candidates if c not in sound)
        return replace(self, candidates=sound, rejected=(*self.rejected, *gone), lost=(*self.lost, *gone))

    def rejecting(self, reasons: Mapping[str, str]) -> "EngineRanking":
        """The ranking without engines that a server cannot open. reasons: engine's digest -> reason."""
        left = tuple(item for item in self.candidates if item.entry.digest not in reasons)
        gone = tuple((c.entry.unit, reasons[c.entry.digest or ""]) for c in self.candidates if c not in left)
        return replace(self, candidates=left, rejected=(*self.rejected, *gone))

    def resolution(self) -> "Resolution":
        """The best engine with the reasons. Raises UnknownNameError with every rejection when no engine is compatible,
        IntegrityError when all compatible ones are lost."""
        if not self.candidates and self.lost:
            lines = [f"  {unit}: {reason}" for unit, reason in self.lost]
            remedy = f"restore their blobs, or build again; `enginery verify {self.what}` says more"
            what = f"every engine of {self.what} that fits {self.machine.name} is lost"
            raise IntegrityError("\n".join([f"{what}; {remedy}:", *lines]))
        if not self.candidates:
            wanted = self.machine.name + (f" in {self.policy.precision}" if self.policy.precision else "")
            kind = "compile cache" if self.policy.kind == "cache" else "engine"
            lines = [f"  {unit}: {reason}" for unit, reason in self.rejected] or [f"  it has no {kind}s at all"]
            remedy = "add the target to the spec and build, or choose"
            if self.policy.kind == "cache":
                remedy = "build one on such a machine (compile_cache in the spec)"
            raise UnknownNameError("\n".join([f"{self.what} has no {kind} for {wanted}; {remedy}:", *lines]))
        ranked = tuple(candidate.entry for candidate in self.candidates)
        remarks = self.candidates[0].remarks
        return Resolution(ranked[0], _why(self.candidates), ranked, self.rejected, remarks, self.lost)

    def to_json(self) -> dict[str, Any]:
        """As JSON: the machine, the policy, candidates best first, and the rejected."""
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

    remarks: what could not be checked of the chosen one.  lost: see `EngineRanking`.
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
    timed: Callable[[Sequence[EngineEntry]], Mapping[str, MeasuredSpeed]] = lambda _: {},
) -> EngineRanking:
    """Rank a version's engines with their current status (`registry.evidence.attestations.judge_entries`).

    what: the version, for messages.  timed: gives engines' speeds by digest; called only where they decide.
    """
    machine = machine.with_installed(item for entry in entries for item in entry.requires)
    here = [entry.on_cpu(machine.cpu) if isinstance(entry, JudgedEntry) else entry for entry in entries]
    judged = [(entry, rejection(entry, machine, policy)) for entry in here]
    fitting = [entry for entry, reason in judged if reason is None]
    large = {item.unit: note for item in fitting if (note := compare_with_fp16(item, fitting))}
    fitting.sort(key=lambda entry: _rank(entry, machine, large))
    speeds = timed(fitting) if len(fitting) > 1 else {}
    candidates = tuple(
        EngineCandidate(entry, _fit(entry, machine)[1], (*remarks(entry, machine, speed), *note), speed)
        for entry in _by_speed(fitting, machine, speeds)
        for speed in (speeds.get(entry.digest or ""),)
        for note in ([large[entry.unit]] if entry.unit in large else [],)
    )
    return EngineRanking(
        what, machine, policy, candidates, tuple((entry.unit, why) for entry, why in judged if why is not None)
    )


def compare_with_fp16(entry: EngineEntry, entries: Sequence[EngineEntry]) -> str | None:
    """That a GPU engine narrower than fp16 is larger than the fp16 engine of its target and backend; else None.

    What makes a compiler's int8 engine larger, such as weights kept in two forms, does not make it faster.
    """
    for_cpu = entry.compute_capability is None and entry.target != PORTABLE
    if entry.precision not in _NARROWER or for_cpu or not entry.size_bytes:
        return None
    same = (entry.target, entry.backend, "fp16")
    half = next((item for item in entries if (item.target, item.backend, item.precision) == same), None)
    if half is None or not half.size_bytes or entry.size_bytes <= half.size_bytes:
        return None
    sizes = f"{format_bytes(entry.size_bytes)} against {format_bytes(half.size_bytes)}"
    return f"larger than the fp16 engine ({sizes}), which comes first unless this one is asked for or timed as faster"


def rejection(entry: EngineEntry, machine: Machine, policy: Policy) -> str | None:
    """The reason why an engine is incompatible with the machine or the policy; None if it is compatible."""
    unmet = [found for found in evaluate(entry.requires, machine) if found.rules_out]
    processor = hardware_of(entry.requires)
    if wrong := next((found for found in unmet if found.requirement is processor), None):
        return wrong.words
    if policy.precision is not None and entry.precision != policy.precision:
        return f"{entry.precision}, and {policy.precision} was asked for"
    if not entry.usable:
        return f"{entry.status}: {entry.reason}"
    if policy.proven_only and entry.status != "proven":
        return f"unproven, and only proven engines may be used: {entry.reason}"
    if policy.proven_only and _is_foreign(entry, machine):
        return f"proven on {entry.hardware.sm} and not on {machine.target.sm}, and only proven engines may be used"
    return unmet[0].words if unmet else None


def remarks(entry: EngineEntry, machine: Machine, speed: MeasuredSpeed | None = None) -> tuple[str, ...]:
    """Remarks on a compatible engine: what could not be checked, or differs without rejecting it."""
    words = [found.words for found in evaluate(entry.requires, machine) if not found.rules_out]
    if _is_foreign(entry, machine):
        words.append(f"{entry.status} on {entry.hardware.sm}, and not tried on {machine.target.sm}")
    if speed and speed.busy:
        words.append("timed on a busy machine, and so not ranked by speed")
    return tuple(filter(None, words))


def _is_foreign(entry: EngineEntry, machine: Machine) -> bool:
    """Whether it was built for another compute capability than this machine's, and not for any."""
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
    """Which GPUs an engine runs on beside its own: 'every generation from Ampere on'."""
    processor = hardware_of(entry.requires)
    if not isinstance(processor, Gpu) or processor.match == "family":
        return "its family"
    first = generation_of(processor.capability)
    return f"every generation from {first.family.capitalize() if first else processor.capability} on"


def _by_speed(
    ranked: Sequence[EngineEntry], machine: Machine, speeds: Mapping[str, MeasuredSpeed]
) -> Iterator[EngineEntry]:
    """The engines, those that are alike but for their precision by speed, where each was timed at the same sizes."""
    for _, group in itertools.groupby(ranked, key=lambda entry: _rank(entry, machine, ())[:2]):
        alike = list(group)
        found = [speeds.get(entry.digest or "") for entry in alike]
        if len({speed and speed.buckets for speed in found}) == 1 and all(speed and not speed.busy for speed in found):
            alike.sort(key=lambda entry: speeds[str(entry.digest)].seconds)
        yield from alike


def _rank(entry: EngineEntry, machine: Machine, large: Collection[str]) -> tuple[int, bool, float, bool, str]:
    """The place of an engine by the rules that need no speeds. large: units that come behind their fp16 engine."""
    preference = CPU_PREFERENCE if machine.is_cpu else GPU_PREFERENCE
    order: float = preference.index(entry.precision) if entry.precision in preference else len(preference)
    if entry.unit in large:
        order = preference.index("fp16") + (order + 1) / len(preference) / 2
    foreign = entry.cpu != machine.cpu
    return _fit(entry, machine)[0], entry.status != "proven", order, foreign, entry.target


def _why(candidates: Sequence[EngineCandidate]) -> str:
    """Why the first candidate was chosen: its fit, precision and status, and how it compares with the others."""
    best, others = candidates[0], [candidate.entry for candidate in candidates[1:]]
    facts = f"{best.fit}; {best.entry.precision}, {best.entry.status}"
    if not others:
        return f"{facts}; the only one that fits"
    if timed := _comparison(candidates):
        return f"{facts}; {timed}"
    return f"{facts}; preferred to {join_first([f'{entry.unit} ({entry.status})' for entry in others], 3)}"


def _comparison(candidates: Sequence[EngineCandidate]) -> str | None:
    """How much faster the first is than those that are its equals otherwise; None where speed did not decide."""
    best = candidates[0]
    alike = [item for item in candidates[1:] if (item.fit, item.entry.status) == (best.fit, best.entry.status)]
    ratios = []
    for speed in (item.speed for item in alike):
        if not (speed and best.speed and speed.buckets == best.speed.buckets) or speed.busy or best.speed.busy:
            return None
        ratios.append(speed.seconds / best.speed.seconds)
    if not ratios:
        return None
    pairs = zip(alike[:3], ratios, strict=False)
    times = ", ".join(f"{item.entry.unit} takes {ratio:.2f} times as long" for item, ratio in pairs)
    own = " by their runtime alone" if best.speed and best.speed.timed == "runtime" else ""
    return f"the fastest as timed on such a machine{own}: {times}"
