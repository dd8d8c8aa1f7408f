"""Measures a new engine beside a served one: answers, task metrics, and paired times at each bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from builders.execution.jobs import Job, Needs
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.latency import PairedBenchmark
from enginesmith.core.types import BuildRequest
from enginesmith.registry.manifest import EngineEntry, request_of
from pipeline.compile.run_context import Work, stops_run
from pipeline.compile.steps.keys import engine_limits, limits_of, metrics_of, model_shapes
from pipeline.compile.steps.latency import BenchmarkPair
from pipeline.operations.revalidate import spec_of
from pipeline.outcome import JudgedUnit
from pipeline.progress.events import Finished
from pipeline.regressions.answers import CompareAnswers, ComparedAnswers
from pipeline.regressions.findings import BucketTimes, EnginePair, MetricPair
from pipeline.regressions.served import ServedVersion, copy_engine
from pipeline.regressions.thresholds import CheckOptions
from pipeline.values import EngineBlob


@dataclass(frozen=True)
class PairMeasurement:
    """Measures pairs. work: of the new spec.  golden: digest of its golden set.  served: what they are compared
    with."""

    work: Work
    golden: str
    served: ServedVersion
    options: CheckOptions

    def measure(self, new: JudgedUnit, entry: EngineEntry, pulled: bool) -> EnginePair:
        """All that is measured of a new engine and a served one; nothing where they have the same bytes.

        What one of the two cannot do is a remark. Raises what says nothing about the engines (`stops_run`).
        """
        unit, against = new.built.unit.name, entry.unit
        if new.built.digest == entry.digest:
            return EnginePair(unit, against, pulled, same=True)
        if changed := changed_interface(new.built.unit.request, entry):
            return EnginePair(unit, against, pulled, remarks=(changed,))
        copy_engine(self.served, entry, self.work.context.store)
        blobs = new.built.blob, EngineBlob(request_of(entry), str(entry.digest), str(entry.suffix))
        remarks: list[str] = []
        answers = self._compare_answers(unit, blobs, remarks)
        times = [found for sizes in self._sizes(remarks) if (found := self._time(unit, blobs, sizes, remarks))]
        return EnginePair(
            unit,
            against,
            pulled,
            metrics=tuple(self._pair_metrics(answers)) if answers else (),
            drift=answers.drift if answers else (),
            times=tuple(times),
            remarks=tuple(remarks),
        )

    def _compare_answers(
        self, unit: str, blobs: tuple[EngineBlob, EngineBlob], remarks: list[str]
    ) -> ComparedAnswers | None:
        precision = blobs[0].request.precision
        limits, metrics = limits_of(self.work.spec, precision, "engine"), metrics_of(self.work.spec, precision)
        request = CompareAnswers(*blobs, self.golden, limits, metrics)
        name = f"answers of {unit}"
        job = Job(name, request, self.work.context.store.uri, engine_limits(self.work.spec, "proof"))
        try:
            found = self.work.context.run_job(self.work.context.local, name, job)
        except EnginesmithError as error:
            remarks.append(self._remark(name, error))
            return None
        self.work.context.progress.emit(Finished(name))
        return found

    def _pair_metrics(self, answers: ComparedAnswers) -> list[MetricPair]:
        found = []
        for name, new in answers.new.items():
            served = answers.served.get(name)
            found.append(MetricPair(name, new, served, self.options.allowed_loss(name, served or 0.0)))
        return found

    def _sizes(self, remarks: list[str]) -> list[Mapping[str, int]]:
        """The sizes to time at: those asked for that the served engine takes, too."""
        from validation.latency.measurement.buckets import parse_sizes, sizes_of_buckets

        dims, asked = self.work.spec.named_dims(), self.options.buckets
        wanted = (
            sizes_of_buckets(dims, asked) if isinstance(asked, str) else [parse_sizes(text, dims) for text in asked]
        )
        before = {dim.name: dim for dim in spec_of(self.served.manifest).named_dims()}
        kept: list[Mapping[str, int]] = []
        for sizes in wanted:
            if all(name in before and size in before[name].sizes for name, size in sizes.items()):
                kept.append(sizes)
            else:
                name = " ".join(f"{dim}={size}" for dim, size in sizes.items())
                remarks.append(f"{name} is not served by {self.served.name}, so it was timed against nothing")
        return kept

    def _time(
        self, unit: str, blobs: tuple[EngineBlob, EngineBlob], sizes: Mapping[str, int], remarks: list[str]
    ) -> BucketTimes | None:
        request = BenchmarkPair(
            *blobs, self.golden, model_shapes(self.work.spec), sizes, self.options.seconds, self.options.seed
        )
        at = " ".join(f"{dim}={size}" for dim, size in sizes.items()) or "static"
        name = f"times of {unit} at {at}"
        job = Job(
            name, request, self.work.context.store.uri, engine_limits(self.work.spec, "latency"), Needs(alone=True)
        )
        try:
            found = self.work.context.run_job(self.work.context.local, name, job)
        except EnginesmithError as error:
            remarks.append(self._remark(name, error))
            return None
        self.work.context.progress.emit(Finished(name, words=found.verdict))
        return times_of(found)

    def _remark(self, name: str, error: EnginesmithError) -> str:
        if stops_run(error):
            raise error
        first = str(error).splitlines()[0]
        self.work.context.progress.emit(Finished(name, "failed", first))
        return f"{name} could not be compared: {first}"


def times_of(found: PairedBenchmark) -> BucketTimes:
    """What a check keeps of a paired benchmark, of which the new engine is the first."""
    middle = next(item for item in found.ratios if item.p == 0.5)
    interval = middle.ratio, middle.low, middle.high, middle.detectable
    return BucketTimes(found.bucket, *found.medians_s, *interval, found.runs, found.surroundings.busy)


def changed_interface(request: BuildRequest, entry: EngineEntry) -> str | None:
    """How the inputs and outputs of a new engine differ from a served one's, by name, dtype and number of axes; None
    where requests fit both."""
    for what, new, old in (("inputs", request.inputs, entry.inputs), ("outputs", request.outputs, entry.outputs)):
        sides: Sequence[dict[str, str]] = [
            {spec.name: f"{_plain(spec.dtype)} of {len(spec.shape)} axes" for spec in each} for each in (new, old)
        ]
        if sides[0] != sides[1]:
            told = [", ".join(f"{name}: {kind}" for name, kind in side.items()) for side in sides]
            return f"its {what} are {told[0]}; the served engine's are {told[1]}"
    return None


def _plain(dtype: str) -> str:
    """float32 for float16: an fp16 engine takes what the model takes, converted."""
    return "float32" if dtype == "float16" else dtype
