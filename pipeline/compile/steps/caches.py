"""The step that makes a compile cache of torch, and proves it: a second process, which starts out of it, gives right
answers, compiles nothing, and has its first answer in at most `MOST_RATIO` of what a cold one takes.

Both processes start as a server does: Python, torch, the model, torch.compile, the first call. They are compared by
their CPU seconds, which another load on the machine changes less; seconds of the clock stand beside them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from builders.backends.installed import versions_of
from builders.execution.jobs import Job, WorkerContext
from builders.execution.process import enter_phase
from enginery.compile_caches.archive import SUFFIX, pack
from enginery.compile_caches.recipe import CacheRecipe, CompileOptions
from enginery.core.codec import encode
from enginery.core.digest import digest_of, digest_of_file
from enginery.core.errors import EngineryError, InputError, ModelError
from enginery.core.hardware import cuda
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.installation import list_facts
from enginery.core.hardware.machine import describe_host
from enginery.core.reports.proof import Approved, Check, Report, approve, judge
from enginery.core.requirements import Installation, Requirement, for_target, same_versions, to_json
from enginery.core.text import now
from enginery.core.types import CPU_KIND, Precision, Session, Target, Tensors, TensorSpec
from enginery.registry.manifest import EngineEntry
from enginery.registry.store.base import open_store
from enginery.user_code.compiling import CompileModel, RanCompiled, RunCompiled
from enginery.user_code.task import Task
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.blobs import golden_set
from pipeline.compile.steps.exports import source_digests
from pipeline.compile.steps.keys import code_key, engine_limits, limits_of
from pipeline.progress.events import VerdictReached
from pipeline.sources.user_process import UserProcess, start_user_process
from pipeline.values import Exported

if TYPE_CHECKING:
    from pipeline.compile.plan import Selection
    from pipeline.spec.model import ModelSpec
    from validation.golden.golden_set import GoldenSet

BACKEND = "torch-compile"
PRECISION: Precision = "fp32"
# Of the CPU seconds of a cold start.
MOST_RATIO = 0.3
_RUNTIMES = ("torch", "triton")


@dataclass(frozen=True)
class MadeCache:
    """A cache in the store, with the checks of the process that started from it. digest, size_bytes: of its file.

    notes: what both processes used.
    """

    digest: str
    size_bytes: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class MakeCache:
    """Compile a model in a cold process, keep what it compiled, and start a second one from that.

    model: what both do, without the places of a cache.  outputs: names, in the order of the golden set.
    limits: what the spec says of drift.
    """

    model: CompileModel
    golden: str
    outputs: tuple[TensorSpec, ...]
    limits: Mapping[str, float]

    def run(self, context: WorkerContext) -> MadeCache:
        """The cache. Raises ModelError for a model that torch.compile cannot compile."""
        from validation.comparison.sessions import expected_checks
        from validation.limits.budget import budgets

        place, workdir = open_store(context.store), context.workdir
        frozen = golden_set(place, self.golden, workdir)
        folder, archive = workdir / "inductor", workdir / f"torch{SUFFIX}"
        folder.mkdir()
        enter_phase("cold start")
        with self._start(replace(self.model, folder=folder)) as cold:
            _run_all(cold, frozen)
        pack(folder, cold.recipe, archive)
        digest = digest_of_file(archive)
        enter_phase("warm start")
        with self._start(replace(self.model, cache=archive, digest=digest)) as warm:
            _run_all(warm, frozen)
            limits = budgets("engine", PRECISION, frozen.noise).override(self.limits)
            checks = tuple(expected_checks("engine", warm, frozen, limits))
        enter_phase("storing")
        checks += tuple(_judge_start(cold, warm))
        return MadeCache(place.put_file(archive), archive.stat().st_size, checks, (_describe(cold, warm),))

    def _start(self, model: CompileModel) -> "CompiledSession":
        return CompiledSession(model, self.outputs)


class CompiledSession(Session):
    """A model that a process of its own compiles, from `with` on. answers: what the process told of each call."""

    def __init__(self, model: CompileModel, outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.outputs = (), outputs
        self.answers: list[RanCompiled] = []
        self._starting = start_user_process(Task(model))
        self._model = model

    def __enter__(self) -> "CompiledSession":
        self._process: UserProcess = self._starting.__enter__()
        self.recipe, _ = self._process.ask(Task(self._model), CacheRecipe)
        return self

    def __exit__(self, *given: object) -> None:
        self._starting.__exit__(None, None, None)

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """The outputs, by the names that the golden set has. Raises ModelError where the model fails."""
        answer, arrays = self._process.ask(RunCompiled(), RanCompiled, inputs)
        self.answers.append(answer)
        if len(arrays) != len(self.outputs):
            raise ModelError(f"the model gives {len(arrays)} outputs, and {len(self.outputs)} as it was exported")
        return dict(zip((spec.name for spec in self.outputs), arrays.values(), strict=True))


def _run_all(session: CompiledSession, golden: "GoldenSet") -> None:
    """Call the model at every size that the golden set has."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for case in golden.cases:
        shapes = tuple(array.shape for array in case.inputs.values())
        if shapes not in seen:
            session.run(case.inputs)
        seen.add(shapes)


def _judge_start(cold: CompiledSession, warm: CompiledSession) -> Iterator[Check]:
    """Whether the warm process compiled nothing, and was as much quicker as it must."""
    case = "from the start of the process to its first answer"
    ratio = warm.answers[0].cpu_s / cold.answers[0].cpu_s
    wall = warm.answers[0].wall_s / cold.answers[0].wall_s
    yield Check("engine", "warm start, CPU time", "", case, ratio, MOST_RATIO, ratio <= MOST_RATIO)
    yield Check("engine", "warm start, clock", "", case, wall, None, True)
    last, missed = warm.answers[-1], sum(warm.answers[-1].misses.values())
    words = ", ".join(f"{count} {kind}" for kind, count in last.misses.items())
    yield Check("engine", "compiled again", "", "every size", missed, 0, missed == 0, words)
    # Both were called at the same sizes first, in the same order.
    more = last.frames - cold.answers[-1].frames
    yield Check("engine", "recompilations", "", "every size", more, 0, more <= 0)


def _describe(cold: CompiledSession, warm: CompiledSession) -> str:
    def words(session: CompiledSession) -> str:
        first = session.answers[0]
        return f"{first.cpu_s:.1f} CPU seconds ({first.wall_s:.1f} s)"

    return f"first answer of a process: cold {words(cold)}, warm {words(warm)}"


@dataclass(frozen=True)
class JudgedCache:
    """A unit that is a compile cache. entry: as the manifest has it.  proof: of one that may be published."""

    entry: EngineEntry
    proof: Approved | None = None


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
    if reason := _refusal(target):
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


def _refusal(target: Target) -> str | None:
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
