"""Rehearses an upgrade: builds served engines with another toolchain, and proves and times both beside each other."""

import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TextIO

from builders.backends import discovery
from builders.backends.discovery import open_engine, toolchain_of
from builders.execution.environments import make_environment, plain_name
from builders.execution.fork_client import keep_fork_server
from builders.execution.jobs import Executor, Job, Needs, ProcessLimits, Request, WorkerContext
from builders.execution.local import LocalExecutor, workdir
from enginesmith.core.codec import encode
from enginesmith.core.errors import (
    EnginesmithError,
    InputError,
    IntegrityError,
    StepError,
    UnavailableError,
    canonical_json,
)
from enginesmith.core.names import parse_reference
from enginesmith.core.reports.latency import MachineKind
from enginesmith.core.reports.proof import PASSED, least_sqnr_db, name_task_checks
from enginesmith.core.text import now
from enginesmith.core.types import Target
from enginesmith.registry.manifest import EngineEntry, Manifest, load_pinned, pinned_engines, request_of
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.cache import local_cache
from enginesmith.registry.store.files import reachable
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Channel, read_channel
from pipeline.compile.ensembles.proof import ProveEnsemble, prove
from pipeline.compile.ensembles.publication import EnsembleUnit
from pipeline.compile.preflight import PRELOADED
from pipeline.compile.run_context import RunContext, stops_run, versions
from pipeline.compile.steps.blobs import fetch_engine, fetch_graph, golden_set, open_reference, runnable
from pipeline.compile.steps.engines import BuildEngine, gpu_labels, recall_engine
from pipeline.compile.steps.keys import bucket_inputs, code_key, engine_limits, model_shapes
from pipeline.compile.steps.proofs import CRASHED, CheckEngine, engine_check
from pipeline.operations import validate
from pipeline.outcome import engine_of, make_report
from pipeline.progress.events import Finished
from pipeline.regressions.findings import BucketTimes
from pipeline.regressions.pairs import SLOWER, CheckOptions
from pipeline.regressions.rehearsal_verdicts import (
    Rehearsal,
    Served,
    Trial,
    UnitRehearsal,
    VersionPlan,
    judge_trials,
    plan_version,
    recall_trial,
    renew,
)
from pipeline.spec.model import ModelSpec
from pipeline.values import EngineBlob, Json, ModelShapes, Proof
from validation.latency.machine import SystemLoadMonitor, machine

# Of a unit that another machine rehearses: each of its processes has limits of its own.
_LIMITS = ProcessLimits(86_400.0, 1 << 20)
Toolchain = tuple[tuple[str, str], ...]
Side = Literal["old", "new"]


@dataclass(frozen=True)
class ReadToolchain:
    """Read the toolchain that a backend would build with for a target."""

    backend: str
    options: Mapping[str, str | int | float | bool]
    target: Target

    def run(self, _context: WorkerContext) -> Toolchain:
        """The toolchain of a build request made here."""
        return toolchain_of(discovery.configure(self.backend, dict(self.options)), self.target)


