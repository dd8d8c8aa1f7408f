"""The whole of it: models, roofs, PyTorch, every backend, other generations' engines, carried engines; one after the
other, so that nothing is measured while something else runs."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builders.backends import discovery as backends
from builders.execution.jobs import Job, Limits, Request
from builders.execution.process import run_job
from enginery.core.errors import EngineryError, StepError
from enginery.core.hardware.host import describe_host
from enginery.core.types import BuildRequest, Precision, Target
from validation.golden.golden_set import freeze
from validation.gpu import devices
from validation.gpu.carried import Carried, CarriedEngine
from validation.gpu.cases import load_cases, save_cases
from validation.gpu.devices import Device
from validation.gpu.models import PRECISIONS, KitModel, Size, write
from validation.gpu.probes import ANY_GENERATION, any_generation_task
from validation.gpu.results import Json, Results, now
from validation.gpu.tasks import Skipped, Task, model_key, other_tasks, own_tasks
from validation.gpu.timing.peaks import Peaks
from validation.gpu.timing.peers import PEERS, Peer
from validation.gpu.trying import MeasurePeaks, ProveCarried, Terms, TryEngine, TryPeer
from validation.latency.roofline.graph_costs import graph_costs
from validation.limits.float64 import DoubleSession

# Names of the roofs by what a model computes in; TF32 is off in engines.
_KINDS = {"fp32": "float32", "fp16": "float16"}
_MEMORY_MIB = 1 << 20


@dataclass(frozen=True)
class Asked:
    """models: names of the kit's own.  backends: names; empty for all.  seconds: of each latency.

    peers: ways of PyTorch to compare with; the first and the last of them are raced.  timeout_s: of each try.
    """

    device: str
    models: Sequence[str]
    precisions: Sequence[Precision] = PRECISIONS
    backends: Sequence[str] = ()
    peers: Sequence[Peer] = ("eager", "eager-graph", "compile", "compile-autotune")
    carry: Sequence[Path] = ()
    seconds: float = 2.0
    size: Size = "real"
    timeout_s: float = 1200.0
    peaks: bool = True


@dataclass
class _Bench:
    """What a run of the kit holds: where it works, on what, and what it tells whom."""

    asked: Asked
    device: Device
    folder: Path
    say: Callable[[str], None]
    keep: Callable[[Results], None]
    cases: dict[str, Path] = field(default_factory=dict)
    models: list[Json] = field(default_factory=list)
    peaks: Json | None = None
    tries: list[Json] = field(default_factory=list)
    skipped: list[Json] = field(default_factory=list)
    carried: list[Json] = field(default_factory=list)
    count: int = 0

    def job(self, name: str, request: Request[Json]) -> Json:
        """Run one job in its process; how it died is an answer, too."""
        self.count += 1
        workdir = self.folder / f"try{self.count}"
        workdir.mkdir()
        begun = time.perf_counter()
        limits = Limits(self.asked.timeout_s, _MEMORY_MIB)
        try:
            found = run_job(Job(name, request, limits=limits), workdir)
        except EngineryError as error:
            found = _unfinished(error)
        self.say(f"{name}: {found.get('outcome', 'done')}" + (f", {found['reason']}" if found.get("reason") else ""))
        return {"name": name, "took_s": round(time.perf_counter() - begun, 3), **found}

    def add(self, rows: list[Json], item: Json) -> None:
        """One more row, and what is known by now kept."""
        rows.append(item)
        self.keep(self.results())

    def results(self) -> Results:
        """What is known by now."""
        return Results(
            created_at=now(),
            device=self.device.to_json(),
            host=describe_host(),
            software=devices.software(),
            peaks=self.peaks,
            models=self.models,
            tries=self.tries,
            skipped=self.skipped,
            carried=self.carried,
            seconds=self.asked.seconds,
            size=self.asked.size,
        )

    def terms(self, peers: Sequence[Peer] = ()) -> Terms:
        """How a try is measured."""
        return Terms(self.device.device, self.asked.seconds, self.folder / "inductor", tuple(peers))


def _unfinished(error: EngineryError) -> Json:
    """A try that ended without an answer. Only a signal tells of the engine or its driver: time, memory and what is not
    installed are this machine's."""
    log = error.log.strip().splitlines()[-3:] if isinstance(error, StepError) else []
    crashed = isinstance(error, StepError) and error.kind == "crash"
    return {"outcome": "crashed" if crashed else "not finished", "reason": " | ".join([str(error), *log])[:1000]}


