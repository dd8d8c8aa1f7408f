"""Giving a published engine other weights, in a process of its own: the worker's side of `enginery refit`.

`enginery refit`: a published engine's kernels with other weights, without a build, proven and published anew.

The weights come from a spec, or from another version. A unit is refitted when the engine of the same unit in the
version REF was built to be (its manifest says so), everything else of its
build request is the same, and the two ONNX models differ in their weights alone. The engine is then on record under
the new build key as if it had been built, so that all that follows is what follows a build: it is proven where its
hardware is, else published as unproven; and the new version's provenance names the engine that the kernels are from.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from builders.backends import discovery
from builders.backends.optional_methods import get_refitting
from builders.execution.jobs import Executor, Job, Needs, WorkerContext
from builders.execution.process import enter_phase
from enginery.core.errors import EngineryError, InputError, IntegrityError, ModelError, StepError, UnavailableError
from enginery.core.requirements import Weights
from enginery.core.types import BuildRequest
from enginery.registry.manifest import EngineEntry, Manifest, request_of
from enginery.registry.store.base import open_store
from pipeline.compile.causes import explain_change
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import fetch, fetch_engine
from pipeline.compile.steps.engines import memory_request, needs, recall_engine, record_engine
from pipeline.compile.steps.keys import engine_limits
from pipeline.outcome import Outcome
from pipeline.progress.events import Finished
from pipeline.spec.model import ModelSpec
from pipeline.values import EngineBlob, EngineRecord


@dataclass(frozen=True)
class RefitEngine:
    """Make the engine of `request` from another one, and put it on record as if it had been built.

    before: the old engine.  origin: where it was published, for the notes.
    """

    before: EngineBlob
    request: BuildRequest
    origin: str

    def run(self, context: WorkerContext) -> EngineRecord:
        """The new engine's record. Raises ModelError when the models differ in more than their weights."""
        place, workdir = open_store(context.store), context.workdir
        old, wanted = self.before, self.request
        backend = discovery.configure(wanted.backend, dict(wanted.options))
        discovery.check_toolchain(backend, wanted)
        refitter = get_refitting(backend)
        if refitter is None:
            raise InputError(f"engines of {wanted.backend} cannot be refitted")
        enter_phase("fetching")
        model = fetch(place, wanted.model, workdir / "new.onnx")
        _check_alike(fetch(place, old.request.model, workdir / "old.onnx"), model)
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


def _check_alike(old: Path, new: Path) -> None:
    from builders.onnx_graphs.structure import differs

    if reason := differs(old, new):
        raise ModelError(f"the models differ in more than their weights: {reason}; build the engine again")


@dataclass(frozen=True)
class Refit:
    """What became of a unit. kernels: digest of the engine they are from.  engine: of the new one, None where there is
    none, and then reason says why."""

    request: BuildRequest
    kernels: str | None = None
    engine: str | None = None
    reason: str = ""

    def to_json(self) -> dict[str, str | None]:
        """As JSON."""
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
        """What a whole run published."""
        failed = tuple(engine.unit for engine in outcome.failed)
        return cls(outcome.model, outcome.version, outcome.channel_refusal, failed)


def refit_units(wanted: Iterable[BuildRequest], base: Manifest, spec: ModelSpec, context: RunContext) -> list[Refit]:
    """Refit what can be, of these requests with new weights; say of the others why not. Builds nothing.

    Raises UnavailableError and IntegrityError, which say nothing about an engine, and StepError when cancelled.
    """
    entries = {entry.unit: entry for entry in base.engines if entry.usable}
    return [_refit(request, entries.get(request.unit), base, spec, context) for request in wanted]


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


def _refit(
    request: BuildRequest, entry: EngineEntry | None, base: Manifest, spec: ModelSpec, context: RunContext
) -> Refit:
    kernels = entry.digest if entry else None
    if reason := cannot(request, entry, base):
        return Refit(request, kernels, reason=reason)
    if recall_engine(request, context):
        return Refit(request, kernels, reason="an engine with this build key is in the registry")
    assert entry is not None  # noqa: S101 - `cannot` would have said so
    name = f"refit {request.unit}"
    try:
        record = context.run_job(_executor(request, context), name, _job(name, request, entry, base, spec, context))
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return Refit(request, kernels, reason=str(error))
    context.progress.emit(Finished(name, "refitted", words=f"refitted in {record.seconds:.1f} s"))
    return Refit(request, kernels, record.digest)


def _needs_gpu(request: BuildRequest) -> bool:
    refitter = get_refitting(discovery.configure(request.backend, dict(request.options)))
    return refitter is not None and refitter.refit_needs_gpu()


def _executor(request: BuildRequest, context: RunContext) -> Executor:
    return context.executor if _needs_gpu(request) else context.local


def _job(
    name: str, request: BuildRequest, entry: EngineEntry, base: Manifest, spec: ModelSpec, context: RunContext
) -> Job[EngineRecord]:
    before = EngineBlob(request_of(entry), str(entry.digest), str(entry.suffix))
    where = needs(request, memory_request(spec)) if _needs_gpu(request) else Needs()
    refit = RefitEngine(before, request, f"{base.model}@{base.version}")
    return Job(name, refit, context.store.uri, engine_limits(spec, "build"), where)


def select_refitted(results: Sequence[Refit]) -> list[Refit]:
    """Those that were."""
    return [result for result in results if result.engine is not None]
