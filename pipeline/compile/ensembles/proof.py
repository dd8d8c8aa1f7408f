"""The step that proves an ensemble from end to end: its engines, one after the other, against its graphs in fp32."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builders.execution.jobs import Job, WorkerContext
from enginery.core.codec import encode
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.hardware.cuda import gpus
from enginery.core.reports.proof import Check
from enginery.core.text import now
from enginery.core.types import Precision, Session, TensorSpec
from enginery.registry.store.base import open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.ensembles.samples import LIMITS, ChainedGraph, WholeData, open_chain
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import open_session
from pipeline.compile.steps.keys import code_key
from pipeline.compile.steps.proofs import prove_or_crash
from pipeline.values import EngineBlob, Proof

if TYPE_CHECKING:
    from pipeline.spec.ensemble import EnsembleSpec
    from validation.golden.golden_set import GoldenSet

# The case of the checks of a whole of which one engine stands among graphs in fp32, after the graph's name.
ALONE = " alone"


@dataclass(frozen=True)
class ProveEnsemble:
    """Run the engines of an ensemble against its exported graphs, on the golden data of the whole. Then each engine
    alone among the graphs: which is to blame, measured and not judged.

    engines: by graph.  outputs: of the whole.  limits: what the spec says.
    """

    whole: WholeData
    graphs: tuple[ChainedGraph, ...]
    engines: Mapping[str, EngineBlob]
    outputs: tuple[TensorSpec, ...]
    precision: Precision
    limits: Mapping[str, float]

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises EngineryError for an engine that cannot be opened."""
        from validation.comparison.sessions import expected_checks
        from validation.limits.budget import default_budget
        from validation.metrics.tally import Spreads

        place, spreads = open_store(context.store), Spreads()
        budget = default_budget("engine", self.precision).override(dict(self.limits))
        golden = self._freeze(context)
        with ExitStack() as stack:
            opened = dict[str, Session]()
            for name, blob in self.engines.items():
                folder = context.workdir / f"engine-{name}"
                folder.mkdir()
                opened[name] = stack.enter_context(open_session(place, blob, folder))
            parts = self.graphs, self.whole.inputs, self.outputs, context.workdir
            with open_chain(place, *parts, opened) as chain:
                checks = expected_checks("engine", chain, golden, budget, spreads)
            for name, session in opened.items():
                with open_chain(place, *parts, {name: session}) as chain:
                    found = expected_checks("engine", chain, golden, budget)
                    checks += tuple(_unjudged(name, found))
        return Proof(checks, spreads=spreads.at("engine"))

    def _freeze(self, context: WorkerContext) -> "GoldenSet":
        from validation.golden.golden_set import Case, GoldenSet

        place, samples = open_store(context.store), self.whole.open()
        with open_chain(place, self.graphs, self.whole.inputs, self.outputs, context.workdir) as chain:
            groups = enumerate(samples.batches())
            return GoldenSet(tuple(Case(f"golden {at}", "golden", given, chain.run(given)) for at, given in groups))


def _unjudged(name: str, checks: Sequence[Check]) -> Iterator[Check]:
    for check in checks:
        if check.case == "golden" and check.value is not None:
            yield replace(check, case=f"{name}{ALONE}", limit=None, passed=True)


def blame(checks: Sequence[Check]) -> str:
    """What a failed check of the whole is with each engine alone: 'encoder alone 31.2, decoder alone 12.3'; '' where
    none failed, or none was measured."""
    failed = next((check for check in checks if not check.passed), None)
    if failed is None:
        return ""
    alike = (item for item in checks if (item.name, item.output) == (failed.name, failed.output))
    found = [f"{item.case} {item.value:.4g}" for item in alike if item.case.endswith(ALONE) and item.value is not None]
    return f"; with one engine among graphs in fp32: {', '.join(found)}" if found else ""


def limits_of(spec: "EnsembleSpec", precision: Precision) -> dict[str, float]:
    """The limits that the spec of an ensemble gives for a precision, as `ProveEnsemble` takes them."""
    limits = spec.limits.get(precision)
    return limits.model_dump(exclude_unset=True) if limits else {}


def prove(request: ProveEnsemble, unit: str, context: RunContext, afresh: bool = False) -> Proof:
    """The proof of an ensemble's engine; of one that cannot be opened or run, the one check `CRASHED`, which failed.

    afresh: also when the same proof is on record. Raises UnavailableError and IntegrityError, which say nothing about
    the engines, and StepError when cancelled.
    """
    backends = [backend_root(blob.request.backend) for blob in request.engines.values()]
    key = {
        **encode(request),
        "whole": request.whole.key,
        "machine": [this_kind().name, *sorted({gpu.name for gpu in gpus()})],
        **code_key(ProveEnsemble, *backends),
        **({"at": now()} if afresh else {}),
    }
    job = Job(f"prove {unit}", request, context.store.uri, LIMITS)
    return prove_or_crash("check-ensemble", key, job, context)
