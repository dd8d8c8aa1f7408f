"""The step that proves an ensemble from end to end: its engines, one after the other, against its graphs in fp32."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError, IntegrityError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.cuda import gpus
from enginesmith.core.reports.proof import Answers, Check
from enginesmith.core.text import now
from enginesmith.core.types import Precision, Session, TensorSpec
from enginesmith.registry.store.base import open_store
from pipeline.compile.closure.code import backend_root
from pipeline.compile.ensembles.stages import AMONG_SOURCES, Parts, Stages, fetch_sources, unjudged
from pipeline.compile.ensembles.whole import LIMITS, ChainedGraph, WholeData, open_chain, tensors_of
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.blobs import open_session, proof_of
from pipeline.compile.steps.keys import code_key
from pipeline.compile.steps.proofs import prove_or_crash
from pipeline.values import EngineBlob, Proof
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from builders.onnx_graphs.structure import Dependence
    from enginesmith.ensembles import Ensemble
    from pipeline.spec.ensembles.model import EnsembleSpec
    from validation.golden.golden_set import GoldenSet

# Suffix, after the graph's name, of the case of checks of one engine among graphs in fp32.
ALONE = " alone"
# The case of checks of functions that run on the engines' own answers.
FREE = "free running"
# Pads the labels of samples with fewer rows.
_FILLER = -1
_NOTE = "functions on the engines' own answers; whether these are right only a task metric can tell"


@dataclass(frozen=True)
class ProveEnsemble:
    """Run the engines of an ensemble against its exported graphs, by stages, on the ensemble's golden data. Then run
    each engine among the other exported graphs, to measure, not judge, which one causes the drift. After a function,
    which may cut other boxes out of a picture for the smallest drift, graphs are compared on its fp32 results.

    engines: by graph.  outputs: of the ensemble.  limits: the spec's, by stage.  metrics: of the ensemble's outputs;
    for these, functions run on each side's answers.  recorded: the engines' answers from elsewhere, which are judged
    instead of running them; None to run them.  whole: the golden data.  graphs: the exported graphs, in order."""

    whole: WholeData
    graphs: tuple[ChainedGraph, ...]
    engines: Mapping[str, EngineBlob]
    outputs: tuple[TensorSpec, ...]
    precision: Precision
    limits: Mapping[str, Mapping[str, float]]
    metrics: tuple[TaskMetric, ...] = ()
    recorded: Answers | None = None

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises EnginesmithError for an engine that cannot be opened, and IntegrityError for a recorded
        answer that is damaged or missing: it says nothing of the engines."""
        store = open_store(context.store)
        if self.recorded is not None:
            from validation.gpu.devices import replay_session

            engines = {name: replay_session(blob.request, self.recorded, name) for name, blob in self.engines.items()}
            proof = self.compare(engines, context, alone=False)
            if failed_runs := [check for check in proof.checks if check.name == "runs" and check.stage == "engine"]:
                raise IntegrityError(f"case {failed_runs[0].case!r}: {failed_runs[0].note}")
            return proof
        with ExitStack() as resources:
            sessions = dict[str, Session]()
            for name, blob in self.engines.items():
                folder = context.workdir / f"engine-{name}"
                folder.mkdir()
                sessions[name] = resources.enter_context(open_session(store, blob, folder))
            return self.compare(sessions, context)

    def compare(self, engines: Mapping[str, Session], context: WorkerContext, alone: bool = True) -> Proof:
        """The checks of sessions in the engines' place. alone: whether each is run among graphs in fp32 too."""
        from enginesmith.ensembles import call_rows
        from validation.comparison.sessions import expected_checks
        from validation.comparison.tasks import unmeasured_checks
        from validation.limits.budget import default_budget

        session_rows = dict[str, tuple[Session, range | None]]()
        for name, session in engines.items():
            request = self.engines[name].request
            session_rows[name] = session, call_rows(request.inputs, request.outputs, request.profiles)
        golden = self._freeze_steps(context) if self.whole.states else self._freeze(context)
        exported_digests = {graph.name: graph.model for graph in self.graphs}
        sources = fetch_sources(
            open_store(context.store), self.engines, exported_digests, session_rows, context.workdir
        )
        open_graphs = partial(self._open, context)
        stages = Stages(open_graphs, sources, self.precision, self.limits, self.metrics, context.workdir)
        proof = stages.checks(golden, session_rows, alone)
        checks = proof.checks
        for name, session_entry in session_rows.items() if alone else ():
            with self._open(context, {name: session_entry}) as chain:
                chain_checks = expected_checks("engine", chain, golden, default_budget("engine", self.precision))
            checks += tuple(unjudged(f"{name}{ALONE}", chain_checks))
        if self._functions:
            with self._open(context, session_rows, freely=True) as chain:
                checks += tuple(_free_running(chain, golden, self._given))
        if not self.metrics:
            return replace(proof, checks=checks)
        store, answers = open_store(context.store), golden if self.whole.states else self._answer(context)
        with open_chain(store, self.graphs, self.whole.inputs, self.outputs, context.workdir, session_rows) as chain:
            whole_proof = proof_of(checks, chain, answers, self.metrics, "engine", (proof.spreads, proof.free_running))
        boundary_names = {spec.name for spec in self._given}
        # Outputs of graphs are measured by the golden sets of these.
        dependences: dict[str, Dependence] = {
            spec.name: "handed on" for spec in self.outputs if spec.name not in boundary_names
        }
        return replace(
            whole_proof, checks=(*whole_proof.checks, *unmeasured_checks(answers, dependences, self.metrics))
        )

    @property
    def _functions(self) -> list[ChainedGraph]:
        return [graph for graph in self.graphs if graph.function]

    @property
    def _given(self) -> tuple[TensorSpec, ...]:
        return tensors_of(self._functions)

    @property
    def _compared(self) -> tuple[TensorSpec, ...]:
        """Outputs of graphs that the ensemble's outputs or functions read."""
        boundary_names = {spec.name for spec in self._given}
        function_sources = {source for graph in self._functions for source in graph.sources.values()}
        inner_specs = (spec for spec in tensors_of(self.graphs) if spec.name in function_sources)
        compared_specs = {spec.name: spec for spec in (*self.outputs, *inner_specs) if spec.name not in boundary_names}
        return tuple(compared_specs.values())

    def _open(self, context: WorkerContext, engines: Parts, freely: bool = False) -> "AbstractContextManager[Ensemble]":
        """The chain with engines in the place of graphs. Functions return their fp32 results, which come as inputs of
        the ensemble; with `freely` they run on the answers of these engines."""
        store, whole_inputs = open_store(context.store), self.whole.inputs
        if freely:
            return open_chain(store, self.graphs, whole_inputs, self._given, context.workdir, engines)
        graphs = [graph for graph in self.graphs if not graph.function]
        return open_chain(store, graphs, (*whole_inputs, *self._given), self._compared, context.workdir, engines)

    def _freeze(self, context: WorkerContext) -> "GoldenSet":
        """The ensemble's data with the fp32 results of functions and graphs. Raises DataError if functions return no
        row for any of it."""
        from validation.golden.golden_set import Case, GoldenSet

        store, samples, cases = open_store(context.store), self.whole.open(), list[Case]()
        outputs = (*self._compared, *self._given)
        with open_chain(store, self.graphs, self.whole.inputs, outputs, context.workdir) as chain:
            for batch_inputs in samples.batches():
                chain_outputs = chain.run(batch_inputs)
                inner_values = {spec.name: chain_outputs.pop(spec.name) for spec in self._given}
                if all(array.size for array in (*chain_outputs.values(), *inner_values.values())):
                    cases.append(
                        Case(f"golden {len(cases)}", "golden", {**batch_inputs, **inner_values}, chain_outputs)
                    )
        if not cases:
            raise DataError("no sample of golden.data gives each graph a row: functions between them returned none")
        return GoldenSet(tuple(cases))

    def _freeze_steps(self, context: WorkerContext) -> "GoldenSet":
        """The ensemble's steps with the states that the exported graphs pass on, in groups, and its sequences; with the
        results of the graphs, and labels. Raises DataError for data that is not sequences of steps."""
        from pipeline.sources.steps import StateModel
        from validation.golden.golden_set import Case, GoldenSet

        store, data = open_store(context.store), self.whole
        samples, order, steps = data.open_steps()
        labels = samples.column(data.labels) if data.labels else None
        with open_chain(store, self.graphs, data.inputs, self.outputs, context.workdir) as chain:
            model = StateModel(chain.run, data.inputs, data.dims, data.states, steps)
            groups, sequences, labels = model.freeze(samples, order, labels)
            cases = [
                Case(f"golden {group_index}", "golden", group_inputs, chain.run(group_inputs))
                for group_index, group_inputs in enumerate(groups)
            ]
        return GoldenSet(tuple(cases), labels, sequences=sequences)

    def _answer(self, context: WorkerContext) -> "GoldenSet":
        """The ensemble's data with its labels, and the fp32 results of graphs and functions."""
        from validation.golden.golden_set import Case, GoldenSet

        store, samples, cases = open_store(context.store), self.whole.open(), list[Case]()
        labels = samples.column(self.whole.labels) if self.whole.labels else None
        if labels is not None and self._functions and samples.complete and labels.ndim > 1:
            # Functions give a sample any number of rows, and axis 1 of the labels has as many as the greatest needs.
            rows = labels.reshape(-1, *labels.shape[2:])
            labels = rows[(rows != _FILLER).reshape(len(rows), -1).any(1)]
        with open_chain(store, self.graphs, self.whole.inputs, self.outputs, context.workdir) as chain:
            for batch_inputs in samples.batches():
                cases.append(Case(f"golden {len(cases)}", "golden", batch_inputs, chain.run(batch_inputs)))
        return GoldenSet(tuple(cases), labels)


