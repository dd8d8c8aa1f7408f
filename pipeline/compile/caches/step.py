"""The step that makes the compile caches that a spec asks for: each is an entry of the manifest, with its proof."""

from dataclasses import replace
from typing import TYPE_CHECKING

from builders.backends.installed import versions_of
from builders.execution.jobs import Job
from enginery.compile_caches.archive import SUFFIX
from enginery.compile_caches.recipe import CompileOptions
from enginery.core.codec import encode
from enginery.core.digest import digest_of
from enginery.core.errors import EngineryError, InputError, ModelError
from enginery.core.hardware import cuda
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.installation import list_facts
from enginery.core.hardware.machine import describe_host
from enginery.core.reports.proof import Report, approve, judge
from enginery.core.requirements import Installation, Requirement, for_target, same_versions, to_json
from enginery.core.text import now
from enginery.core.types import CPU_KIND, Target
from enginery.registry.manifest import EngineEntry
from enginery.user_code.compiling import CompileModel
from pipeline.compile.caches.judged import JudgedCache
from pipeline.compile.caches.make_cache import PRECISION, MadeCache, MakeCache
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.exports import source_digests
from pipeline.compile.steps.keys import code_key, engine_limits, limits_of
from pipeline.progress.events import VerdictReached
from pipeline.values import Exported

if TYPE_CHECKING:
    from pipeline.compile.plan import Selection
    from pipeline.spec.model import ModelSpec

# What stands in an entry for the compiler.
BACKEND = "torch-compile"
_RUNTIMES = ("torch", "triton")


def make_caches(
    spec: "ModelSpec", selection: "Selection", exported: Exported, context: RunContext
) -> list[JudgedCache]:
    """The compile caches that a spec asks for, for each of its targets; one that cannot be made here is refused."""
    section = spec.compile_cache
    if section is None:
        return []
    targets = [target for target in spec.target_list() if selection.covers(target, PRECISION, BACKEND)]
    options = section.options(spec.tensors())
    return [_make_one(target, options, spec, exported, context) for target in targets]


def _make_one(
    target: Target, options: CompileOptions, spec: "ModelSpec", exported: Exported, context: RunContext
) -> JudgedCache:
    entry = _draft_entry(target, options, spec, exported)
    if reason := explain_refusal(target):
        return JudgedCache(replace(entry, status="refused", reason=reason))
    source = spec.source
    model = CompileModel(
        spec.folder,
        spec.source_file,
        source.function,
        options,
        dict(source.arguments),
        source.weights,
        source.module,
        "cpu" if target.is_cpu else "cuda",
    )
    request = MakeCache(model, exported.golden, exported.model.outputs, limits_of(spec, PRECISION, "engine"))
    made_from = {**entry.toolchain, "requires": [to_json(item) for item in entry.requires]}
    reads = source_digests(spec, context)
    shown = {
        "options": encode(options),
        "golden": exported.golden,
        "limits": dict(request.limits),
        "device": model.device,
    }
    key = {**shown, "source": reads, "made": made_from, **code_key(MakeCache)}
    job = Job(f"cache {entry.unit}", request, context.store.uri, engine_limits(spec, "build"))
    entry = replace(entry, build_key=digest_of(key))
    try:
        made = context.once("compile-cache", job.name, key, job, lambda made: [made.digest])
        if reads != source_digests(spec, context):
            raise InputError("the model's files changed while they were read; nothing was kept: run again")
    except EngineryError as error:
        if stops_run(error) or (isinstance(error, InputError) and not isinstance(error, ModelError)):
            raise
        return JudgedCache(replace(entry, status="failed", reason=str(error)))
    judged = _judge(entry, made, exported)
    context.progress.emit(VerdictReached(judged.entry.unit, judged.entry.status, judged.entry.reason))
    return judged


def _draft_entry(target: Target, options: CompileOptions, spec: "ModelSpec", exported: Exported) -> EngineEntry:
    toolchain = versions_of(*_RUNTIMES)
    facts = tuple(list_facts(cuda=not target.is_cpu).items())
    kind = this_kind().name if target.is_cpu else ""
    requires: tuple[Requirement, ...] = (
        for_target(target, only=kind),
        *same_versions(toolchain, *_RUNTIMES),
        Installation(facts),
    )
    return EngineEntry(
        target.name,
        PRECISION,
        BACKEND,
        "failed",
        compute_capability=target.compute_capability,
        product=target.product,
        options={"mode": options.mode, "fullgraph": options.fullgraph, "dynamic": bool(options.dynamic)},
        toolchain={**toolchain, **({CPU_KIND: kind} if kind else {})},
        inputs=tuple(spec.tensors()),
        outputs=exported.model.outputs,
        requires=requires,
    )


def explain_refusal(target: Target) -> str | None:
    """Why no cache for this target can be made here; None where it can. torch compiles for the device that it has."""
    if target.is_cpu:
        named = this_kind().name
        return (
            None if target.name in ("cpu", named) else f"torch compiles for this CPU, which is {named}; build it there"
        )
    if "+cpu" in versions_of("torch").get("torch", "+cpu"):
        return f"torch has no CUDA here; build it on a node with {target.name}"
    return cuda.explain_missing_gpu(target)


def _judge(entry: EngineEntry, made: MadeCache, exported: Exported) -> JudgedCache:
    verdict, reason = judge(made.checks)
    if verdict == "proven" and entry.cpu:
        reason = f"{reason}, on {entry.cpu}"
    report = Report(
        entry.unit,
        entry.target,
        entry.precision,
        entry.backend,
        made.digest,
        exported.golden,
        made.checks,
        verdict,
        reason,
        now(),
        describe_host(),
        dict(entry.toolchain),
    )
    passed = [check.passed for check in made.checks]
    entry = replace(
        entry, reason=reason, notes=made.notes, checks={"passed": sum(passed), "failed": passed.count(False)}
    )
    proof = approve(report)
    if proof is None:
        return JudgedCache(entry)
    found = replace(
        entry,
        status="proven",
        digest=made.digest,
        size_bytes=made.size_bytes,
        suffix=SUFFIX,
        report=proof.report.digest,
    )
    return JudgedCache(found, proof)
