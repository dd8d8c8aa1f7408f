"""Measures a new engine beside a served one: answers, metrics, paired times."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.errors import EnginesmithError, InputError, SpecError
from enginesmith.core.reports.proof import Check, name_task_checks
from enginesmith.core.text import now
from enginesmith.core.types import PRECISIONS, BuildRequest, Precision, Session
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import open_store
from pipeline.compile.run_context import Work, fail_step
from pipeline.compile.steps.blobs import golden_set, open_session
from pipeline.compile.steps.keys import engine_limits, metrics_of, time_pair
from pipeline.operations.validate import spec_of
from pipeline.outcome import JudgedUnit, engine_of
from pipeline.regressions.findings import (
    AnswerDrift,
    BucketTimes,
    EnginePair,
    Finding,
    Key,
    MetricPair,
    RegressionCheck,
    ServedVersion,
    copy_engine,
)
from pipeline.spec.model import ModelSpec
from pipeline.values import EngineBlob
from validation.latency.machine import machine
from validation.limits.budget import at_most, default_budget
from validation.limits.terms import Budget
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSet

# The greatest loss of a task metric that passes: of shares and errors, of values in dB, and of a perplexity as a share.
LOSS, LOSS_DB, LOSS_PERPLEXITY = 0.005, 0.5, 0.01
SLOWER = 0.03

DriftRule = Literal["auto", "fail", "note"]


@dataclass(frozen=True)
class CheckOptions:
    """What counts as a regression. slower: the slowdown of the median that a new engine must be shown to exceed, as a
    share.

    worse: by task metric the greatest loss that passes, '' for all others; defaults as in `allowed_loss`.
    drift: whether other answers than the served ones are a regression; 'auto': where no task metric has a limit.
    seconds: of timing for each pair and bucket.  buckets: 'few', 'all', or texts as 'batch=8,length=64'.
    """

    slower: float = SLOWER
    worse: Mapping[str, float] = field(default_factory=dict)
    drift: DriftRule = "auto"
    seconds: float = 2.0
    buckets: Literal["few", "all"] | tuple[str, ...] = "few"

    def allowed_loss(self, name: str, old_value: float) -> float:
        """The greatest loss of a task metric that passes. name: 'accuracy', or 'accuracy of logits'."""
        value = name.partition(" of ")[0]
        for metric_name in (name, value, ""):
            if metric_name in self.worse:
                return self.worse[metric_name]
        if value.endswith("_db"):
            return LOSS_DB
        return LOSS_PERPLEXITY * abs(old_value) if value == "perplexity" else LOSS


def check_losses(worse: Mapping[str, float], metrics: Sequence[TaskMetric]) -> None:
    """Raise InputError where a loss is stated for a task metric that the spec does not have."""
    values = {(value, metric.output) for metric in metrics for value in metric.values}
    metric_names = {name for value, output in values for name in (value, f"{value} of {output}")}
    if unknown_names := sorted(name for name in worse if name and name not in metric_names):
        names_text = ", ".join(sorted({value for value, _ in values})) or "none"
        raise InputError(f"--worse {unknown_names[0]}: the spec has no such task metric; it has {names_text}")


def drift_budget(precisions: tuple[Precision, Precision], limits: Mapping[str, float]) -> Budget:
    """How far the answers of two engines may be apart: the documented limits of the precision that rounds more, with
    those that the spec sets for engines. Raises InputError as `Budget.override`."""
    usual_budgets = [default_budget("engine", precision) for precision in sorted(precisions, key=PRECISIONS.index)]
    return min(usual_budgets, key=lambda budget: budget.sqnr_db or 0.0).override(limits)


# The job that runs a new engine and a served one on the same golden set: how far apart their answers are at the ends
# of every bucket, and the task metrics of both.


@dataclass(frozen=True)
class ComparedAnswers:
    """The answers of two engines, compared. drift: the worst check of each case and output.  new, served: task metrics
    by name."""

    drift: tuple[AnswerDrift, ...]
    new: Mapping[str, float | None]
    served: Mapping[str, float | None]


@dataclass(frozen=True)
class CompareAnswers:
    """Run two engines on the golden set of this digest, which has a case at the ends of every bucket.

    limits: the spec's, of engines of this precision.  metrics: the spec's task metrics.
    """

    new: EngineBlob
    served: EngineBlob
    golden: str
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...]

    def run(self, context: WorkerContext) -> ComparedAnswers:
        """Their drift and metrics. Raises EnginesmithError where one cannot be opened, or the served one not be run."""
        from validation.comparison.sessions import drift_checks

        store = open_store(context.store)
        golden = golden_set(store, self.golden, context.workdir)
        budget = drift_budget((self.new.request.precision, self.served.request.precision), self.limits)
        folders = [context.workdir / name for name in ("new", "served")]
        for folder in folders:
            folder.mkdir()
        with (
            open_session(store, self.served, folders[1]) as old_session,
            open_session(store, self.new, folders[0]) as new_session,
        ):
            checks = drift_checks("engine", old_session, new_session, golden, budget)
            values = [_measure(session, golden, self.metrics) for session in (new_session, old_session)]
        return ComparedAnswers(tuple(worst_of(checks)), *values)


def _measure(session: Session, golden: "GoldenSet", metrics: Sequence[TaskMetric]) -> dict[str, float | None]:
    from validation.comparison.tasks import task_checks

    try:
        metric_checks = name_task_checks(task_checks(session, golden, metrics))
    except EnginesmithError:
        return {}
    return {name: check.value for name, check in metric_checks.items()}


def worst_of(checks: Sequence[Check]) -> list[AnswerDrift]:
    """Of each case and output the check that is furthest beyond its limit, or the nearest to it."""
    worst_checks: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = check.case, check.output
        if key not in worst_checks or _excess(check) > _excess(worst_checks[key]):
            worst_checks[key] = check
    return [
        AnswerDrift(check.case, check.output, check.name, check.value, check.limit, check.passed)
        for check in worst_checks.values()
    ]


def _excess(check: Check) -> tuple[bool, float]:
    """How far a check is beyond its limit, as a share of that; a failed one always outweighs one that passed."""
    if check.value is None or not check.limit:
        return not check.passed, -1.0 if check.passed else 1.0
    excess = check.value / check.limit if at_most(check.name) else 2.0 - check.value / check.limit
    return not check.passed, excess


# The lines of a spec that findings are about, and findings from the mistakes of a spec, which say their lines: also
# of a check that an error ended.

_LINE = re.compile(r"^(?P<path>.*?):(?P<line>\d+): (?P<text>.*)$", re.DOTALL)


def key_of(spec: ModelSpec, finding: Finding) -> Key:
    """The key of a spec that a finding is about: its precision or target, the golden set for what is about answers."""
    if finding.rule == "metric" and spec.golden:
        return ("golden", "metric")
    if finding.rule == "interface":
        return ("inputs",) if finding.message.startswith("its inputs") else ("outputs",)
    target, _, variant_text = finding.unit.partition(" ")
    precision = variant_text.partition(" ")[0]
    if finding.rule != "coverage" and precision in spec.precision_list():
        precision_list = list(spec.precisions) if isinstance(spec.precisions, tuple | list) else []
        return ("precisions", precision_list.index(precision)) if precision in precision_list else ("precisions",)
    names = list(spec.targets)
    return ("targets", names.index(target)) if target in names else ("targets",)


def ended_by(error: EnginesmithError, spec: str, options: CheckOptions) -> RegressionCheck:
    """The check of a spec that could not be read, built or compared: a finding for each mistake, with its line where
    the error says one."""
    findings = []
    for entry in error.lines if isinstance(error, SpecError) else [str(error)]:
        match = _LINE.match(entry) if isinstance(error, SpecError) else None
        line = int(match["line"]) if match else None
        findings.append(Finding("spec", "error", match["text"] if match else entry, line=line))
    return RegressionCheck(
        model=spec,
        spec=spec,
        against=None,
        channel=None,
        machine=machine(),
        created_at=now(),
        slower=options.slower,
        seconds=options.seconds,
        statuses={},
        pairs=(),
        findings=tuple(findings),
    )


@dataclass(frozen=True)
class PairMeasurement:
    """Measures pairs. work: of the new spec.  golden: digest of its golden set.  served: what they are compared with.
    options: what counts as a regression."""

    work: Work
    golden: str
    served: ServedVersion
    options: CheckOptions

    def measure(self, new: JudgedUnit, entry: EngineEntry, is_pulled: bool) -> EnginePair:
        """All measurements of a new engine and a served one; none if they have the same bytes. What one of the two
        cannot do is a remark. Raises errors that are not about the engines (`stops_run`).
        """
        unit, served_unit = new.built.unit.name, entry.unit
        if new.built.digest == entry.digest:
            return EnginePair(unit, served_unit, is_pulled, same=True)
        if difference := changed_interface(new.built.unit.request, entry):
            return EnginePair(unit, served_unit, is_pulled, remarks=(difference,))
        copy_engine(self.served, entry, self.work.context.store)
        blobs = new.built.blob, engine_of(entry)
        remarks: list[str] = []
        answers = self._compare_answers(unit, blobs, remarks)
        times = [self._time(unit, blobs, sizes, remarks) for sizes in self._sizes(remarks)]
        pair = EnginePair(unit, served_unit, is_pulled, times=tuple(filter(None, times)), remarks=tuple(remarks))
        if answers is None:
            return pair
        metrics = []
        for name, value in answers.new.items():
            served_value = answers.served.get(name)
            metrics.append(MetricPair(name, value, served_value, self.options.allowed_loss(name, served_value or 0.0)))
        return replace(pair, metrics=tuple(metrics), drift=answers.drift)

    def _compare_answers(
        self, unit: str, blobs: tuple[EngineBlob, EngineBlob], remarks: list[str]
    ) -> ComparedAnswers | None:
        precision = blobs[0].request.precision
        spec = self.work.spec
        limits, metrics = spec.validation.limits_for(precision, "engine"), metrics_of(spec, precision)
        request = CompareAnswers(*blobs, self.golden, limits, metrics)
        name, context = f"answers of {unit}", self.work.context
        job = Job(name, request, context.store.uri, engine_limits(self.work.spec, "proof"))
        try:
            return context.run_to_end(context.local, name, job)
        except EnginesmithError as error:
            remarks.append(self._remark(name, error))
            return None

    def _sizes(self, remarks: list[str]) -> list[Mapping[str, int]]:
        """The sizes to time at: those asked for that the served engine takes, too."""
        from validation.latency.measurement.loop import parse_sizes, sizes_of_buckets

        dims, bucket_choice = self.work.spec.named_dims(), self.options.buckets
        size_choices = (
            sizes_of_buckets(dims, bucket_choice)
            if isinstance(bucket_choice, str)
            else [parse_sizes(text, dims) for text in bucket_choice]
        )
        served_dims = {dim.name: dim for dim in spec_of(self.served.manifest).named_dims()}
        fitting_sizes: list[Mapping[str, int]] = []
        for sizes in size_choices:
            if all(name in served_dims and size in served_dims[name].sizes for name, size in sizes.items()):
                fitting_sizes.append(sizes)
            else:
                name = " ".join(f"{dim}={size}" for dim, size in sizes.items())
                remarks.append(
                    f"{name} is not served by {self.served.manifest.reference}, so it was timed against nothing"
                )
        return fitting_sizes

    def _time(
        self, unit: str, blobs: tuple[EngineBlob, EngineBlob], sizes: Mapping[str, int], remarks: list[str]
    ) -> BucketTimes | None:
        sizes_text = " ".join(f"{dim}={size}" for dim, size in sizes.items()) or "static"
        name = f"times of {unit} at {sizes_text}"
        try:
            benchmark = time_pair(name, blobs, self.golden, sizes, self.options.seconds, self.work)
        except EnginesmithError as error:
            remarks.append(self._remark(name, error))
            return None
        return BucketTimes.of(benchmark.bucket, benchmark, benchmark.surroundings.busy)

    def _remark(self, name: str, error: EnginesmithError) -> str:
        fail_step(name, error, self.work.context)
        return f"{name} could not be compared: {str(error).splitlines()[0]}"


def changed_interface(request: BuildRequest, entry: EngineEntry) -> str | None:
    """How the inputs and outputs of a new engine differ from a served one's, by name, dtype and number of axes; None
    where requests fit both."""
    plain_dtypes = {"float16": "float32"}  # an fp16 engine takes what the model takes, converted
    for role, new_specs, old_specs in (
        ("inputs", request.inputs, entry.inputs),
        ("outputs", request.outputs, entry.outputs),
    ):
        interfaces: Sequence[dict[str, str]] = [
            {spec.name: f"{plain_dtypes.get(spec.dtype, spec.dtype)} of {len(spec.shape)} axes" for spec in specs}
            for specs in (new_specs, old_specs)
        ]
        if interfaces[0] != interfaces[1]:
            side_texts = [", ".join(f"{name}: {kind}" for name, kind in side.items()) for side in interfaces]
            return f"its {role} are {side_texts[0]}; the served engine's are {side_texts[1]}"
    return None
