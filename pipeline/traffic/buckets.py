"""From a spec and traffic to buckets: the engine is timed, the spec is edited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.latency import BucketLatency, LatencyReport, LatencyTerms
from enginesmith.core.text import format_bytes
from enginesmith.registry.evidence.latencies import latencies
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.composition import Run
from pipeline.compile.plan import candidates
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.engines import build, recall_engine
from pipeline.compile.steps.keys import measure_now
from pipeline.operations.validate import spec_of
from pipeline.outcome import engine_of
from pipeline.spec.model import ModelSpec, rewrite_spec
from pipeline.spec.sections import server_backends
from pipeline.traffic.choice import DAY_S, MOST_PROFILES, BucketChoice, Measure, choose_buckets
from pipeline.traffic.place import BucketOptions, SplitTrace, TrafficAtPlace, plan_task
from pipeline.values import EngineBlob, Recorded, Selection
from validation.plotting import seconds_text


@dataclass(frozen=True)
class EngineTimer:
    """Times an engine. name: of it, for people.  spec: the one it was built from.  golden: digest of the set that its
    inputs are made from.  build_s: seconds that its compiler took for each profile; None where that is not on record.
    context: of the run."""

    name: str
    engine: EngineBlob
    golden: str
    spec: ModelSpec
    build_s: float | None
    context: RunContext

    @classmethod
    def of_published(cls, engine_choice: ChosenEngine, context: RunContext) -> "EngineTimer":
        """A timer of an engine of a published version."""
        manifest, engine = engine_choice.manifest, engine_of(engine_choice.entry)
        name = f"{manifest.reference} {engine_choice.entry.unit}"
        record = recall_engine(engine.request, context)
        return cls(name, engine, manifest.golden, spec_of(manifest), _for_each(record, engine), context)

    @classmethod
    def of_graph(cls, work: Work) -> "EngineTimer":
        """Of the spec's fp32 graph, built for this CPU unless that is on record.

        Raises EnginesmithError where it cannot be built, InputError where no backend builds it for this CPU.
        """
        spec, context = work.spec, work.context
        plain_spec = spec.model_copy(update={"targets": ("cpu",), "precisions": ("fp32",)})
        selection = Selection(tuple(parse_targets("cpu")), ("fp32",))
        if not candidates(plain_spec, selection):
            plain_spec = plain_spec.model_copy(update={"backends": server_backends(None)})
        run = Run(plain_spec, context, selection)
        batches = list(run.prepare())
        units = [unit for batch in batches for unit in batch.plan.units]
        for unit in units:
            if unit.action in ("build", "cached"):
                build_result = build(unit, run)
                if build_result.failure:
                    raise EnginesmithError(f"{unit.name} cannot be built: {build_result.failure.reason}")
                seconds = _for_each(build_result.record, build_result.blob)
                return cls(unit.name, build_result.blob, batches[-1].exported.golden, plain_spec, seconds, context)
        reasons = "; ".join(unit.reason for unit in units)
        raise InputError(f"no fp32 engine of {spec.model} can be timed here: {reasons}; give --engine REF")

    def measure(self, sizes: Sequence[Mapping[str, int]], seconds: float) -> LatencyReport:
        """The latency report of the engine at these sizes. seconds: of timing for each."""
        terms = LatencyTerms(seconds, tuple(dict(size_set) for size_set in sizes))
        return measure_now(f"time {self.name}", self.engine, self.golden, terms, Work(self.spec, self.context))


def _for_each(record: Recorded | None, engine: EngineBlob) -> float | None:
    """Seconds that the compiler took for each profile of an engine; None where that is not on record."""
    return None if record is None else record.seconds / max(len(engine.request.profiles), 1)


def recorded_report(engine: ChosenEngine, context: RunContext) -> LatencyReport:
    """The newest latency report of an engine of a version. Raises InputError without one."""
    manifest, entry = engine.manifest, engine.entry
    reports = latencies(context.store, manifest).get(str(entry.digest), [])
    if not reports:
        name = manifest.reference
        raise InputError(
            f"{name}: no latency report of {entry.unit} is recorded; request one with validation.latency in the spec, "
            f"or time the engine now: --engine {name}"
        )
    return reports[0]


# Share of the time from which on an engine counts as always busy.
_ALWAYS_BUSY = 0.99


@dataclass(frozen=True)
class ProfilePrice:
    """The price of one more profile. seconds_a_day: in engine seconds per day.  words: what it is computed from."""

    seconds_a_day: float
    words: str


@dataclass(frozen=True)
class BucketAdvice:
    """Buckets that are advised for a model. engine: whose times were used.  remarks: on the traffic, and the reasons
    why the machine counts as busy."""

    model: str
    engine: str
    choice: BucketChoice
    price: ProfilePrice
    remarks: tuple[str, ...]


def advise_buckets(
    work: Work,
    traffic: TrafficAtPlace,
    split: SplitTrace,
    options: BucketOptions,
    engine: ChosenEngine | None = None,
    recorded: bool = False,
) -> BucketAdvice:
    """The buckets of least cost for a spec's dims. split: the traffic within them.

    engine: of a version, which is timed; None for the spec's fp32 graph.  recorded: use its latency report instead.
    Raises InputError and DataError for options, traffic and times that do not fit, and what timing raises.
    """
    spec = work.spec
    task = plan_task(spec.tensors(), spec.named_dims(), traffic, split.within, options)
    timer = EngineTimer.of_published(engine, work.context) if engine else EngineTimer.of_graph(work)
    reports: list[LatencyReport] = []

    def measure(sizes: Sequence[Mapping[str, int]]) -> Sequence[BucketLatency]:
        reports.append(timer.measure(sizes, options.timing_s))
        return reports[-1].buckets

    measure_more: Measure | None = measure
    if engine and recorded:
        reports.append(recorded_report(engine, work.context))
        measure_more = None
    else:
        measure(task.first_sizes())
    price = price_profile(reports[0], timer.build_s, options.profile_price_s)
    max_profiles = options.max_profiles or MOST_PROFILES
    choice = choose_buckets(task, reports[0].buckets, measure_more, max_profiles, price.seconds_a_day)
    busy_reasons = tuple(dict.fromkeys(reason for report in reports for reason in report.busy))
    notes = (f"the machine was busy while the engine was timed: {'; '.join(busy_reasons)}",) if busy_reasons else ()
    return BucketAdvice(spec.model, timer.name, choice, price, (*task.remarks, *remark_on_load(choice), *notes))


def remark_on_load(choice: BucketChoice) -> tuple[str, ...]:
    """A remark where the engine has no time left, so that batches are as full as they can be whatever the buckets."""
    if (choice.plans[0].utilization or 0.0) < _ALWAYS_BUSY:
        return ()
    return ("one engine cannot carry this rate: it is always busy; give --rate for what one machine gets",)


def price_profile(report: LatencyReport, build_s: float | None, stated_price: float | None) -> ProfilePrice:
    """What a profile costs in a day: as given, else its build, once a day, and its share of this machine's memory, as a
    share of the day.

    Its memory is what the largest run needs beside the loaded engine, as a profile has buffers of its own; where that
    was not measured, and for a build that is not on record, 0. build_s: seconds of compiling for each profile.
    """
    if stated_price is not None:
        return ProfilePrice(stated_price, "as given")
    peak_bytes = max(bucket.memory_bytes for bucket in report.buckets)
    memory_bytes = max(peak_bytes - report.loaded_bytes, 0) if report.memory_resettable else 0
    share = memory_bytes / psutil.virtual_memory().total
    build_text = "no build on record" if build_s is None else f"{seconds_text(build_s)} of compiling a day"
    price_text = f"{build_text}, {format_bytes(memory_bytes)} of this machine's memory ({100 * share:.2g} % of it)"
    return ProfilePrice((build_s or 0.0) + share * DAY_S, price_text)


# The keys that buckets replace.
_REPLACED = ("buckets", "max", "opt")


def write_buckets(path: Path, edges: Mapping[str, Sequence[int]]) -> None:
    """Set `dims.*.buckets` in a spec's file. edges: of each dim, rising.

    The file is replaced (atomic write) only when the changed text reads as meant. Raises InputError where it would not.
    """
    text = path.read_text(encoding="utf-8")
    for dim, sizes in edges.items():
        text = _with_buckets(text, dim, sizes, path)
    if not rewrite_spec(path, text, lambda old, new: _rest(new, {}) == _rest(old, edges)):
        raise _misplaced(path, edges)


def _rest(spec: ModelSpec, edges: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """A spec's content with buckets of these edges."""
    spec_fields = spec.model_dump()
    for dim, sizes in edges.items():
        spec_fields["dims"][dim] |= {"opt": None, "max": None, "buckets": tuple(sizes)}
    return spec_fields