@dataclass(frozen=True)
class RecordAnswers:
    """Run a graph as it is written on a golden set: engines of both toolchains are then compared with these answers."""

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
    """Time blocks of runs of an engine at one bucket, on requests through a Unix socket. golden, shapes, sizes: as
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
class Upgrade:
    """An upgrade to try. pins: package -> new version.  python: path of an interpreter with them, on each machine that
    runs engines; None: this interpreter if it has them, else one in an environment that pip makes.

    seconds: time for measuring each unit.  slower: as in `CheckOptions`."""

    pins: Mapping[str, str]
    python: str | None = None
    seconds: float = 8.0
    slower: float = SLOWER

    def old_pins(self, entry: EngineEntry) -> dict[str, str]:
        """The versions of the pinned packages that an engine was built with."""
        versions_by_name = {plain_name(name): version for name, version in entry.toolchain.items()}
        return {name: version for name, version in versions_by_name.items() if name in self.pins}

    def concerns(self, manifest: Manifest, is_stated: bool) -> bool:
        """Whether a version has an engine that is built with what is pinned; unless stated, in another version."""
        old_pins = [pair for entry in manifest.engines if entry.usable for pair in self.old_pins(entry).items()]
        return any(is_stated or self.pins[name] != version for name, version in old_pins)


def list_served(store: Store, upgrade: Upgrade, references: Sequence[str] = ()) -> list[Served]:
    """(manifest, channels that serve it) of the versions of `references` with an engine built with the packages;
    without references, of all versions that nodes get through channels and their rollouts and that the upgrade changes.
    Raises InputError if there is none, and as `lookup.locate` and `lookup.load` do."""
    stated_manifests = [lookup.locate(store, parse_reference(text)).manifest for text in references]
    channels: dict[tuple[str, str], tuple[Channel, ...]] = {}
    for model in lookup.models(store):
        for name in lookup.channel_names(store, model):
            if channel := read_channel(store, model, name):
                for version in channel.served.values():
                    channels[model, version] = (*channels.get((model, version), ()), channel)
    manifests = stated_manifests or [lookup.load(store, *version_key) for version_key in channels]
    unique_manifests = {
        (peer.model, peer.version): peer for peer in manifests if upgrade.concerns(peer, bool(references))
    }
    if not unique_manifests:
        pin_text = ", ".join(f"{name} {version}" for name, version in upgrade.pins.items())
        packages = {" ".join(pair) for peer in manifests for entry in peer.engines for pair in entry.toolchain.items()}
        package_text = ", ".join(sorted(packages)) or "nothing"
        raise InputError(f"no served engine would change with {pin_text}; they are built with {package_text}")
    return [(manifest, channels.get(version_key, ())) for version_key, manifest in unique_manifests.items()]


@dataclass
class Rehearser:
    """Rehearses units. context: of this environment.  remote: runs each unit on a machine that has its hardware; None:
    they run here.  note: called with what pip does for an environment.

    executors: of the environments in use, by side and versions.  toolchains: what backends build with in the new one,
    by request; each answer takes a process there.  results: by version and unit.
    """

    upgrade: Upgrade
    context: RunContext
    remote: Executor | None = None
    note: Callable[[str], object] = str
    executors: dict[tuple[Side, tuple[tuple[str, str], ...]], tuple[str, Executor]] = field(default_factory=dict)
    toolchains: dict[bytes, Toolchain] = field(default_factory=dict)
    results: dict[tuple[str, str], UnitRehearsal] = field(default_factory=dict)

    def open(self, side: Side, pins: Mapping[str, str]) -> tuple[str, Executor]:
        """The path of an interpreter with these package versions, and an executor of jobs in it; one for each side,
        since both sides are timed at once. Raises InputError if there is none, UnavailableError with pip's reason."""
        key = side, tuple(sorted(pins.items()))
        if key not in self.executors:
            python = self._find_python(pins) if side == "old" or not self.upgrade.python else Path(self.upgrade.python)
            if not python.is_file():
                raise InputError(f"--python {python}: there is no such file on {socket.gethostname()}")
            other = None if python == Path(sys.executable) else python.absolute()
            self.executors[key] = str(python), LocalExecutor(start=keep_fork_server((*PRELOADED, __name__), other))
        return self.executors[key]

    def _find_python(self, pins: Mapping[str, str]) -> Path:
        """This interpreter where it has these versions, else that of an environment which pip makes."""
        if versions(*pins) == pins:
            return Path(sys.executable)
        if (cache := local_cache()) is None:
            raise InputError("ENGINESMITH_CACHE_BYTES is 0: there is no cache for an environment; give --python PATH")
        return make_environment(pins, cache.folder / "environments", self.note)

    def rehearse(self, manifest: Manifest, entry: EngineEntry) -> UnitRehearsal:
        """A unit with both toolchains: measured now, or from a record, so that a killed rehearsal continues after it.
        Raises as `open`, and errors that are not about the unit (`stops_run`)."""
        unit_key = manifest.reference, entry.unit
        if unit_key not in self.results:
            here = None if self.remote or manifest.graphs else self.recall(manifest, entry, machine())
            is_there = self.remote and not manifest.graphs
            result = here or (self._there(manifest, entry) if is_there else self._here(manifest, entry))
            if here:
                self.context.progress.emit(Finished(" ".join(unit_key), "cached"))
            elif result.new.report and (result.times or result.verdict != "unknown"):
                blobs = [digest for digest in (result.new.digest, result.new.report, result.old.report) if digest]
                for place in (None, result.machine):
                    self.context.remember("rehearsal", self._key(manifest, entry, place), encode(result), blobs)
            self.results[unit_key] = result
        return self.results[unit_key]

    def _key(self, manifest: Manifest, entry: EngineEntry, place: MachineKind | None) -> Json:
        code = code_key(RecordAnswers, CheckEngine, ProveEnsemble, TimeBlocks)["code"]
        terms = [self.upgrade.pins, self.upgrade.seconds, place and encode(place)]
        return {"version": manifest.digest, "unit": entry.unit, "terms": terms, "code": code}

    def recall(self, manifest: Manifest, entry: EngineEntry, place: MachineKind | None) -> UnitRehearsal | None:
        """The measurements of a unit on such a machine, judged by today's limits; None where the engine is gone, or
        another rehearsal has built another one since. place: None for any machine."""
        result = self.context.recall("rehearsal", self._key(manifest, entry, place), UnitRehearsal)
        if result is None or not (manifest.graphs or recall_trial(entry, result.new, self.context)):
            return None
        trials, options = (result.old, result.new, result.times), CheckOptions(self.upgrade.slower)
        verdict, why = judge_trials(entry.unit, *trials, (), options, is_timed=not manifest.graphs)
        return replace(result, verdict=verdict, why=why)

    def without_run(self, manifest: Manifest, entry: EngineEntry, new: Trial, obstacle: str) -> UnitRehearsal:
        """A unit that this machine cannot build or run: as another one has measured the same engine, else unknown."""
        result = self.recall(manifest, entry, None)
        if result and new.digest in (None, result.new.digest):
            return result
        return UnitRehearsal(manifest.reference, entry.unit, Trial.of(entry), new, "unknown", obstacle)

    def _there(self, manifest: Manifest, entry: EngineEntry) -> UnitRehearsal:
        request = RehearseUnit(manifest.model, manifest.version, manifest.digest, entry.unit, self.upgrade)
        name, hardware = f"{manifest.reference} {entry.unit}", entry.hardware
        needs = Needs() if hardware.is_cpu else Needs(gpu_labels(hardware), required=True, gpus=1)
        job = Job(name, request, self.context.store.uri, _LIMITS, needs)
        try:
            return self.context.run_to_end(self.remote or self.context.local, name, job)
        except StepError as error:
            if error.kind != "no-node":
                raise
            result, reason = replace(self, remote=None)._here(manifest, entry), _reason(error).partition(": ")[2]
            return result if result.machine else replace(result, why=f"{reason}; {result.why}")

    def _here(self, manifest: Manifest, entry: EngineEntry) -> UnitRehearsal:
        return self._whole(manifest, entry) if manifest.graphs else _Unit(self, manifest, entry).rehearse()

    def _whole(self, manifest: Manifest, entry: EngineEntry) -> UnitRehearsal:
        """A unit of an ensemble: it moves where those of its graphs move and pass from end to end."""
        store, parts, engines = self.context.store, dict[str, UnitRehearsal](), dict[str, EngineEntry]()
        for graph, pinned_manifest, engine in pinned_engines(store, manifest, entry):
            engines[graph.name] = engine
            if self.upgrade.old_pins(engine):
                parts[graph.name] = self.rehearse(pinned_manifest, engine)
        old = replace(Trial.of(entry), sqnr_db=entry.sqnr_db, metrics=manifest.metrics.get(entry.unit, {}))
        new, result = Trial({}, "unproven"), partial(UnitRehearsal, manifest.reference, entry.unit, old)
        for verdict in ("stays", "unknown"):
            for name, part in parts.items():
                if part.verdict == verdict:
                    return result(new, part.verdict, f"graph {name!r}: {part.why}", machine=part.machine)
        if self.remote:  # the machine that has its hardware runs it, and rehearses its graphs for itself
            return self._there(manifest, entry)
        for name, part in parts.items():
            engines[name] = renew(engines[name], part.new, self.context).entry
        unit = EnsembleUnit.of(entry, engines)
        new_entry = unit.stored_entry(entry.inputs, entry.outputs, store)
        if obstacle := validate.ensemble_not_here(store, manifest, entry):
            new = replace(new, digest=new_entry.digest)
            return self.without_run(manifest, entry, new, f"its graphs move; the ensemble was not run here: {obstacle}")
        _, executor = self.open("new", self.upgrade.pins)
        with workdir() as folder:
            ensemble = validate.read_ensemble(manifest, store, folder)
            context, name = replace(self.context, local=executor), f"{manifest.reference} {entry.unit}"
            proof = prove(ensemble.request_proof(unit), name, context)
            report = validate.PublishedEnsemble(manifest, ensemble).judge(new_entry, proof)
        blob = store.put_bytes(canonical_json(report.to_json()))
        status, sqnr_db = (report.verdict, report.reason), least_sqnr_db(proof.checks)
        new = Trial(new_entry.toolchain, *status, new_entry.digest, sqnr_db, dict(proof.metrics), report=blob)
        verdict_pair = judge_trials(entry.unit, old, new, None, (), CheckOptions(self.upgrade.slower), is_timed=False)
        return result(new, *verdict_pair, machine=machine())