def _free_running(chain: "Ensemble", golden: "GoldenSet", boundary: Sequence[TensorSpec]) -> Iterator[Check]:
    """The share of cases for which functions return as many rows as in fp32: measured, not judged."""
    input_names = [spec.name for spec in chain.inputs]
    case_inputs = [case.inputs for case in golden.cases]
    answers = [chain.run({name: inputs[name] for name in input_names}) for inputs in case_inputs]
    for name in (spec.name for spec in boundary):
        equal_shapes = [
            recorded_inputs[name].shape == rerun_outputs[name].shape
            for recorded_inputs, rerun_outputs in zip(case_inputs, answers, strict=True)
        ]
        yield Check("engine", "same_shape", name, FREE, sum(equal_shapes) / len(equal_shapes), None, True, _NOTE)


def blame(checks: Sequence[Check]) -> list[str]:
    """The first failed check's value for each engine alone: 'with one engine among graphs in fp32: encoder alone 31.2,
    decoder alone 12.3'; SQNR if the check has no such value; [] if no check failed, or nothing was measured."""
    failed_check = next((check for check in checks if not check.passed), None)
    if failed_check is None:
        return []
    comparisons = [(ALONE, "graphs in fp32"), (AMONG_SOURCES, "the graphs that they were built from")]
    part_checks = [
        check for check in checks if check.output == failed_check.output and check.case.endswith((ALONE, AMONG_SOURCES))
    ]
    # Other checks, as those of decisions, have no value for an engine alone.
    metric_name = failed_check.name if failed_check.name in {check.name for check in part_checks} else "sqnr_db"
    metric_checks = [check for check in part_checks if check.name == metric_name]
    for case, graphs in comparisons[:: -1 if failed_check.stage == "engine" else 1]:
        metric_values = (
            (check.case.removesuffix(case), check.value) for check in metric_checks if check.case.endswith(case)
        )
        if single_errors := [f"{name}{ALONE} {value:.4g}" for name, value in metric_values if value is not None]:
            return [f"with one engine among {graphs}: {', '.join(single_errors)}"]
    return []


def request_proof(
    spec: "EnsembleSpec",
    precision: Precision,
    engines: Mapping[str, EngineBlob],
    golden: WholeData,
    chain: tuple[ChainedGraph, ...],
    outputs: tuple[TensorSpec, ...],
) -> ProveEnsemble:
    """The request that proves the engines of a chain's graphs, with the limits and task metrics of the
    ensemble's spec."""
    limits, has_labels = spec.limits.get(precision), spec.golden.labels is not None
    stages = limits.model_dump(exclude_unset=True) if limits else {}
    metrics = tuple(metric.resolve(precision, has_labels) for metric in spec.golden.metrics)
    return ProveEnsemble(golden, chain, engines, outputs, precision, stages, metrics)


def prove(request: ProveEnsemble, unit: str, context: RunContext, afresh: bool = False) -> Proof:
    """The proof of an ensemble's engine; if it cannot be opened or run, a proof with the one failed check `CRASHED`.

    afresh: prove it even if the same proof is recorded. Raises UnavailableError and IntegrityError, whose cause
    is not the engines, and StepError when cancelled.
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
