"""The compile caches that a spec asks for, as units of a plan: which are made, which are on record, which are refused.

A cache fits the machines that are like the one that made it. Where a run builds engines on this machine, it is made
here, and its record is of this installation. Where it builds them on a cluster, it is made by a worker of the target's
kind, and its record is of the cluster: another image there with the same torch is seen when the cache is resolved, not
when it is planned.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from builders.execution.jobs import Needs
from enginesmith.compile_caches.recipe import BACKEND, PRECISION, CompileOptions
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import Target
from pipeline.cache_unit import CacheUnit
from pipeline.compile.caches.judged import MadeCache
from pipeline.compile.caches.maker import CPU_LABEL, describe_maker, explain_refusal, wanted_runtimes
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import gpu_labels
from pipeline.compile.steps.exports import source_digests
from pipeline.compile.steps.keys import code_key, limits_of
from pipeline.spec.model import matches_unit
from pipeline.values import Exported, Json

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec
    from pipeline.values import Selection

# The kind of record.
STEP = "compile-cache"
# By name: it imports numpy, which a run with nothing to do goes without.
_MAKING = "pipeline.compile.caches.make_cache:MakeCache"


def plan_caches(
    spec: "ModelSpec", selection: "Selection", exported: Exported | None, context: RunContext
) -> tuple[CacheUnit, ...]:
    """The caches of a selection. exported: None, or without a golden set, where that is not on record."""
    section = spec.compile_cache
    if section is None:
        return ()
    options = section.options(spec.tensors())
    targets = [target for target in spec.target_list() if selection.covers(target, PRECISION, BACKEND)]
    return tuple(_plan_one(target, options, spec, exported, context) for target in targets)


def _plan_one(
    target: Target, options: CompileOptions, spec: "ModelSpec", exported: Exported | None, context: RunContext
) -> CacheUnit:
    unit = CacheUnit(target, options, "unknown", "known once the model is exported")
    unit = replace(unit, required=any(matches_unit(pattern, unit.name) for pattern in spec.build.required))
    if not context.remote and (reason := explain_refusal(target)):
        return replace(unit, action="refused", reason=reason)
    if exported is None or not exported.golden:
        return unit
    unit = replace(unit, key=key_of(unit, spec, exported, context))
    if recall_cache(unit, context):
        return replace(unit, action="cached", reason="a cache of this model is in the registry")
    where = f"on a node with {target.name}" if context.remote else "on this machine"
    return replace(unit, action="build", reason=f"no cache of this model is on record; it is made {where}")


def check_required_caches(units: Sequence[CacheUnit]) -> None:
    """Stop when a cache that the spec requires is refused. Raises EnginesmithError."""
    if lines := [f"{unit.name}: {unit.reason}" for unit in units if unit.required and unit.action == "refused"]:
        remedy = "build where they can be made, or take them out of build.required"
        raise EnginesmithError(
            "\n".join([f"caches that the spec requires are refused, so nothing is built; {remedy}:", *lines])
        )


def recall_cache(unit: CacheUnit, context: RunContext) -> MadeCache | None:
    """The cache on record for a unit; None where there is none, or its file is gone."""
    if unit.key is None:
        return None
    return context.recall(STEP, unit.key, MadeCache, lambda made: {made.digest: made.size_bytes})


def key_of(unit: CacheUnit, spec: "ModelSpec", exported: Exported, context: RunContext) -> Json:
    """All that the cache is made from, and by whom."""
    return {
        "options": encode(unit.options),
        "golden": exported.golden,
        "limits": limits_of(spec, PRECISION, "engine"),
        "device": device_of(unit.target),
        "source": source_digests(spec, context),
        "made": _describe_cluster(unit.target) if context.remote else _describe_here(unit.target),
        **code_key(_MAKING),
    }


def _describe_here(target: Target) -> Json:
    maker = describe_maker(target)
    return {**maker.toolchain, "requires": [encode(item) for item in maker.requires]}


def _describe_cluster(target: Target) -> Json:
    return {"cluster": needs_of(target, 0).labels or target.name, **wanted_runtimes()}


def device_of(target: Target) -> str:
    """As torch names it."""
    return "cpu" if target.is_cpu else "cuda"


def needs_of(target: Target, memory_mib: int) -> Needs:
    """Where a cache is made: on a node of its kind of CPU, on any for 'cpu'; on its GPU's generation (and product). No
    other job of this machine runs meanwhile, since the two processes' times are compared."""
    if not target.is_cpu:
        return Needs(gpu_labels(target), required=True, gpus=1, memory_mib=memory_mib, alone=True)
    labels = {} if target.name == "cpu" else {CPU_LABEL: target.name}
    return Needs(labels, required=bool(labels), memory_mib=memory_mib, alone=True)
