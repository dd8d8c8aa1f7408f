"""The job that makes a compile cache of torch, and proves it: a second process, which starts out of it, gives right
answers, compiles nothing, and has its first answer in at most `MOST_RATIO` of what a cold one takes.

Both processes start as a server does: Python, torch, the model, torch.compile, the first call. They are compared by
their CPU seconds, which another load on the machine changes less; seconds of the clock stand beside them.
"""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginesmith.compile_caches.archive import SUFFIX, pack
from enginesmith.compile_caches.recipe import PRECISION
from enginesmith.core.errors import EnginesmithError, digest_of_file
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Target, TensorSpec
from enginesmith.registry.store.base import Store, open_store
from enginesmith.user_code.compiling import CompileModel
from pipeline.compile.caches.judged import MadeCache
from pipeline.compile.caches.maker import CPU_LABEL, describe_maker, explain_refusal, wanted_runtimes
from pipeline.compile.steps.blobs import golden_set
from pipeline.sources.user_process import CompiledSession

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSet

# Of the CPU seconds of a cold start.
MOST_RATIO = 0.3
# The folder of what a cold process compiles.
COLD = "inductor"


@dataclass(frozen=True)
class MakeCache:
    """Compile a model in a cold process, keep what it compiled, and start a second one from that.

    model: what both do, without the places of a cache.  outputs: names, in the order of the golden set.
    limits: what the spec says of drift.  runtimes: versions that the worker must have.
    sources: files of the model by their name below its folder, and their digests, where that folder is on another
    machine; else none.
    """

    model: CompileModel
    target: Target
    golden: str
    outputs: tuple[TensorSpec, ...]
    limits: Mapping[str, float]
    runtimes: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)

    def run(self, context: WorkerContext) -> MadeCache:
        """The cache. Raises ModelError for a model that torch.compile cannot compile, EnginesmithError on a machine
        that makes no cache for the target."""
        place, workdir = open_store(context.store), context.workdir
        check_worker(self.target, self.runtimes)
        enter_phase("fetching")
        frozen = golden_set(place, self.golden, workdir)
        model = replace(self.model, root=fetch_sources(place, self.sources, workdir)) if self.sources else self.model
        archive = workdir / f"torch{SUFFIX}"
        cold = start_cold(model, self.outputs, frozen, workdir)
        pack(workdir / COLD, replace(cold.recipe, probes=cold.answers[-1].probes), archive)
        digest = digest_of_file(archive)
        warm, checks = start_warm(replace(model, cache=archive, digest=digest), self.outputs, frozen, self.limits)
        enter_phase("storing")
        maker = describe_maker(self.target)
        checks += tuple(judge_start(cold, warm))
        return MadeCache(place.put_file(archive), archive.stat().st_size, checks, (describe(cold, warm),), maker)


def start_cold(
    model: CompileModel, outputs: tuple[TensorSpec, ...], golden: "GoldenSet", workdir: Path
) -> CompiledSession:
    """A process that has compiled the model at every size of the golden set, and ended. What it compiled is in the
    folder `COLD` of `workdir`."""
    enter_phase("cold start")
    folder = workdir / COLD
    folder.mkdir()
    with CompiledSession(replace(model, folder=folder), outputs) as cold:
        _run_all(cold, golden)
    return cold


def start_warm(
    model: CompileModel, outputs: tuple[TensorSpec, ...], golden: "GoldenSet", limits: Mapping[str, float]
) -> tuple[CompiledSession, tuple[Check, ...]]:
    """A process that has started out of a cache, and ended, with the checks of its answers. model: with the cache."""
    from validation.comparison.sessions import expected_checks
    from validation.limits.budget import budgets

    enter_phase("warm start")
    with CompiledSession(model, outputs) as warm:
        _run_all(warm, golden)
        held = budgets("engine", PRECISION, golden.noise).override(limits)
        return warm, tuple(expected_checks("engine", warm, golden, held))


def check_worker(target: Target, runtimes: Mapping[str, str]) -> None:
    """Raise EnginesmithError where this machine makes no cache for `target`, or has other versions than `runtimes`."""
    if reason := explain_refusal(target):
        raise EnginesmithError(f"{platform.node()}: {reason} (a node of a kind of CPU has the label {CPU_LABEL}=KIND)")
    here = wanted_runtimes()
    if here != runtimes:
        raise EnginesmithError(
            f"{platform.node()} has {here or 'no torch'}, and the plan was made for {dict(runtimes)}; install the same "
            "versions on every node"
        )


def fetch_sources(place: Store, sources: Mapping[str, str], workdir: Path) -> Path:
    """A folder with the model's files. sources: name below it -> digest."""
    folder = workdir / "source"
    for name, digest in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        place.fetch(digest, path)
    return folder


def _run_all(session: CompiledSession, golden: "GoldenSet") -> None:
    """Call the model at every size that the golden set has."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for case in golden.cases:
        shapes = tuple(array.shape for array in case.inputs.values())
        if shapes not in seen:
            session.run(case.inputs)
        seen.add(shapes)


def judge_start(cold: CompiledSession, warm: CompiledSession) -> Iterator[Check]:
    """Whether the warm process compiled nothing, and was as much quicker as it must."""
    case = "the first answer of a process"
    ratio = warm.answers[0].cpu_s / cold.answers[0].cpu_s
    wall = warm.answers[0].wall_s / cold.answers[0].wall_s
    note = "" if ratio <= MOST_RATIO else f"{describe(cold, warm)}; no cache saves the imports and the tracing"
    yield Check("engine", "warm start, CPU time", "", case, ratio, MOST_RATIO, ratio <= MOST_RATIO, note)
    yield Check("engine", "warm start, clock", "", case, wall, None, True)
    last, missed = warm.answers[-1], sum(warm.answers[-1].misses.values())
    words = ", ".join(f"{count} {kind}" for kind, count in last.misses.items())
    yield Check("engine", "compiled again", "", "every size", missed, 0, missed == 0, words)
    # Both were called at the same sizes first, in the same order.
    more = last.frames - cold.answers[-1].frames
    yield Check("engine", "recompilations", "", "every size", more, 0, more <= 0)


def describe(cold: CompiledSession, warm: CompiledSession) -> str:
    """What both processes took to their first answers, in words."""

    def words(session: CompiledSession) -> str:
        first = session.answers[0]
        return f"{first.cpu_s:.1f} CPU seconds ({first.wall_s:.1f} s)"

    return f"first answer of a process: cold {words(cold)}, warm {words(warm)}"
