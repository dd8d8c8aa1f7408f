"""The step that compiles one engine: the plan's unit in, the engine on record by its build key out.

A timing cache of the registry is fetched before a build and merged into what is there after it. It is kept per product
of GPU or CPU, driver and compiler version, as a blob that one document names, and is never a reason to fail.
"""

import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.as_built import build_engine
from builders.backends import discovery
from builders.backends.optional_methods import GIVEN, GROWN, TimingCached
from builders.execution.jobs import Job, Needs, ReducedRequest, WorkerContext
from builders.execution.process import enter_phase
from builders.execution.scrub import scrubber
from enginesmith.core.codec import Excerpt, encode, parse_as
from enginesmith.core.errors import Digest, EnginesmithError, StepError, canonical_json, digest_of
from enginesmith.core.hardware.machine import driver_version
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Library
from enginesmith.core.text import now
from enginesmith.core.types import Backend, BuildFailure, BuildRequest, Engine, Target
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.builds.runs import remember
from enginesmith.registry.store.base import Store, change, open_store
from enginesmith.registry.store.layout import timing_key
from pipeline.compile.run_context import RunContext, Work, stops_run
from pipeline.compile.steps.blobs import fetch_graph, put_graph
from pipeline.compile.steps.keys import engine_limits
from pipeline.progress.events import Finished, Predicted
from pipeline.values import Built, Recorded, ReducedWorkspace, Unit

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec

# Memory that compilers need for small and medium models.
USUAL_MEMORY_MIB = 1024
# No compiler takes less.
LEAST_MEMORY_MIB = 256
# Of memory, over the most that such builds took.
HEADROOM = 1.25
# Instead of no limit.
LEAN_WORKSPACE_MIB = 1024
# Of a timing cache, and of the document that names it.
MAX_BYTES = 256 << 20
_DOCUMENT_BYTES = 1 << 16


@dataclass(frozen=True)
class BuildEngine:
    """Compile one engine, upload it, and put it on record by its build key.

    instead_of: the request, with a larger workspace, whose build ran out of memory. The registry then records that this
    engine replaces it, and a note says so.
    """

    request: BuildRequest
    instead_of: BuildRequest | None = None

    def run(self, context: WorkerContext) -> Recorded:
        """The engine's record. Raises what the backend raises, and InputError for another toolchain's request."""
        store, build_request = open_store(context.store), self.request
        backend = discovery.configure(build_request.backend, dict(build_request.options))
        discovery.check_toolchain(backend, build_request)
        enter_phase("fetching")
        model = fetch_graph(store, build_request.model, context.workdir / "model.onnx")
        timing = TimingCache(store, backend, context.workdir)
        timing.fetch()
        enter_phase("compiling")
        started_s = time.monotonic()
        try:
            engine = build_engine(backend, build_request, model, context.workdir)
        except EnginesmithError:
            timing.keep()  # what was measured until then makes the next try shorter
            raise
        seconds = round(time.monotonic() - started_s, 3)
        enter_phase("storing")
        notes = [*engine.notes, *timing.notes]
        if self.instead_of:
            option = discovery.capabilities_of(build_request.backend).options.workspace_mib
            original_mib, used_mib = (dict(request.options)[option] for request in (self.instead_of, build_request))
            notes.append(
                f"built with {option} {used_mib} instead of {original_mib}: a first build had run out of memory"
            )
        extras = {name: store.put_file(path) for name, path in engine.extras}
        record = record_engine(store, replace(engine, notes=tuple(notes)), seconds, extras)
        timing.keep()
        if self.instead_of:
            key = digest_of({"build": self.instead_of.key})
            remember(store, "reduced-workspace", key, encode(ReducedWorkspace(build_request)))
        return record


def record_engine(
    store: Store, engine: Engine, seconds: float, extras: Mapping[str, str], refitted_from: str | None = None
) -> Recorded:
    """Upload an engine and put it on record by its build key. Arguments as in `Recorded`."""
    stored_engine = put_graph(store, engine.path)
    library_digests = {
        build.sha256 for library in engine.requires if isinstance(library, Library) for build in library.builds
    }
    shards = {**dict(stored_engine.shards), **{digest: store.size(digest) for digest in library_digests}}
    record = Recorded(
        engine.request.key,
        stored_engine.blob.digest,
        engine.size_bytes,
        engine.suffix,
        seconds,
        engine.requires,
        engine.notes,
        stored_engine.blob.blake3,
        extras,
        refitted_from,
        tuple(sorted(shards.items())),
    )
    key = digest_of({"build": record.build})
    remember(store, "build", key, encode(record), [*record.sizes, *extras.values()])
    return record


