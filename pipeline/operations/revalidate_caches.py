"""Proofs of published compile caches on this machine: a warm start, measured again beside a cold one."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from builders.execution.jobs import Job
from enginesmith.compile_caches.recipe import PRECISION
from enginesmith.compile_caches.warm_start import StaleCacheError, check_fresh
from enginesmith.core.errors import EnginesmithError, InputError, UnknownNameError, digest_of
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.parsing import this_process
from enginesmith.core.reports.proof import Check, Report, find_unmeasured, judge
from enginesmith.core.text import now
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.user_code.compiling import CompileModel
from pipeline.compile.caches.plan import device_of
from pipeline.compile.caches.prove_cache import ProveCache, ProvenStart
from pipeline.compile.run_context import RunContext, hold_lock, stops_run
from pipeline.compile.steps.keys import engine_limits, limits_of
from pipeline.operations.validate import Validated, attach, published_proof, spec_of
from pipeline.spec.model import ModelSpec


def revalidate_caches(
    manifest: Manifest, context: RunContext, model: Path, targets: Collection[str] | None = None
) -> Iterator[Validated]:
    """Start each compile cache of a version, and attach a report; 'refused', with what differs, of one that was made
    for another machine, installation or model. The caller answers for its publisher: a cache is code.

    model: the folder with the model's files, which are that of its spec.  targets: names to keep to; None for all.
    Raises UnknownNameError for a version without such a cache, InputError without the model's files, IntegrityError for
    a damaged blob.
    """
    whole = replace(manifest, engines=manifest.caches)
    chosen = [entry for entry in judge_entries(context.store, whole) if targets is None or entry.target in targets]
    if not chosen:
        raise UnknownNameError(
            f"{manifest.model}@{manifest.version} has no compile cache{' for that target' if targets else ''}; "
            f"`enginesmith show {manifest.model}@{manifest.version}` lists what it has"
        )
    spec = spec_of(manifest)
    needed = [spec.source_file, *([spec.source.weights] if spec.source.weights else [])]
    if absent := [name for name in needed if not (model / name).is_file()]:
        raise InputError(f"{model} has no {absent[0]}, which the cache's model is made of; name the folder of its spec")
    for known in chosen:
        entry = known.on_cpu(this_kind().name)
        if entry.digest is None:
            yield Validated.of(manifest, entry)
            continue
        try:
            check_fresh(entry.requires, entry.unit)
        except StaleCacheError as error:
            yield Validated.of(manifest, entry, "refused", str(error))
            continue
        yield _prove(entry, whole, spec, model, context)


def _prove(entry: EngineEntry, whole: Manifest, spec: ModelSpec, folder: Path, context: RunContext) -> Validated:
    """Start a cache and attach the report. whole: the version with its caches as engines."""
    source, section = spec.source, spec.compile_cache
    if section is None:
        return Validated.of(whole, entry, "refused", "its spec asks for no compile cache; build it again")
    model = CompileModel(
        folder.absolute(),
        spec.source_file,
        source.function,
        section.options(spec.tensors()),
        dict(source.arguments),
        source.weights,
        source.module,
        device_of(entry.hardware),
    )
    limits = limits_of(spec, PRECISION, "engine")
    request = ProveCache(model, str(entry.digest), whole.golden, entry.outputs, limits)
    job = Job(f"prove {entry.unit}", request, context.store.uri, engine_limits(spec, "build"))
    machine = digest_of({"proving on": this_process().host})
    try:
        with hold_lock(context, machine, f"proving {entry.unit} of {whole.model}@{whole.version}"):
            found = context.run_job(context.executor, job.name, job)
    except EnginesmithError as error:
        if stops_run(error):
            raise
        return Validated.of(whole, entry, "refused", str(error))
    before = find_unmeasured(published_proof(entry, context.store).checks)
    report = _report_on(entry, whole, found, (*before, *found.proof.checks))
    return attach(context.store, whole, report)


def _report_on(entry: EngineEntry, whole: Manifest, found: ProvenStart, checks: tuple[Check, ...]) -> Report:
    verdict, reason = judge(checks)
    on = f", on {this_kind().name}" if entry.hardware.is_cpu else ""
    return Report(
        entry.unit,
        entry.target,
        entry.precision,
        entry.backend,
        entry.digest,
        whole.golden,
        checks,
        verdict,
        f"{reason}{on}; {found.note}",
        now(),
        describe_host(),
        dict(entry.toolchain),
    )
