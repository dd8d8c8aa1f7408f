"""Rehearses an upgrade: builds served engines with another toolchain, and proves and times both beside each other."""

import json
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TextIO

from builders.backends import discovery
from builders.backends.discovery import open_engine, toolchain_of
from builders.execution.environments import plain_name
from builders.execution.jobs import Job, Needs, Request, WorkerContext
from builders.execution.local import workdir
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, InputError, StepError, canonical_json
from enginesmith.core.names import parse_reference
from enginesmith.core.reports.proof import PASSED, least_sqnr_db, name_task_checks
from enginesmith.core.text import now
from enginesmith.core.types import Target
from enginesmith.registry.manifest import EngineEntry, Manifest, load_pinned, request_of
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.files import reachable
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Channel, read_channel
from pipeline.compile.run_context import RunContext, stops_run
from pipeline.compile.steps.blobs import fetch_engine, fetch_graph, golden_set, open_reference, runnable, this_machine
from pipeline.compile.steps.engines import BuildEngine, memory_request, recall_engine
from pipeline.compile.steps.engines import needs as build_needs
from pipeline.compile.steps.keys import bucket_inputs, code_key, engine_limits, model_shapes
from pipeline.compile.steps.proofs import CRASHED, engine_check
from pipeline.operations.validate import entries_of, published_proof, spec_of, why_not_here
from pipeline.outcome import engine_of, make_report
from pipeline.progress.events import Finished
from pipeline.regressions.findings import BucketTimes
from pipeline.regressions.pairs import CheckOptions
from pipeline.regressions.rehearsal_verdicts import (
    Decision,
    Rehearsal,
    Served,
    Trial,
    UnitRehearsal,
    VersionPlan,
    judge_trials,
    plan_version,
)
from pipeline.spec.model import ModelSpec
from pipeline.values import EngineBlob, ModelShapes, Proof, Recorded
from validation.latency.machine import SystemLoadMonitor, machine

Toolchain = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ReadToolchain:
    """Say what a backend would build with for a target."""

    backend: str
    options: Mapping[str, str | int | float | bool]
    target: Target

    def run(self, _context: WorkerContext) -> Toolchain:
        """The toolchain of a build request made here."""
        return toolchain_of(discovery.configure(self.backend, dict(self.options)), self.target)


@dataclass(frozen=True)
class RecordAnswers:
    """Run a graph as it is written on a golden set: what engines of both toolchains are then measured against."""

    engine: EngineBlob
    golden: str

    def run(self, context: WorkerContext) -> str | None:
        """The digest of the answers; None where they are too large to be recorded. Raises as `open_reference`."""
        store, request, folder = open_store(context.store), self.engine.request, context.workdir
        golden = golden_set(store, self.golden, folder)
        graph = runnable(fetch_graph(store, request.model, folder / "graph.onnx"), request.precision)
        with open_reference(store, graph, golden, None) as reference:
            for case in golden.cases:
                reference.run(case.inputs)
            path = reference.save(folder / "recorded.safetensors")
        return store.put_file(path) if path else None


@dataclass(frozen=True)
class TimeBlocks:
    """Time blocks of runs of an engine at one bucket, as they are asked for at a Unix socket. golden, shapes, sizes: as
    of `BenchmarkPair`."""

    engine: EngineBlob
    golden: str
    shapes: ModelShapes
    sizes: Mapping[str, int]
    address: str

    def run(self, context: WorkerContext) -> int:
        """How many blocks were timed. Raises what opening and running raise."""
        from validation.latency.measurement.paired import answer_blocks

        store, folder = open_store(context.store), context.workdir
        engine = fetch_engine(store, self.engine, folder)
        (bucket,) = bucket_inputs(store, self.golden, self.shapes, (self.sizes,), folder)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            with connection.makefile("rw", encoding="utf-8") as stream:
                return answer_blocks(partial(open_engine, engine), bucket.inputs, stream)


@dataclass(frozen=True)
class TrialPair:
    """What was measured of a unit; on record, so that a rehearsal that was killed goes on behind it."""

    old: Trial
    new: Trial
    times: BucketTimes | None = None
    remarks: tuple[str, ...] = ()


