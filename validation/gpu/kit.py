"""A run of the kit: published engines, roofs, every backend, engines for other generations, and PyTorch. All run one
after the other, because measurements disturb each other."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from builders.backends import discovery as backends
from builders.backends.discovery import find_incompatibility
from builders.execution.jobs import Job, ProcessLimits, Request
from builders.execution.process import run_job
from enginesmith.core.errors import EnginesmithError, StepError, digest_of, digest_of_file
from enginesmith.core.hardware.machine import describe_host
from enginesmith.core.text import now
from enginesmith.core.types import BuildRequest, Engine, Precision, Target
from validation.golden.golden_set import freeze
from validation.gpu import devices
from validation.gpu.cases import (
    MeasurePeaks,
    ProveBundled,
    ProveBundledEnsemble,
    TrialTerms,
    TryEngine,
    TryPeer,
    load_cases,
    save_cases,
)
from validation.gpu.devices import KitDevice, OfflineBundle
from validation.gpu.models import PRECISIONS, BuildTask, KitModel, Size, model_key, other_tasks, own_tasks, write
from validation.gpu.peers import PEERS, Peer
from validation.gpu.results import (
    BatchCosts,
    KitTrial,
    ModelCosts,
    OfflineTrial,
    Outcome,
    Peaks,
    Results,
    Skipped,
    TrialOutcome,
)
from validation.latency.roofline.breakdown import count_crossing_bytes
from validation.latency.roofline.costs import graph_costs
from validation.limits.noise_floor import DoubleSession

# The name of the roof for each precision of a model; TF32 is off in engines.
_KINDS = {"fp32": "float32", "fp16": "float16"}
_MEMORY_MIB = 1 << 20
Result = TypeVar("Result")
T = TypeVar("T")


@dataclass(frozen=True)
class KitOptions:
    """The options of a run. backends: names; empty for all.  seconds: per latency.

    peers: PyTorch's ways to run a model; engines are compared with the first and the last.  carry: folders of published
    engines.  timeout_s: per try.
    device: 'cuda' or 'cpu'.  size: of the kit's models.  peaks: whether to measure peak rates.
    """

    device: str
    models: Sequence[str]
    precisions: Sequence[Precision] = PRECISIONS
    backends: Sequence[str] = ()
    peers: Sequence[Peer] = ("eager", "compile", "compile-autotune")
    carry: Sequence[Path] = ()
    seconds: float = 2.0
    size: Size = "real"
    timeout_s: float = 1200.0
    peaks: bool = True


@dataclass
class _Bench:
    """The state of a run of the kit. say: receives a line on each try.

    keep: receives the results so far, after each try.  cases: the folder of each model's golden cases.
    """

    asked: KitOptions
    device: KitDevice
    folder: Path
    say: Callable[[str], None]
    keep: Callable[[Results], None]
    cases: dict[str, Path] = field(default_factory=dict)
    models: list[ModelCosts] = field(default_factory=list)
    peaks: Peaks | None = None
    tries: list[KitTrial] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    carried: list[OfflineTrial] = field(default_factory=list)
    count: int = 0

    def run(self, name: str, request: Request[Result]) -> Result | TrialOutcome:
        """The request's result, from its own process; an outcome with the reason if that ends without a result."""
        self.count += 1
        workdir = self.folder / f"try{self.count}"
        workdir.mkdir()
        limits = ProcessLimits(self.asked.timeout_s, _MEMORY_MIB)
        try:
            run_outcome: Result | TrialOutcome = run_job(Job(name, request, limits=limits), workdir)
        except EnginesmithError as error:
            run_outcome = _describe_end(error)
        final_outcome = run_outcome if isinstance(run_outcome, TrialOutcome) else TrialOutcome(outcome="done")
        self.say(f"{name}: {final_outcome.outcome}" + (f", {final_outcome.reason}" if final_outcome.reason else ""))
        return run_outcome

    def try_(self, name: str, request: Request[TrialOutcome]) -> TrialOutcome:
        """The outcome of a try, with its name and time."""
        started_s = time.perf_counter()
        trial_outcome = self.run(name, request)
        return replace(trial_outcome, name=name, took_s=round(time.perf_counter() - started_s, 3))

    def add(self, rows: list[T], row: T) -> None:
        """Add a row, and pass the results so far to `keep`."""
        rows.append(row)
        self.keep(self.results())

    def results(self) -> Results:
        """The results so far."""
        return Results(
            created_at=now(),
            device=self.device,
            host=describe_host(),
            software=devices.software(),
            peaks=self.peaks,
            models=tuple(self.models),
            tries=tuple(self.tries),
            skipped=tuple(self.skipped),
            carried=tuple(self.carried),
            seconds=self.asked.seconds,
            size=self.asked.size,
        )

    def terms(self, peers: Sequence[Peer] = ()) -> TrialTerms:
        """The settings of a try's measurement. peers: PyTorch modes to compare the engine with."""
        return TrialTerms(self.device.device, self.asked.seconds, self.folder / "inductor", tuple(peers))


