"""Which engine of a version fits a machine best, and why not each of the others.

Order: an engine built for the very product, then for the same compute capability, then for another product of that
capability (it runs, tuned for other clocks and memory), then a portable one (target `gpu`); among equals a proven one
before an unproven one; then by precision, as each kind of hardware likes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from builders.errors import UnknownNameError
from builders.types import Target
from pipeline.registry.manifest import EngineEntry

PORTABLE = "gpu"

# On GPUs narrower is faster. CPUs have int8 kernels, but run fp16 through casts to fp32, slower than fp32 itself.
GPU_PREFERENCE = ("int8", "fp8", "int4", "fp16", "bf16", "fp32", "int8-dynamic")
CPU_PREFERENCE = ("int8", "int8-dynamic", "fp32", "int4", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Resolution:
    """The engine to use and why; the others that would do, best first; and why each of the rest will not."""

    chosen: EngineEntry
    why: str
    ranked: tuple[EngineEntry, ...]
    rejected: tuple[tuple[str, str], ...]


def resolve(
    entries: Sequence[EngineEntry],
    target: Target,
    precision: str | None = None,
    *,
    proven_only: bool = False,
    what: str = "this version",
) -> Resolution:
    """Choose among a version's engines, given with the status they have today (`attestations.judged`).

    `what` names the version in messages. Raises UnknownNameError with every rejection when nothing fits.
    """
    judged = [(entry, rejection(entry, target, precision, proven_only=proven_only)) for entry in entries]
    fitting = [entry for entry, reason in judged if reason is None]
    rejected = tuple((entry.unit, reason) for entry, reason in judged if reason is not None)
    if not fitting:
        raise UnknownNameError(_nothing_fits(what, target, precision, rejected))
    ranked = tuple(sorted(fitting, key=lambda entry: _rank(entry, target)))
    return Resolution(ranked[0], _why(ranked, target), ranked, rejected)


def rejection(entry: EngineEntry, target: Target, precision: str | None, *, proven_only: bool) -> str | None:
    """Why an engine will not do; None if it will."""
    if (misfit := _misfit(entry, target)) is not None:
        return misfit
    if precision is not None and entry.precision != precision:
        return f"{entry.precision}, and {precision} was asked for"
    if not entry.usable:
        return f"{entry.status}: {entry.reason}"
    if proven_only and entry.status != "proven":
        return f"unproven, and only proven engines may be used: {entry.reason}"
    return None


def _misfit(entry: EngineEntry, target: Target) -> str | None:
    if entry.target == PORTABLE and not target.is_cpu:
        return None
    if entry.target == PORTABLE or entry.compute_capability != target.compute_capability:
        return f"built for {entry.target}; this is {_name(target)}"
    return None


def _fit(entry: EngineEntry, target: Target) -> tuple[int, str]:
    if entry.target == PORTABLE:
        return 3, "portable"
    if entry.product == target.product:
        return 0, f"built for {_name(target)}"
    if entry.product is None:
        return 1, f"built for {target.sm}, this GPU's compute capability"
    return 2, f"tuned for {entry.product}, another product of {target.sm}; it runs here, perhaps slower"


def _rank(entry: EngineEntry, target: Target) -> tuple[int, bool, int, str]:
    preference = CPU_PREFERENCE if target.is_cpu else GPU_PREFERENCE
    order = preference.index(entry.precision) if entry.precision in preference else len(preference)
    return _fit(entry, target)[0], entry.status != "proven", order, entry.unit


def _why(ranked: Sequence[EngineEntry], target: Target) -> str:
    best, others = ranked[0], ranked[1:]
    facts = f"{_fit(best, target)[1]}; {best.precision}, {best.status}"
    if not others:
        return f"{facts}; the only one that fits"
    listed = ", ".join(f"{entry.unit} ({entry.status})" for entry in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"{facts}; preferred to {listed}{more}"


def _nothing_fits(what: str, target: Target, precision: str | None, rejected: Sequence[tuple[str, str]]) -> str:
    wanted = _name(target) + (f" in {precision}" if precision else "")
    lines = [f"  {unit}: {reason}" for unit, reason in rejected] or ["  it has no engines at all"]
    return "\n".join([f"{what} has no engine for {wanted}; add the target to the spec and build, or choose:", *lines])


def _name(target: Target) -> str:
    return f"{target.sm} ({target.product})" if target.product else target.sm