@dataclass(frozen=True)
class RehearseUnit:
    """Rehearse a unit on the machine that runs this. model, version, unit: names.  digest: of the manifest."""

    model: str
    version: str
    digest: str
    unit: str
    upgrade: Upgrade

    def run(self, context: WorkerContext) -> UnitRehearsal:
        """The unit with both toolchains. Raises as `Rehearser.rehearse`."""
        store, executor = open_store(context.store), LocalExecutor()
        manifest = lookup.load(store, self.model, self.version)
        if manifest.digest != self.digest:
            raise IntegrityError(f"{manifest.reference} was replaced meanwhile; rehearse again")
        entry = next(peer for peer in validate.entries_of(manifest, store, None, None) if peer.unit == self.unit)
        return Rehearser(self.upgrade, RunContext(store, executor, executor)).rehearse(manifest, entry)


def rehearse(served_versions: Sequence[Served], rehearser: Rehearser, words: str = "") -> Rehearsal:
    """Build, prove and time every unit that is built with the pinned packages. served_versions: with their channels.

    words: the options of the command line that ask for the same.
    Raises InputError where the new environment has other versions than the pinned ones.
    """
    upgrade, store = rehearser.upgrade, rehearser.context.store
    units, plans = dict[tuple[str, str], UnitRehearsal](), list[VersionPlan]()

    def rehearse_units(manifest: Manifest) -> list[UnitRehearsal]:
        entries = filter(upgrade.old_pins, validate.entries_of(manifest, store, None, None))
        trials = [rehearser.rehearse(manifest, entry) for entry in entries]
        units.update({(trial.version, trial.unit): trial for trial in trials})
        return trials

    for manifest, channels in served_versions:
        for graph in manifest.graphs:
            rehearse_units(load_pinned(store, graph))
        plans.append(plan_version(manifest, channels, rehearse_units(manifest), words, store))
    new_pythons = [name for (side, _), (name, _) in rehearser.executors.items() if side == "new"]
    python = "Ray workers" if rehearser.remote else next(iter(new_pythons), upgrade.python or "")
    return Rehearsal(upgrade.pins, python, machine(), now(), tuple(units.values()), tuple(plans))