def _describe_end(error: EnginesmithError) -> TrialOutcome:
    """The outcome of a try whose process ended without a result: 'crashed' if a signal ended it (engine or driver).

    It is 'not finished' if the machine lacked time, memory or packages.
    """
    log = error.log.strip().splitlines()[-3:] if isinstance(error, StepError) else []
    is_crash = isinstance(error, StepError) and error.kind == "crash"
    outcome: Outcome = "crashed" if is_crash else "not finished"
    return TrialOutcome(outcome=outcome, reason=" | ".join([str(error), *log])[:1000])


def run_kit(terms: KitOptions, say: Callable[[str], None], keep: Callable[[Results], None] = lambda _: None) -> Results:
    """Run the kit. say: receives a line on each try.

    keep: receives the results at the start and after each try; nothing is lost if the process ends early.
    Before the first try, raises UnavailableError without the device, UnknownNameError for a backend that is not
    registered, and IntegrityError for a damaged folder.
    """
    device = devices.find_device(terms.device)
    for name in terms.backends:
        backends.configure(name, {})
    bundles = [OfflineBundle.load(folder) for folder in terms.carry]
    say(f"on {device.name} ({device.target.name}), driver {device.driver or 'none'}")
    with tempfile.TemporaryDirectory(prefix="enginesmith-gpu-") as folder:
        bench = _Bench(terms, device, Path(folder), say, keep)
        keep(bench.results())
        _try_all(bench, bundles)
        return bench.results()


def _try_all(bench: _Bench, bundles: Sequence[OfflineBundle]) -> None:
    """Make all tries, the most important first."""
    for bundle in bundles:
        for trial in _prove_folder(bench, bundle):
            bench.add(bench.carried, trial)
    if bench.asked.peaks:
        peaks_outcome = bench.run("peaks", MeasurePeaks(bench.device.device))
        bench.peaks = peaks_outcome if isinstance(peaks_outcome, Peaks) else None
    models = list(_models(bench))
    bench.models.extend(_count_costs(model, bench.peaks) for model in models)
    names, fp16_model = bench.asked.backends, next((model for model in models if model.precision == "fp16"), None)
    tasks: list[tuple[str, BuildTask | Skipped]] = [("engine", task) for task in own_tasks(models, bench.device, names)]
    if fp16_model is not None:
        tasks += [("other generation", task) for task in other_tasks(fp16_model, bench.device, names)]
    for kind, task in tasks:
        if isinstance(task, Skipped):
            bench.say(f"{task.name}: {'refused' if task.refused else 'skipped'}, {task.reason}")
            bench.add(bench.skipped, replace(task, kind=kind))
        else:
            bench.add(bench.tries, _try_engine(bench, kind, task))
    for model in models:
        for peer in bench.asked.peers:
            bench.add(bench.tries, _try_peer(bench, peer, model))


def _models(bench: _Bench) -> Iterator[KitModel]:
    """Write the models, and for each a golden set with float64 outputs, which all precisions share."""
    for name in bench.asked.models:
        kit_models = [write(name, precision, bench.asked.size, bench.folder) for precision in bench.asked.precisions]
        folder = bench.folder / f"cases-{name}"
        folder.mkdir()
        model = write(name, "fp32", bench.asked.size, folder)
        session = DoubleSession(model.path)
        golden = freeze([model.sample(model.batch.opt)], model.inputs, [model.batch], session.run)
        save_cases(golden, digest_of({"kit": digest_of_file(model.path)}), folder)
        for kit_model in kit_models:
            bench.cases[model_key(kit_model)] = folder
            yield kit_model