def run_kit(asked: Asked, say: Callable[[str], None], keep: Callable[[Results], None] = lambda _: None) -> Results:
    """Everything, told line by line. Raises UnavailableError without the device, UnknownNameError for a backend that
    is not registered, IntegrityError for a damaged carried folder; all of them before anything is tried.

    keep: told what is known, first of all and after each try: hours of a GPU are not lost to what ends the process.
    """
    device = devices.find_device(asked.device)
    for name in asked.backends:
        backends.configure(name, {})
    carried = [Carried.load(folder) for folder in asked.carry]
    say(f"on {device.name} ({device.target.name}), driver {device.driver or 'none'}")
    with tempfile.TemporaryDirectory(prefix="enginery-gpu-") as folder:
        bench = _Bench(asked, device, Path(folder), say, keep)
        keep(bench.results())
        _work(bench, carried)
        return bench.results()


def _work(bench: _Bench, carried: Sequence[Carried]) -> None:
    """In an order in which what is wanted most is there first."""
    for item in carried:
        for proven in _proven(bench, item):
            bench.add(bench.carried, proven)
    if bench.asked.peaks:
        bench.peaks = bench.job("peaks", MeasurePeaks(bench.device.device)).get("peaks")
    models = list(_models(bench))
    bench.models.extend(_described(model, bench.peaks) for model in models)
    for kind, task in _tasks(bench, models):
        if isinstance(task, Skipped):
            bench.say(f"{task.name}: {'refused' if task.refused else 'skipped'}, {task.reason}")
            bench.add(bench.skipped, {"kind": kind, **task.to_json()})
        else:
            bench.add(bench.tries, _engine(bench, kind, task))
    for model in models:
        for peer in _peers_for(bench):
            bench.add(bench.tries, _peer(bench, peer, model))


def _models(bench: _Bench) -> Iterator[KitModel]:
    """Write the models, and of each one set of cases that both precisions share: float64's answers."""
    for name in bench.asked.models:
        made = [write(name, precision, bench.asked.size, bench.folder) for precision in bench.asked.precisions]
        folder = bench.folder / f"cases-{name}"
        folder.mkdir()
        model = write(name, "fp32", bench.asked.size, folder)
        exact = DoubleSession(model.path)
        golden = freeze([model.sample(model.batch.opt)], model.inputs, [model.batch], exact.run)
        save_cases(golden, golden_digest(model), folder)
        for item in made:
            bench.cases[model_key(item)] = folder
            yield item


def golden_digest(model: KitModel) -> str:
    """What names the cases of one of the kit's models: they follow from its bytes."""
    from enginery.core.digest import digest_of, digest_of_file

    return digest_of({"kit": digest_of_file(model.path)})


def _described(model: KitModel, roofs: Json | None) -> Json:
    """What a run must do at each batch, and the least time that takes."""
    rows = []
    for batch in sorted({model.batch.min, model.batch.opt, model.batch.max}):
        costs = graph_costs(model.path, model.inputs, {"batch": batch})
        operations = 2 * sum(cost.macs for cost in costs.costs)
        made = {name for node in costs.nodes for name in node.makes}
        read = {name: size for node in costs.nodes for name, size in node.reads.items() if name not in made}
        written = {name: size for node in costs.nodes for name, size in node.makes.items() if name in costs.outputs}
        moved = sum(read.values()) + sum(written.values())
        least = Peaks(**roofs).least_s(operations, moved, _KINDS[model.precision]) if roofs else None
        rows.append({"batch": batch, "operations": operations, "moved_bytes": moved, "least_s": least})
    return {"model": model_key(model), "sizes": rows}


