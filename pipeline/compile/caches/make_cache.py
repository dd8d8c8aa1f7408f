"""The job that makes a compile cache of torch, and proves it: a second process, which starts out of it, gives right
answers, compiles nothing, and has its first answer in at most `MOST_RATIO` of what a cold one takes.

Both processes start as a server does: Python, torch, the model, torch.compile, the first call. They are compared by
their CPU seconds, which another load on the machine changes less; seconds of the clock stand beside them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginery.compile_caches.archive import SUFFIX, pack
from enginery.core.digest import digest_of_file
from enginery.core.reports.proof import Check
from enginery.core.types import Precision, TensorSpec
from enginery.registry.store.base import open_store
from enginery.user_code.compiling import CompileModel
from pipeline.compile.steps.blobs import golden_set
from pipeline.sources.compiled_session import CompiledSession

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSet

PRECISION: Precision = "fp32"
# Of the CPU seconds of a cold start.
MOST_RATIO = 0.3


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
        with CompiledSession(replace(self.model, folder=folder), self.outputs) as cold:
            _run_all(cold, frozen)
        pack(folder, replace(cold.recipe, probes=cold.answers[-1].probes), archive)
        digest = digest_of_file(archive)
        enter_phase("warm start")
        with CompiledSession(replace(self.model, cache=archive, digest=digest), self.outputs) as warm:
            _run_all(warm, frozen)
            limits = budgets("engine", PRECISION, frozen.noise).override(self.limits)
            checks = tuple(expected_checks("engine", warm, frozen, limits))
        enter_phase("storing")
        checks += tuple(judge_start(cold, warm))
        return MadeCache(place.put_file(archive), archive.stat().st_size, checks, (_describe(cold, warm),))


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