class TimingCache:
    """The registry's timing cache for a backend on this machine; does nothing for a backend without one.

    notes: what went wrong, for people; nothing is raised.
    """

    def __init__(self, store: Store, backend: Backend, workdir: Path) -> None:
        self._store, self._workdir = store, workdir
        self._backend = backend if isinstance(backend, TimingCached) else None
        target = self._backend.timing_place() if self._backend else None
        self._key = timing_key(target[0], driver_version() or "unknown", target[1]) if target else None
        self._given: str | None = None
        self.notes: list[str] = []

    def fetch(self) -> None:
        """Put the cache into the folder of the build."""
        if self._key is None:
            return
        try:
            self._given = _read_digest(self._store.read(self._key))
            if self._given:
                self._store.fetch(self._given, self._workdir / GIVEN)
        except (EnginesmithError, OSError) as error:
            (self._workdir / GIVEN).unlink(missing_ok=True)
            self.notes.append(f"no timing cache was used: {error}")

    def keep(self) -> None:
        """Merge what the build has measured into the registry's cache."""
        cache_path = self._workdir / GROWN
        if self._key is None or not cache_path.is_file():
            return
        try:
            data = cache_path.read_bytes()
            if len(data) > MAX_BYTES:
                raise EnginesmithError(f"it is {len(data)} bytes long; the limit is {MAX_BYTES}")
            change(self._store, self._key, lambda before: self._document(before, data))
        except (EnginesmithError, OSError) as error:
            self.notes.append(f"the timing cache was not kept: {error}")

    def _document(self, before: bytes | None, data: bytes) -> bytes | None:
        stored_digest = _read_digest(before)
        cache_data = data if stored_digest in (None, self._given) else self._merge(str(stored_digest), data)
        digest = self._store.put_bytes(cache_data)
        if digest == stored_digest:
            return None
        return canonical_json({"format": 1, "cache": digest, "size_bytes": len(cache_data), "at": now()})

    def _merge(self, stored_digest: str, data: bytes) -> bytes:
        """Both caches as one; `data` alone where the other is damaged or of another kind."""
        try:
            assert self._backend is not None  # noqa: S101 - there is no key without one
            return self._backend.merge_timing(self._store.read_blob(stored_digest, MAX_BYTES), data)
        except EnginesmithError as error:
            self.notes.append(f"the timing cache of others was replaced: {error}")
            return data


@dataclass(frozen=True)
class _TimingCache(Excerpt):
    cache: Digest


def _read_digest(document: bytes | None) -> str | None:
    if document is None:
        return None
    try:
        return parse_as(document, _DOCUMENT_BYTES, _TimingCache).cache
    except Malformed:
        return None


def build(unit: Unit, work: Work) -> Built:
    """Compile one unit in a process of its own: its engine, or the failure in its place; neither if its graph failed.

    Raises UnavailableError and IntegrityError, which say nothing about the unit, and StepError when cancelled.
    """
    spec, context = work.spec, work.context
    if failure := unit.graph.failure:
        return Built(unit, failure=_failure(unit, work, StepError(failure.reason, failure.kind, failure.log)))
    if unit.action == "failed":
        context.progress.emit(Finished(unit.name, "failed", unit.reason))
        return Built(unit)
    if unit.action == "cached" and (stored_engine := recall_engine(unit.request, context)):
        context.progress.emit(Finished(unit.name, "cached"))
        return Built(unit, stored_engine, cached=True)
    expectation = context.history.predict(spec.model, unit.request, unit.graph.shard_bytes)
    if expectation:
        context.progress.emit(Predicted(unit.name, expectation))
    request = BuildEngine(unit.request)
    build_needs = needs(unit.request, memory_request(spec, expectation, unit.graph.shard_bytes))
    limits = engine_limits(spec, "build")
    job = Job(unit.name, request, context.store.uri, limits, build_needs, reduce_workspace(request))
    try:
        record = context.run_job(context.executor, unit.name, job)
    except EnginesmithError as error:
        if stops_run(error):
            raise
        return Built(unit, failure=_failure(unit, work, error))
    context.progress.emit(Finished(unit.name, "built", words=f"built in {record.seconds:.1f} s"))
    if record.build != unit.request.key and (reduced_request := recall_reduced(unit.request, context)):
        unit = replace(unit, request=reduced_request)
    return Built(unit, record)