def list_served(store: Store, references: Sequence[str] = ()) -> list[Served]:
    """The versions of these references, else all that channels serve, with their channels; of an ensemble the versions
    of its graphs, which its engines are made of. Raises as `lookup.locate` and `lookup.load`."""
    stated_manifests = [lookup.locate(store, parse_reference(text)).manifest for text in references]
    channels: dict[tuple[str, str], tuple[Channel, ...]] = {}
    for model in lookup.models(store):
        for name in lookup.channel_names(store, model):
            if channel := read_channel(store, model, name):
                version_key = model, channel.version
                channels[version_key] = (*channels.get(version_key, ()), channel)
    roots = stated_manifests if references else [lookup.load(store, *version_key) for version_key in channels]
    manifests = [
        manifest for root in roots for manifest in ([load_pinned(store, pin) for pin in root.graphs] or [root])
    ]
    unique_manifests = {(manifest.model, manifest.version): manifest for manifest in manifests}
    return [(manifest, channels.get(version, ())) for version, manifest in unique_manifests.items()]


@dataclass(frozen=True)
class Environments:
    """Two contexts of one store: `old` of the toolchain in service, `new` of the one with the versions `pins`, which
    `python` has. words: the options of the command line that ask for the same.  on_ray: whether `new` is that of Ray's
    workers, which run their engines where they are built, and not beside the old ones."""

    pins: Mapping[str, str]
    python: str
    old: RunContext
    new: RunContext
    words: str = ""
    on_ray: bool = False
    options: CheckOptions = field(default_factory=CheckOptions)


def rehearse(versions: Sequence[Served], environments: Environments) -> Rehearsal:
    """Build, prove and time every unit that is built with what is pinned. versions: with their channels.

    Raises InputError where there is none, and where the new environment has other versions than the pinned ones.
    """
    units, plans, package_names = list[UnitRehearsal](), list[VersionPlan](), set[str]()
    toolchains: dict[bytes, Toolchain] = {}
    for manifest, channels in versions:
        entries = list(entries_of(manifest, environments.old.store, None, None))
        package_names |= {plain_name(name) for entry in entries for name in entry.toolchain}
        trials = [
            _Unit(environments, manifest, spec_of(manifest), entry, toolchains).rehearse()
            for entry in entries
            if any(plain_name(name) in environments.pins for name in entry.toolchain)
        ]
        units += trials
        if trials:
            plans.append(plan_version(manifest, channels, trials, environments.words))
    if not units:
        package_text = ", ".join(sorted(package_names)) or "nothing"
        raise InputError(
            f"no served engine is built with {', '.join(environments.pins)}; they are built with {package_text}"
        )
    return Rehearsal(environments.pins, environments.python, machine(), now(), tuple(units), tuple(plans))