def _tasks(bench: _Bench, models: Sequence[KitModel]) -> Iterator[tuple[str, Task | Skipped]]:
    only = bench.asked.backends
    yield from (("engine", task) for task in own_tasks(models, bench.device, only))
    halves = next((model for model in models if model.precision == "fp16"), None)
    if halves is None:
        return
    yield from (("other generation", task) for task in other_tasks(halves, bench.device, only))
    if not only and (probe := any_generation_task(halves, bench.device)):
        yield ANY_GENERATION, probe


def _peers_for(bench: _Bench) -> list[Peer]:
    return [peer for peer in bench.asked.peers if not (bench.device.is_cpu and peer == "eager-graph")]


def _peer(bench: _Bench, peer: Peer, model: KitModel) -> Json:
    request = BuildRequest(
        "", model.precision, bench.device.target, "torch", model.inputs, model.outputs, (model.profile,)
    )
    trial = TryPeer(peer, request, model.path, bench.cases[model_key(model)], bench.terms())
    said = {"kind": "peer", "model": model_key(model), "precision": model.precision, "backend": peer, "options": {}}
    return {
        **said,
        "built_for": bench.device.target.name,
        **bench.job(f"{PEERS[peer]}, {model_key(model)}", trial),
    }


def _engine(bench: _Bench, kind: str, task: Task) -> Json:
    peers = _peers_for(bench)
    raced: Sequence[Peer] = list(dict.fromkeys([*peers[:1], *peers[-1:]])) if kind == "engine" else ()
    portable = kind == ANY_GENERATION
    place = task.model.path, bench.cases[model_key(task.model)]
    trial = TryEngine(task.request, dict(task.options), bench.device.target, *place, bench.terms(raced), portable)
    said = {
        "kind": kind,
        "model": model_key(task.model),
        "precision": task.request.precision,
        "backend": task.request.backend,
        "built_for": ANY_GENERATION if portable else task.request.target.name,
        "options": dict(task.options),
        "versions": dict(task.request.toolchain),
    }
    return {**said, **bench.job(task.name, trial)}


def _proven(bench: _Bench, carried: Carried) -> Iterator[Json]:
    """Run a folder's engines; those that cannot run here are said to be."""
    _, digest = load_cases(carried.folder)
    for engine in carried.engines:
        about = {
            "model": carried.model,
            "version": carried.version,
            "manifest": carried.manifest,
            "golden": digest,
            "engine": engine.digest,
            "build_key": engine.request.key,
            "unit": engine.request.unit,
            "created_at": now(),
        }
        name = f"{carried.model}@{carried.version} {engine.request.unit}"
        if reason := _cannot(engine, bench.device.target):
            bench.say(f"{name}: skipped, {reason}")
            yield {**about, "outcome": "skipped", "reason": reason}
        else:
            yield {**about, **bench.job(name, _prove(bench, carried, engine))}


def _prove(bench: _Bench, carried: Carried, engine: CarriedEngine) -> ProveCarried:
    path, folder = engine.path.resolve(), carried.folder.resolve()
    return ProveCarried(engine.request, engine.options, path, engine.digest, folder, bench.terms())


def _cannot(engine: CarriedEngine, here: Target) -> str:
    try:
        backend = backends.configure(engine.request.backend, engine.options)
    except EngineryError as error:
        return str(error)
    if not backend.versions():
        return f"{backend.name} is not installed; {backend.install}"
    if engine.request.target.is_cpu != here.is_cpu:
        return f"it is for {engine.request.target.name}, and this run is of {here.name}"
    return backend.runs(engine.request.target) or ""