def _with_buckets(text: str, dim: str, sizes: Sequence[int], path: Path) -> str:
    """The text with the buckets in the place of the dim's `buckets`, else of its `max`; `opt` is taken out."""
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("dims", dim):
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in entries if name.value == key), None)
    if not isinstance(node, yaml.MappingNode):
        raise _misplaced(path, {dim: sizes})
    yaml_entries = {key.value: (key, value) for key, value in node.value}
    old_key = next((name for name in _REPLACED if name in yaml_entries), None)
    if old_key is None:
        raise _misplaced(path, {dim: sizes})
    changes = [(*_span(*yaml_entries[old_key]), f"buckets: [{', '.join(map(str, sizes))}]")]
    changes += [(*_removed(text, node, name), "") for name in _REPLACED if name in yaml_entries and name != old_key]
    for start, end, new_text in sorted(changes, reverse=True):
        text = text[:start] + new_text + text[end:]
    return text


def _span(key: yaml.Node, value: yaml.Node) -> tuple[int, int]:
    """Where a pair stands. For YAML a block sequence ends behind the comments that follow: its last item counts."""
    last_node = value.value[-1] if isinstance(value, yaml.SequenceNode) and not value.flow_style else value
    return key.start_mark.index, last_node.end_mark.index


def _removed(text: str, node: yaml.MappingNode, name: str) -> tuple[int, int]:
    """The text to cut for a removed pair: of a flow mapping with a comma, of a block its lines."""
    index = next(index for index, (key, _) in enumerate(node.value) if key.value == name)
    start, end = _span(*node.value[index])
    if node.flow_style:
        if index + 1 < len(node.value):
            return start, node.value[index + 1][0].start_mark.index
        return _span(*node.value[index - 1])[1], end
    if index == 0:
        return start, node.value[1][0].start_mark.index
    line_end = text.find("\n", end)
    return text.rfind("\n", 0, start), len(text) if line_end < 0 else line_end


def _misplaced(path: Path, edges: Mapping[str, Sequence[int]]) -> InputError:
    lines = "; ".join(f"under dims.{dim}: buckets: [{', '.join(map(str, ends))}]" for dim, ends in edges.items())
    return InputError(f"{path}: the file cannot be edited automatically; write {lines}")