@dataclass(frozen=True)
class _Unit:
    """A unit of a version of a model, to be rehearsed here."""

    rehearser: Rehearser
    manifest: Manifest
    entry: EngineEntry

    @cached_property
    def spec(self) -> ModelSpec:
        return validate.spec_of(self.manifest)

    def rehearse(self) -> UnitRehearsal:
        entry, context, golden = self.entry, self.rehearser.context, self.manifest.golden
        obstacle = discovery.configure(entry.backend, dict(entry.options)).runs(entry.hardware)
        old, new = Trial.of(entry), Trial({}, "unproven")
        result = partial(UnitRehearsal, self.manifest.reference, entry.unit)
        if obstacle and discovery.capabilities_of(entry.backend).tunes_on_target:
            return self.rehearser.without_run(self.manifest, entry, new, f"neither built nor run here: {obstacle}")
        request = replace(request_of(entry), toolchain=self._read_toolchain())
        new = replace(new, toolchain=dict(request.toolchain))
        try:
            record = recall_engine(request, context) or self._run("new", "build", BuildEngine(request))
        except EnginesmithError as error:
            if isinstance(error, StepError) and error.kind == "no-node":
                return self.rehearser.without_run(self.manifest, entry, new, f"not built here: {_reason(error)}")
            new = replace(new, status="failed", reason=_reason(error))
            return result(old, new, "stays", f"it cannot be built: {new.reason}", machine=machine())
        new = replace(new, digest=record.digest)
        if obstacle:
            return self.rehearser.without_run(self.manifest, entry, new, f"built, not run here: {obstacle}")
        changes = {"digest": record.digest, "suffix": record.suffix, "build_key": request.key}
        new_entry = replace(entry, toolchain=new.toolchain, **changes)  # type: ignore[arg-type]
        old_obstacle, times = self._why_not_old(), None
        remarks = [old_obstacle] if old_obstacle else []
        answers = self._run("new" if old_obstacle else "old", "proof", RecordAnswers(engine_of(entry), golden))
        new = self._prove("new", new_entry, answers)
        if not old_obstacle:
            old = self._prove("old", entry, answers)
        if not old_obstacle and {old.status, new.status} <= set(PASSED):
            try:
                times = self._time(new_entry, entry)
                old, new = replace(old, median_s=times.served_s), replace(new, median_s=times.new_s)
            except EnginesmithError as error:
                remarks.append(f"it could not be timed: {_reason(error)}")
        verdict, why = judge_trials(entry.unit, old, new, times, remarks, CheckOptions(self.rehearser.upgrade.slower))
        return result(old, new, verdict, why, times, machine())

    def _why_not_old(self) -> str | None:
        """Why the engine in service cannot be run here with the versions that it was built with; None when it can."""
        try:
            python, _ = self.rehearser.open("old", self.rehearser.upgrade.old_pins(self.entry))
        except (InputError, UnavailableError) as error:
            return str(error)
        return validate.why_not_here(self.entry) if python == sys.executable else None

    def _run(self, which: Side, step: Literal["build", "proof", "latency"], request: Request[Any]) -> Any:
        context, upgrade = self.rehearser.context, self.rehearser.upgrade
        _, executor = self.rehearser.open(which, upgrade.old_pins(self.entry) if which == "old" else upgrade.pins)
        step_text = "versions for" if isinstance(request, ReadToolchain) else step
        name = f"{step_text} {self.manifest.reference} {self.entry.unit}, {which} toolchain"
        job = Job(name, request, context.store.uri, engine_limits(self.spec, step))
        return context.run_to_end(executor, name, job)

    def _read_toolchain(self) -> Toolchain:
        """The toolchain of the new environment. Raises InputError if it does not have the pinned versions."""
        toolchains, pins = self.rehearser.toolchains, self.rehearser.upgrade.pins
        request = ReadToolchain(self.entry.backend, dict(self.entry.options), self.entry.hardware)
        request_key, python = canonical_json(encode(request)), self.rehearser.open("new", pins)[0]
        try:
            if request_key not in toolchains:
                toolchains[request_key] = self._run("new", "build", request)
        except StepError as error:
            reason = _reason(error)
            line = (error.log.strip() or reason).splitlines()[-1]
            raise InputError(f"{python} cannot run jobs: {line}; install enginesmith there") from error
        versions_by_name = {plain_name(name): version for name, version in toolchains[request_key]}
        for name in self.rehearser.upgrade.old_pins(self.entry):
            if versions_by_name.get(name) != pins[name]:
                version = versions_by_name.get(name, "absent")
                raise InputError(f"{python} has {name} {version}, not {pins[name]}; install that there")
        return toolchains[request_key]

    def _prove(self, which: Side, entry: EngineEntry, answers: str | None) -> Trial:
        store = self.rehearser.context.store
        check = replace(engine_check(engine_of(entry), self.spec, self.manifest.golden), answers=answers)
        try:
            proof: Proof = self._run(which, "proof", check)
        except EnginesmithError as error:
            proof = Proof((replace(CRASHED, note=_reason(error)),))
        old_proof = validate.published_proof(self.entry, store)
        report = make_report(entry, self.manifest.golden, [old_proof, proof])
        tasks = name_task_checks(proof.checks)
        metrics = {name: check.value for name, check in tasks.items() if check.value is not None}
        sqnr_db = least_sqnr_db(proof.checks)
        blob = store.put_bytes(canonical_json(report.to_json()))
        return Trial(entry.toolchain, report.verdict, report.reason, entry.digest, sqnr_db, metrics, report=blob)

    def _time(self, new_entry: EngineEntry, entry: EngineEntry) -> BucketTimes:
        """The times of the new engine and of the one in service at the opt sizes, each in its own environment. Raises
        what running one of them raises."""
        from validation.latency.measurement.paired import compare_times, run_interleaved_apart

        sizes, monitor = {dim.name: dim.opt for dim in self.spec.named_dims()}, SystemLoadMonitor()
        with workdir() as folder, ThreadPoolExecutor(2) as pool, ExitStack() as resources:
            sides = list[_Side]()
            for side_name, engine in (("new", new_entry), ("old", entry)):
                address, shapes = str(folder / side_name), model_shapes(self.spec)
                request = TimeBlocks(engine_of(engine), self.manifest.golden, shapes, sizes, address)
                with socket.socket(socket.AF_UNIX) as listener, reachable(f"listening at {address}"):
                    listener.bind(address)
                    listener.listen(1)
                    job = pool.submit(self._run, side_name, "latency", request)  # type: ignore[arg-type]
                    sides.append(_Side.accept(listener, job, resources))
            pairs = run_interleaved_apart((sides[0].ask, sides[1].ask), self.rehearser.upgrade.seconds)
        bucket = " ".join(f"{dim}={size}" for dim, size in sizes.items()) or "static"
        return BucketTimes.of(bucket, compare_times(pairs), monitor.stop().busy)


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
    """The first line of an error; raises the error if it is not about the trial (`stops_run`)."""
    if stops_run(error):
        raise error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