def _count_costs(model: KitModel, roofs: Peaks | None) -> ModelCosts:
    """The costs of a model's run at each batch, and its least time by the roofs."""
    rows = []
    for batch in sorted({model.batch.min, model.batch.opt, model.batch.max}):
        costs = graph_costs(model.path, model.inputs, {"batch": batch})
        operations = 2 * sum(cost.macs for cost in costs.costs)
        moved_bytes = count_crossing_bytes(costs.nodes, costs)
        least_s = roofs.least_s(operations, moved_bytes, _KINDS[model.precision]) if roofs else None
        rows.append(BatchCosts(batch, operations, moved_bytes, least_s))
    return ModelCosts(model_key(model), tuple(rows))


def _try_peer(bench: _Bench, peer: Peer, model: KitModel) -> KitTrial:
    target, key = bench.device.target, model_key(model)
    request = BuildRequest("", model.precision, target, "torch", model.inputs, model.outputs, (model.profile,))
    job = TryPeer(peer, request, model.path, bench.cases[key], bench.terms())
    trial_outcome = bench.try_(f"{PEERS[peer]}, {key}", job)
    return KitTrial(
        **vars(trial_outcome),
        kind="peer",
        model=key,
        precision=model.precision,
        backend=peer,
        built_for=target.name,
        options={},
    )


def _try_engine(bench: _Bench, kind: str, task: BuildTask) -> KitTrial:
    peers, request, key = bench.asked.peers, task.request, model_key(task.model)
    compared_peers: Sequence[Peer] = list(dict.fromkeys([*peers[:1], *peers[-1:]])) if kind == "engine" else ()
    case_args = (task.model.path, bench.cases[key])
    job = TryEngine(request, dict(task.options), bench.device.target, *case_args, bench.terms(compared_peers))
    trial_outcome = replace(bench.try_(task.name, job), versions=dict(request.toolchain))
    return KitTrial(
        **vars(trial_outcome),
        kind=kind,
        model=key,
        precision=request.precision,
        backend=request.backend,
        built_for=request.target.name,
        options=dict(task.options),
    )


def _prove_folder(bench: _Bench, bundle: OfflineBundle) -> Iterator[OfflineTrial]:
    """Try a folder's engines, those of an ensemble's graphs first; skip engines that cannot run here, with a reason."""
    for graph in bundle.graphs.values():
        yield from _prove_folder(bench, graph)
    _, golden = load_cases(bundle.folder)
    root, own_target = bundle.folder.resolve(), bench.device.target
    for engine in bundle.engines:
        proof = ProveBundled(_resolve(engine), root, bench.terms())
        key, unit = engine.request.key, engine.request.unit
        yield _prove_one(bench, bundle, golden, (engine.digest, key, unit), _cannot(engine, own_target), proof)
    for ensemble in bundle.ensembles:
        engines = {node.name: _resolve(bundle.engine(node)) for node in ensemble.nodes}
        reasons = [
            f"graph {name!r}: {reason}" for name, engine in engines.items() if (reason := _cannot(engine, own_target))
        ]
        job = ProveBundledEnsemble(ensemble, engines, root, bench.terms())
        yield _prove_one(bench, bundle, golden, (ensemble.digest, "", ensemble.unit), "".join(reasons[:1]), job)


def _resolve(engine: Engine) -> Engine:
    return replace(engine, path=engine.path.resolve())


def _prove_one(
    bench: _Bench,
    bundle: OfflineBundle,
    golden: str,
    engine: tuple[str, str, str],
    reason: str,
    proof: Request[TrialOutcome],
) -> OfflineTrial:
    """The try of one engine. engine: its digest, build key and unit.  reason: why the engine is skipped, or ''."""
    name, started_at = f"{bundle.model}@{bundle.version} {engine[2]}", now()
    if reason:
        bench.say(f"{name}: skipped, {reason}")
        trial_outcome = TrialOutcome(outcome="skipped", reason=reason)
    else:
        trial_outcome = bench.try_(name, proof)
    return OfflineTrial(
        **vars(trial_outcome),
        model=bundle.model,
        version=bundle.version,
        manifest=bundle.manifest,
        golden=golden,
        engine=engine[0],
        build_key=engine[1],
        unit=engine[2],
        created_at=started_at,
    )


def _cannot(engine: Engine, own_target: Target) -> str:
    """The reason why an engine cannot run on this device; '' if it can."""
    try:
        backend = backends.configure(engine.request.backend, dict(engine.request.options))
    except EnginesmithError as error:
        return str(error)
    if engine.request.target.is_cpu != own_target.is_cpu:
        return f"it is for {engine.request.target.name}, but this run is for {own_target.name}"
    return find_incompatibility(backend, engine.request) or ""
