"""The step that makes one compile cache of a plan: an entry of the manifest, with its proof."""

from dataclasses import replace
from typing import TYPE_CHECKING

from builders.execution.jobs import Job
from enginesmith.compile_caches.archive import SUFFIX
from enginesmith.compile_caches.recipe import BACKEND, PRECISION
from enginesmith.core.codec import encode_fields
from enginesmith.core.errors import EnginesmithError, InputError, digest_of
from enginesmith.core.reports.proof import Report, approve, find_unmeasured, judge
from enginesmith.core.text import now
from enginesmith.registry.manifest import EngineEntry, Status
from enginesmith.user_code.compiling import CompileModel
from enginesmith.user_code.entry_point import source_files
from pipeline.cache_unit import CacheUnit
from pipeline.compile.caches.judged import JudgedCache, MadeCache, Maker
from pipeline.compile.caches.make_cache import MakeCache
from pipeline.compile.caches.maker import wanted_runtimes
from pipeline.compile.caches.plan import STEP, device_of, key_of, needs_of, recall_cache
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.engines import memory_request
from pipeline.compile.steps.exports import place_of
from pipeline.compile.steps.keys import engine_limits, limits_of
from pipeline.progress.events import Finished, VerdictReached
from pipeline.values import Exported

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec


def make_cache(unit: CacheUnit, spec: "ModelSpec", exported: Exported, context: RunContext) -> JudgedCache:
    """One compile cache, made where the run builds engines, or what it failed of in its place.

    Raises UnavailableError and IntegrityError, which say nothing about the model, InputError where its files change
    meanwhile, and StepError when cancelled.
    """
    if unit.action == "refused":
        return JudgedCache(_draft_entry(unit, spec, exported, "refused", unit.reason))
    if known := recall_cache(unit, context):
        context.progress.emit(Finished(unit.name, "cached"))
        return _judge(unit, known, spec, exported)
    try:
        made = context.run_job(context.executor, unit.name, _job(unit, spec, exported, context))
    except EnginesmithError as error:
        if stops_run(error):
            raise
        reason = str(error).removeprefix(f"{unit.name}: ")
        context.progress.emit(Finished(unit.name, "failed", reason.splitlines()[0]))
        return JudgedCache(_draft_entry(unit, spec, exported, "failed", reason))
    if unit.key != key_of(unit, spec, exported, context):
        raise InputError("the model's files changed while they were read; nothing was kept: run again")
    context.remember(STEP, unit.key, encode_fields(made), [made.digest])
    context.progress.emit(Finished(unit.name, "built"))
    judged = _judge(unit, made, spec, exported)
    context.progress.emit(VerdictReached(unit.name, judged.entry.status, judged.entry.reason))
    return judged


def _job(unit: CacheUnit, spec: "ModelSpec", exported: Exported, context: RunContext) -> Job[MadeCache]:
    source = spec.source
    model = CompileModel(
        spec.folder,
        spec.source_file,
        source.function,
        unit.options,
        dict(source.arguments),
        source.weights,
        source.module,
        device_of(unit.target),
    )
    request = MakeCache(
        model,
        unit.target,
        exported.golden,
        exported.model.outputs,
        limits_of(spec, PRECISION, "engine"),
        wanted_runtimes(),
        store_sources(spec, context) if context.remote else {},
    )
    needed = needs_of(unit.target, memory_request(spec))
    return Job(unit.name, request, context.store.uri, engine_limits(spec, "build"), needed)


def store_sources(spec: "ModelSpec", context: RunContext) -> dict[str, str]:
    """The model's files, stored for workers that do not see them: name below the spec's folder -> digest."""
    names = {spec.source_file, *([spec.source.weights] if spec.source.weights else [])}
    found = source_files(spec.folder, spec.file(spec.source_file), spec.source.module)
    names |= {place_of(path, spec) for path in found}
    return {name: context.store.put_file(spec.folder / name) for name in sorted(names)}


def _draft_entry(
    unit: CacheUnit, spec: "ModelSpec", exported: Exported, status: Status, reason: str, maker: Maker | None = None
) -> EngineEntry:
    """An entry without a file. maker: None where none was made."""
    target, options = unit.target, unit.options
    return EngineEntry(
        target.name,
        PRECISION,
        BACKEND,
        status,
        reason,
        compute_capability=target.compute_capability,
        product=target.product,
        options={"mode": options.mode, "fullgraph": options.fullgraph, "dynamic": bool(options.dynamic)},
        toolchain=maker.toolchain if maker else {},
        inputs=tuple(spec.tensors()),
        outputs=exported.model.outputs,
        requires=maker.requires if maker else (),
        build_key=digest_of(unit.key) if unit.key else None,
    )


def _judge(unit: CacheUnit, made: MadeCache, spec: "ModelSpec", exported: Exported) -> JudgedCache:
    """The cache with its verdict, which is that of the machine that made it."""
    checks = (*find_unmeasured(exported.proof.checks), *made.checks)
    verdict, reason = judge(checks)
    entry = _draft_entry(unit, spec, exported, "failed", "", made.maker)
    if verdict == "proven" and entry.cpu:
        reason = f"{reason}, on {entry.cpu}"
    report = Report(
        entry.unit,
        entry.target,
        entry.precision,
        entry.backend,
        made.digest,
        exported.golden,
        checks,
        verdict,
        reason,
        now(),
        made.maker.host,
        dict(entry.toolchain),
    )
    entry = replace(entry, reason=reason, notes=made.notes, checks=report.counts)
    proof = approve(report)
    if proof is None:
        return JudgedCache(entry)
    found = replace(entry, status=verdict, digest=made.digest, size_bytes=made.size_bytes, suffix=SUFFIX)
    return JudgedCache(replace(found, report=proof.report.digest), proof)
