"""The job that proves a compile cache again: its warm start, against a cold one on the same machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from builders.execution.jobs import WorkerContext
from enginesmith.compile_caches.archive import SUFFIX
from enginesmith.core.types import TensorSpec
from enginesmith.registry.store.base import open_store
from enginesmith.user_code.compiling import CompileModel
from pipeline.compile.caches.make_cache import describe, judge_start, start_cold, start_warm
from pipeline.compile.steps.blobs import fetch, golden_set
from pipeline.values import Proof


@dataclass(frozen=True)
class ProvenStart:
    """A cache's checks, and what both processes took, in words."""

    proof: Proof
    note: str


@dataclass(frozen=True)
class ProveCache:
    """Start a process out of the published cache, and a cold one: in this order, so that another model is told before
    anything is compiled, and so that the first reading of torch's files counts against the cache.

    model: its files on this machine.  cache, golden: digests.  outputs, limits: as of `MakeCache`.
    """

    model: CompileModel
    cache: str
    golden: str
    outputs: tuple[TensorSpec, ...]
    limits: Mapping[str, float]

    def run(self, context: WorkerContext) -> ProvenStart:
        """The checks. Raises EnginesmithError for another model than the cache was made from, and as `fetch`."""
        place, workdir = open_store(context.store), context.workdir
        golden = golden_set(place, self.golden, workdir)
        archive = fetch(place, self.cache, workdir / f"torch{SUFFIX}")
        from_cache = replace(self.model, cache=archive, digest=self.cache)
        warm, checks = start_warm(from_cache, self.outputs, golden, self.limits)
        cold = start_cold(self.model, self.outputs, golden, workdir)
        return ProvenStart(Proof((*checks, *judge_start(cold, warm))), describe(cold, warm))