def _failure(unit: Unit, work: Work, error: EnginesmithError) -> BuildFailure:
    kind, log = (error.kind, error.log) if isinstance(error, StepError) else ("error", "")
    reason = str(error).removeprefix(f"{unit.name}: ")  # the caller adds the unit's name
    work.context.progress.emit(Finished(unit.name, "failed", reason.splitlines()[0]))
    return BuildFailure(unit.name, kind, reason, scrubber()(log), reproduce(unit, work.spec, work.context.store.uri))


def reproduce(unit: Unit, spec: "ModelSpec", registry: str) -> str:
    """The command that builds this unit alone, from the steps recorded in `registry`."""
    request = unit.request
    args = ("enginesmith", "build", spec.address, "--registry", registry, "--target", request.target.name)
    return shlex.join([*args, "--precision", request.precision, "--backend", request.backend])


def needs(request: BuildRequest, memory_mib: int) -> Needs:
    """Where a unit is built: on its own generation (and product) with a GPU to itself if the compiler tunes there, else
    preferably there. A unit for the CPU is built anywhere."""
    target = request.target
    if target.is_cpu:
        return Needs(memory_mib=memory_mib)
    is_tuned = discovery.capabilities_of(request.backend).tunes_on_target
    return Needs(gpu_labels(target), required=is_tuned, gpus=int(is_tuned), memory_mib=memory_mib)


def gpu_labels(target: Target) -> dict[str, str]:
    """Labels of the nodes that have a GPU: its generation, and its product where one is named."""
    return {"enginesmith/sm": target.sm, **({"enginesmith/product": target.product} if target.product else {})}


def memory_request(spec: "ModelSpec", expectation: Expectation | None = None, shard_bytes: int = 0) -> int:
    """MiB that a cluster reserves for a build, at most the limit: 1.25 times what earlier builds of the kind took.

    If no such build succeeded (a failed one may have used little): the limit if the spec sets it, else
    `USUAL_MEMORY_MIB` plus the weights in shards.
    """
    limit = spec.build.memory_mib
    if expectation is not None and expectation.seconds is not None:
        return min(limit, max(LEAST_MEMORY_MIB, math.ceil(HEADROOM * expectation.peak_mib)))
    usual_mib = USUAL_MEMORY_MIB + (shard_bytes >> 20)
    return limit if "memory_mib" in spec.build.model_fields_set else min(limit, usual_mib)


def reduce_workspace(build: BuildEngine) -> ReducedRequest[Recorded] | None:
    """The build for a second try after memory ran out, with half the compiler's scratch memory (in MiB), or
    `LEAN_WORKSPACE_MIB` if it had no limit; None if the backend has no option for it. It is another request, with
    another build key (`recall_reduced`)."""
    option = discovery.capabilities_of(build.request.backend).options.workspace_mib
    workspace = dict(build.request.options).get(option)
    if workspace is None:
        return None
    workspace_mib = max(1, int(workspace) // 2) if workspace else LEAN_WORKSPACE_MIB
    lean_request = build.request.with_option(option, workspace_mib)
    return ReducedRequest(BuildEngine(lean_request, instead_of=build.request), f"with {option} {workspace_mib}")


def recall_reduced(request: BuildRequest, context: RunContext) -> BuildRequest | None:
    """The request with a smaller workspace that was built in place of this one, which had run out of memory."""
    workspace_record = context.recall("reduced-workspace", {"build": request.key}, ReducedWorkspace)
    return workspace_record.request if workspace_record else None


def recall_engine(request: BuildRequest, context: RunContext) -> Recorded | None:
    """The engine on record for a build key; None where its blob is missing or cut, or the record cannot be read."""
    return context.recall("build", {"build": request.key}, Recorded, lambda record: record.sizes)