@dataclass(frozen=True)
class _Unit:
    """A unit of a version, to be rehearsed. toolchains: answers of the new environment by request. Each answer
    takes a process there, and units of one backend ask the same."""

    environments: Environments
    manifest: Manifest
    spec: ModelSpec
    entry: EngineEntry
    toolchains: dict[bytes, Toolchain]

    def rehearse(self) -> UnitRehearsal:
        entry, context = self.entry, self.environments.new
        obstacle = discovery.configure(entry.backend, dict(entry.options)).runs(entry.hardware)
        local_obstacle = None if self.environments.on_ray else obstacle
        old_trial, new_trial = Trial(entry.toolchain, entry.status, entry.reason, entry.digest), Trial({}, "unproven")
        if local_obstacle and discovery.capabilities_of(entry.backend).tunes_on_target:
            return self._result(old_trial, new_trial, "unknown", f"neither built nor run here: {local_obstacle}")
        try:
            request = replace(request_of(entry), toolchain=self._read_toolchain())
        except StepError as error:
            if error.kind != "no-node":
                raise
            return self._result(old_trial, new_trial, "unknown", f"not built: {_reason(error).partition(': ')[2]}")
        new_trial = replace(new_trial, toolchain=dict(request.toolchain))
        try:
            record = recall_engine(request, context) or self._run("new", "build", BuildEngine(request))
        except EnginesmithError as error:
            new_trial = replace(new_trial, status="failed", reason=_reason(error))
            return self._result(old_trial, new_trial, "stays", f"it cannot be built: {new_trial.reason}")
        if local_obstacle:
            new_trial = replace(new_trial, digest=record.digest)
            return self._result(old_trial, new_trial, "unknown", f"built, not run here: {local_obstacle}")
        new_entry = replace(
            entry, digest=record.digest, suffix=record.suffix, build_key=request.key, toolchain=new_trial.toolchain
        )
        trial_pair = self._measure(new_entry, record)
        trials = trial_pair.old, trial_pair.new, trial_pair.times
        verdict = judge_trials(entry.unit, *trials, trial_pair.remarks, self.environments.options)
        return self._result(trial_pair.old, trial_pair.new, *verdict, trial_pair.times)

    def _measure(self, new_entry: EngineEntry, record: Recorded) -> TrialPair:
        """The trials of both engines: from the record of an earlier rehearsal, else made now and put on record."""
        entry, context, golden = self.entry, self.environments.old, self.manifest.golden
        check = engine_check(engine_of(entry), self.spec, golden)
        machine_words = f"{this_machine()}, {why_not_here(entry)}"
        engines = [entry.build_key, entry.digest, entry.report, new_entry.build_key, record.digest]
        key = {"engines": engines, "check": encode(check), "seconds": self.environments.options.seconds}
        key |= {"machine": machine_words, **code_key(RecordAnswers, type(check), TimeBlocks)}
        if trial_pair := context.recall("rehearsal", key, TrialPair):
            context.progress.emit(Finished(f"{self.manifest.reference} {entry.unit}", "cached"))
            return trial_pair
        answers = self._run("old", "proof", RecordAnswers(engine_of(entry), golden))
        old_trial = Trial(entry.toolchain, entry.status, entry.reason, entry.digest)
        new_trial = self._prove("new", new_entry, answers)
        if reason := why_not_here(entry):
            trial_pair = TrialPair(old_trial, new_trial, remarks=(reason,))
        else:
            old_trial, remarks = self._prove("old", entry, answers), list[str]()
            is_proven = {old_trial.status, new_trial.status} <= set(PASSED)
            if is_proven and self.environments.on_ray:
                remarks.append("it ran on a Ray worker, where it cannot be timed beside the engine in service")
            times = self._time((new_entry, entry), remarks) if is_proven and not remarks else None
            if times:
                old_trial = replace(old_trial, median_s=times.served_s)
                new_trial = replace(new_trial, median_s=times.new_s)
            trial_pair = TrialPair(old_trial, new_trial, times, tuple(remarks))
        blobs = [digest for trial in (old_trial, new_trial) for digest in (trial.digest, trial.report) if digest]
        context.remember("rehearsal", key, encode(trial_pair), blobs)
        return trial_pair

    def _result(
        self, old: Trial, new: Trial, verdict: Decision, why: str, times: BucketTimes | None = None
    ) -> UnitRehearsal:
        return UnitRehearsal(self.manifest.reference, self.entry.unit, old, new, verdict, why, times)

    def _run(
        self, which: Literal["old", "new"], step: Literal["build", "proof", "latency"], request: Request[Any]
    ) -> Any:
        context = self.environments.old if which == "old" else self.environments.new
        step_text = "versions for" if isinstance(request, ReadToolchain) else step
        name = f"{step_text} {self.manifest.reference} {self.entry.unit}, {which} toolchain"
        needs = Needs(alone=step == "latency")
        if which == "new" and self.environments.on_ray:
            needs = replace(build_needs(request_of(self.entry), memory_request(self.spec)), required=True)
        job = Job(name, request, context.store.uri, engine_limits(self.spec, step), needs)
        return context.run_to_end(context.local, name, job)

    def _read_toolchain(self) -> Toolchain:
        """What the new environment builds with. Raises InputError where that is not what is pinned."""
        request = ReadToolchain(self.entry.backend, dict(self.entry.options), self.entry.hardware)
        request_key = canonical_json(encode(request))
        try:
            if request_key not in self.toolchains:
                self.toolchains[request_key] = self._run("new", "build", request)
            versions = self.toolchains[request_key]
        except StepError as error:
            if error.kind == "no-node":
                raise
            reason = _reason(error)
            line = (error.log.strip() or reason).splitlines()[-1]
            raise InputError(f"{self.environments.python} runs no jobs: {line}; install enginesmith there") from error
        versions_by_name = {plain_name(name): version for name, version in versions}
        for name in {plain_name(requirement) for requirement in self.entry.toolchain} & self.environments.pins.keys():
            if versions_by_name.get(name) != (pin := self.environments.pins[name]):
                version = versions_by_name.get(name, "absent")
                raise InputError(f"{self.environments.python} has {name} {version}, not {pin}; install that there")
        return versions

    def _prove(self, which: Literal["old", "new"], entry: EngineEntry, answers: str | None) -> Trial:
        check = replace(engine_check(engine_of(entry), self.spec, self.manifest.golden), answers=answers)
        try:
            proof: Proof = self._run(which, "proof", check)
        except EnginesmithError as error:
            proof = Proof((replace(CRASHED, note=_reason(error)),))
        old_proof = published_proof(self.entry, self.environments.old.store)
        report = make_report(entry, self.manifest.golden, [old_proof, proof])
        tasks = name_task_checks(proof.checks)
        metrics = {name: check.value for name, check in tasks.items() if check.value is not None}
        sqnr_db = least_sqnr_db(proof.checks)
        blob = self.environments.old.store.put_bytes(canonical_json(report.to_json()))
        return Trial(entry.toolchain, report.verdict, report.reason, entry.digest, sqnr_db, metrics, report=blob)

    def _time(self, entries: tuple[EngineEntry, EngineEntry], remarks: list[str]) -> BucketTimes | None:
        """The times of the new engine and of the one in service at the opt sizes, each in its own environment; None,
        with a remark, where one of them cannot be timed."""
        from validation.latency.measurement.paired import compare_times, run_interleaved_apart

        sizes = {dim.name: dim.opt for dim in self.spec.named_dims()}
        options, monitor = self.environments.options, SystemLoadMonitor()
        try:
            with workdir() as folder, ThreadPoolExecutor(2) as pool, ExitStack() as resources:
                sides = list[_Side]()
                for side_name, entry in zip(("new", "old"), entries, strict=True):
                    address, shapes = str(folder / side_name), model_shapes(self.spec)
                    request = TimeBlocks(engine_of(entry), self.manifest.golden, shapes, sizes, address)
                    with socket.socket(socket.AF_UNIX) as listener, reachable(f"listening at {address}"):
                        listener.bind(address)
                        listener.listen(1)
                        job = pool.submit(self._run, side_name, "latency", request)  # type: ignore[arg-type]
                        sides.append(_Side.accept(listener, job, resources))
                pairs = run_interleaved_apart((sides[0].ask, sides[1].ask), options.seconds)
        except EnginesmithError as error:
            remarks.append(f"it could not be timed: {_reason(error)}")
            return None
        times, reasons = compare_times(pairs), monitor.stop().busy
        bucket = " ".join(f"{dim}={size}" for dim, size in sizes.items()) or "static"
        return BucketTimes.of(bucket, times, reasons)


@dataclass(frozen=True)
class _Side:
    """A process of `TimeBlocks`, and the stream that it answers on."""

    job: Future[Any]
    stream: TextIO

    @classmethod
    def accept(cls, door: socket.socket, job: Future[Any], links: ExitStack) -> "_Side":
        """Wait for the process to connect. Raises the job's error where it ends before."""
        door.settimeout(0.1)
        while not job.done():
            with suppress(TimeoutError):
                connection = links.enter_context(door.accept()[0])
                return cls(job, links.enter_context(connection.makefile("rw", encoding="utf-8")))
        job.result()
        raise StepError("it ended before it was timed")

    def ask(self, word: str, numbers: Sequence[float]) -> Any:
        """The answer to a request. Raises the job's error where that has ended."""
        line = ""
        with suppress(OSError):
            self.stream.write(json.dumps([word, numbers]) + "\n")
            self.stream.flush()
            line = self.stream.readline()
        if line:
            return json.loads(line)
        self.job.result()
        raise StepError("it ended while it was timed")


def _reason(error: EnginesmithError) -> str:
    """The first line of an error; raises one that says nothing about what was tried."""
    if stops_run(error):
        raise error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
