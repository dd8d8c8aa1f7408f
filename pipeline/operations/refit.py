"""`enginesmith debug refit`: a published engine's kernels with other weights, without a build, proven and published
anew.

The weights come from a spec or from another version. A unit is refitted when the engine of the same unit was built for
it (its manifest says so), everything else of its build request is the same, and the two ONNX models differ in their
weights alone. The new engine is put on record under its build key as if it had been built, so that what follows a build
follows here too: it is proven where its hardware is, else published as unproven. The new version's provenance names the
engine that the kernels are from.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from builders.backends import discovery
from builders.backends.optional_methods import get_refitting
from builders.execution.jobs import Job, Needs, WorkerContext
from builders.execution.process import enter_phase
from enginesmith.core.errors import (
    EnginesmithError,
    InputError,
    IntegrityError,
    ModelError,
    StepError,
    UnavailableError,
)
from enginesmith.core.requirements import Weights
from enginesmith.core.types import BuildRequest
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.store.base import open_store
from pipeline.compile.causes import explain_change
from pipeline.compile.run_context import Work
from pipeline.compile.steps.blobs import fetch_engine, fetch_graph
from pipeline.compile.steps.engines import memory_request, needs, recall_engine, record_engine
from pipeline.compile.steps.keys import engine_limits
from pipeline.outcome import Outcome
from pipeline.progress.events import Finished
from pipeline.values import EngineBlob, Recorded


@dataclass(frozen=True)
class RefitEngine:
    """Make the engine of `request` from another one in a process of its own, and put it on record as if it was built.

    before: the other engine.  origin: the version that has it, for the notes.
    """

    before: EngineBlob
    request: BuildRequest
    origin: str

    def run(self, context: WorkerContext) -> Recorded:
        """The new engine's record. Raises ModelError when the models differ in more than their weights."""
        from builders.onnx_graphs.structure import differs

        place, workdir = open_store(context.store), context.workdir
        old, wanted = self.before, self.request
        backend = discovery.configure(wanted.backend, dict(wanted.options))
        discovery.check_toolchain(backend, wanted)
        refitter = get_refitting(backend)
        if refitter is None:
            raise InputError(f"engines of {wanted.backend} cannot be refitted")
        enter_phase("fetching")
        model = fetch_graph(place, wanted.model, workdir / "new.onnx")
        if reason := differs(fetch_graph(place, old.request.model, workdir / "old.onnx"), model):
            raise ModelError(f"the models differ in more than their weights: {reason}; build the engine again")
        enter_phase("refitting")
        begun = time.monotonic()
        made = refitter.refit(fetch_engine(place, old, workdir), model, wanted, workdir)
        seconds = round(time.monotonic() - begun, 3)
        enter_phase("storing")
        stripped = any(isinstance(item, Weights) for item in made.requires)
        how = "weights left to the ONNX model" if stripped else "weights replaced"
        note = f"refitted from {self.origin}, engine {old.digest[:12]}: {how}, kernels kept"
        engine = replace(made, request=wanted, notes=(*made.notes, note))
        return record_engine(place, engine, seconds, {}, refitted_from=old.digest)


@dataclass(frozen=True)
class Refit:
    """What became of a unit. kernels: digest of the engine that they are from, None where there is none.

    engine: digest of the new engine, None where there is none, and then `reason` says why.
    """

    request: BuildRequest
    kernels: str | None = None
    engine: str | None = None
    reason: str = ""

    def to_json(self) -> dict[str, str | None]:
        """A row of `enginesmith debug refit --json`."""
        return {"unit": self.request.unit, "kernels": self.kernels, "engine": self.engine, "reason": self.reason}


@dataclass(frozen=True)
class PublishedRefit:
    """The version that the refitted engines are in; None where none was fit. failed: names of units."""

    model: str
    version: str | None
    channel_refusal: str | None
    failed: tuple[str, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> "PublishedRefit":
        """What a run of all steps published."""
        failed = tuple(engine.unit for engine in outcome.failed)
        return cls(outcome.model, outcome.version, outcome.channel_refusal, failed)


def refit_units(wanted: Iterable[BuildRequest], base: Manifest, work: Work) -> list[Refit]:
    """Refit the engines of `base` for these requests with new weights; of the others say why not. Builds nothing.

    Raises UnavailableError and IntegrityError, which say nothing about an engine, and StepError when cancelled.
    """
    entries = {entry.unit: entry for entry in base.engines}
    foreseen = foresee_refits(wanted, base)
    return [item if item.reason else _refit(item, entries[item.request.unit], base, work) for item in foreseen]


def foresee_refits(wanted: Iterable[BuildRequest], base: Manifest) -> list[Refit]:
    """What `refit_units` would try to refit, as far as the manifest tells, and why not the others; nothing is done."""
    entries, found = {entry.unit: entry for entry in base.engines if entry.usable}, []
    for request in wanted:
        entry = entries.get(request.unit)
        found.append(Refit(request, entry.digest if entry else None, reason=cannot(request, entry, base) or ""))
    return found


def cannot(request: BuildRequest, entry: EngineEntry | None, base: Manifest) -> str | None:
    """Why the engine of `entry` cannot be given the weights of `request`, as far as the manifest tells."""
    if entry is None:
        return f"{base.model}@{base.version} has no engine for it"
    backend = discovery.configure(request.backend, dict(request.options))
    refitter = get_refitting(backend)
    if refitter is None:
        return f"{request.backend} does not refit"
    before = request_of(entry)
    if reason := refitter.refits(before):
        return f"{entry.unit} of {base.model}@{base.version} cannot be refitted: {reason}"
    if before.model == request.model:
        return "its weights are the same"
    others = replace(before, model=request.model)
    return None if others == request else f"more than weights changed: {explain_change(others, request)}"


def _refit(item: Refit, entry: EngineEntry, base: Manifest, work: Work) -> Refit:
    context = work.context
    request = item.request
    if recall_engine(request, context):
        return replace(item, reason="an engine with this build key is in the registry")
    refitter = get_refitting(discovery.configure(request.backend, dict(request.options)))
    on_gpu = refitter is not None and refitter.refit_needs_gpu()
    before = EngineBlob(request_of(entry), str(entry.digest), str(entry.suffix))
    refit, name = RefitEngine(before, request, f"{base.model}@{base.version}"), f"refit {request.unit}"
    where = needs(request, memory_request(work.spec)) if on_gpu else Needs()
    job = Job(name, refit, context.store.uri, engine_limits(work.spec, "build"), where)
    try:
        record = context.run_job(context.executor if on_gpu else context.local, name, job)
    except (UnavailableError, IntegrityError):
        raise
    except EnginesmithError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return replace(item, reason=str(error))
    context.progress.emit(Finished(name, "refitted", words=f"refitted in {record.seconds:.1f} s"))
    return replace(item, engine=record.digest)
