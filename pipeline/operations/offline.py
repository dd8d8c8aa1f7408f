"""Proofs from GPU machines that reach no registry: the folder of engines to take there, and judging what comes back.

What the results say of themselves is checked where it can be: engine, build key, golden set and manifest against the
registry, the device against the engine's target, the time against the version's. Drift is measured here, between the
recorded answers and the graph that the engine was built from, under this version's limits, so that a changed verdict,
number or limit in the file has no effect. What cannot be checked is that the answers came from that engine on that GPU:
whoever can compute the model can make up answers that fit.
"""

import math
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from builders.execution.jobs import Job, WorkerContext
from builders.execution.process import run_job
from enginery.core.errors import DataError, InputError, IntegrityError, UnknownNameError
from enginery.core.hardware.gpu_generations import product_of
from enginery.core.names import Reference
from enginery.core.parsing import parse_json
from enginery.core.reports.proof import Check
from enginery.core.types import CPU_KIND, BuildRequest
from enginery.registry.ensembles import require_model
from enginery.registry.evidence.attestations import attest, judge_entries
from enginery.registry.manifest import EngineEntry, Manifest, request_of
from enginery.registry.store.base import Store, open_store
from enginery.registry.trust import require
from enginery.registry.versions.lookup import locate
from pipeline.compile.steps.blobs import fetch, fetch_graph, golden_set, proof_of, runnable
from pipeline.compile.steps.drift_limits import engine_drift_limits
from pipeline.compile.steps.keys import engine_limits, limits_of, metrics_of
from pipeline.compile.steps.proofs import CRASHED, contract_of, padding_rules
from pipeline.operations.revalidate import as_built, published_proof, spec_of
from pipeline.outcome import make_report
from pipeline.spec.model import ModelSpec
from pipeline.values import Proof
from validation.golden.golden_set import GoldenSet
from validation.gpu.cases import Answers, save_cases
from validation.gpu.devices import KitDevice
from validation.gpu.offline_bundle import BundledEngine, OfflineBundle
from validation.gpu.results import MAX_BYTES, OfflineTrial, Results
from validation.metrics.tasks.terms import TaskMetric

# Clocks differ by less than this.
_CLOCKS = timedelta(minutes=10)
_BROKE = ("load failed", "run failed", "crashed")


def write_offline_bundle(
    store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None = None
) -> OfflineBundle:
    """Write a version's engines and golden cases into a folder, for `python -m validation.gpu --carry` on a machine
    with torch, numpy and onnx; see `validation.gpu.offline_bundle`.

    targets: names of the targets to keep to; None for all. Raises InputError for a folder that holds something, and for
    engines without weights of their own, UnknownNameError where no engine is left, IntegrityError for a damaged blob.
    """
    require_model(manifest)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a folder that is, or that is not there yet")
    chosen = [
        entry
        for entry in judge_entries(store, manifest)
        if entry.digest is not None and (targets is None or entry.target in targets)
    ]
    if not chosen:
        raise UnknownNameError(
            f"{manifest.model}@{manifest.version} has no engine to carry{' for that target' if targets else ''}; "
            f"`enginery show {manifest.model}@{manifest.version}` lists what it has"
        )
    if stripped := [entry.unit for entry in chosen if entry.is_stripped]:
        raise InputError(
            f"{', '.join(stripped)}: without weights of its own, which it takes from the registry; "
            "prove it on a node that reaches that, or carry other targets"
        )
    place = folder / "engines"
    place.mkdir(parents=True)
    engines = {}
    for entry in chosen:
        digest = str(entry.digest)
        fetch_one = fetch_graph if entry.suffix == ".onnx" else fetch
        path = fetch_one(store, digest, place / f"{digest}{entry.suffix or ''}")
        engines[digest] = BundledEngine(digest, request_of(entry), path)
    golden = fetch(store, manifest.golden, folder / "golden.safetensors")
    save_cases(GoldenSet.load(golden), manifest.golden, folder)
    golden.unlink()
    about = (manifest.model, manifest.version, manifest.digest, manifest.golden)
    made = OfflineBundle(*about, tuple(engines.values()), folder)
    made.save()
    return made


@dataclass(frozen=True)
class CheckRecording:
    """Measure the drift of recorded answers: the engine stage of `CheckEngine`, without running the engine.

    request: what the engine was built from.  golden: digest of the golden set.  limits: the spec's, by metric.
    answers: as `validation.gpu.cases.ReplaySession` gives them.
    """

    request: BuildRequest
    golden: str
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...]
    answers: Answers

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises IntegrityError for an answer that is damaged or missing: it says nothing of the engine."""
        from builders.reference import ReferenceSession
        from validation.comparison.sessions import drift_checks, run
        from validation.gpu.cases import ReplaySession
        from validation.metrics.tally import Spreads

        place, spreads = open_store(context.store), Spreads()
        wanted, workdir = self.request, context.workdir
        frozen = golden_set(place, self.golden, workdir)
        actual = ReplaySession(wanted.inputs, wanted.outputs, self.answers)
        for case in frozen.cases:
            try:
                run(actual, case.inputs)
            except DataError as error:
                raise IntegrityError(f"case {case.name!r}: {error}") from error
        graph = runnable(fetch_graph(place, wanted.model, workdir / "graph.onnx"), wanted.precision)
        with ReferenceSession(graph) as expected:
            held = engine_drift_limits(graph, expected, wanted, frozen, self.limits, workdir)
            checks = drift_checks("engine", expected, actual, frozen, held, spreads)
            return proof_of(checks, actual, frozen, self.metrics, "engine", spreads.at("engine"))


@dataclass(frozen=True)
class Imported:
    """One engine's result. verdict: 'proven' or 'failed', with the digest of the attached report; 'unproven' where it
    was not run; 'refused' where the results cannot be of this engine, for that reason."""

    reference: str
    unit: str
    verdict: str
    reason: str
    report: str | None = None


class _Refused(Exception):  # noqa: N818 - an answer about the results, not a bug
    """Why results are not believed."""


def import_file(store: Store, path: Path) -> list[Imported]:
    """Judge the engines of a results file, and attach the reports. Raises IntegrityError for a file that the kit did
    not write, that is not whole, or that holds no carried engine."""
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        results = Results.from_json(parse_json(data, MAX_BYTES))
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}") from error
    if not results.carried:
        raise IntegrityError(
            f"{path} holds no carried engines; run the kit with --carry FOLDER, which `enginery validate REF --carry "
            "FOLDER` writes"
        )
    return list(import_results(store, results))


def import_results(store: Store, results: Results) -> Iterator[Imported]:
    """Judge each carried engine, and attach the reports. Raises IntegrityError for a damaged registry."""
    for item in results.carried:
        reference, unit = f"{item.model}@{item.version}"[:200], item.unit[:200]
        if item.outcome in ("skipped", "not finished"):
            yield Imported(reference, unit, "unproven", f"not run there: {str(item.reason)[:300]}")
            continue
        try:
            yield _import_entry(store, results, item, reference)
        except _Refused as refused:
            yield Imported(reference, unit, "refused", str(refused))


def _import_entry(store: Store, results: Results, item: OfflineTrial, reference: str) -> Imported:
    manifest = locate(store, Reference(item.model, item.version)).manifest
    require(store, manifest)
    entry = _find_entry(manifest, item)
    _check_device(entry, results.device)
    _check_time(manifest, item.created_at)
    spec = spec_of(manifest)
    own_runs = {
        "promises a contract": contract_of(spec),
        "hands its state from step to step": spec.state,
        "lets servers pad": padding_rules(spec),
    }
    if what := next((words for words, asked in own_runs.items() if asked), None):
        raise _Refused(
            f"{reference} {what}, which takes runs of its own; `enginery validate {reference}` on a node with that GPU "
            "shows it"
        )
    proof, device = _prove(store, manifest, entry, spec, item), results.device
    said = {"device_name": device.name, "device_driver": device.driver, "device_cuda": device.cuda}
    host = {**{name: value[:200] for name, value in results.host.items()}, **said}
    cpu = host.get(CPU_KIND, "a CPU of unknown kind")
    report = make_report(as_built(entry), manifest.golden, [published_proof(entry, store), proof], None, cpu)
    versions = {name: value[:100] for name, value in (item.versions or {}).items()}
    reason = f"{report.reason}; answers recorded on {device.name}, judged here"
    attached = replace(report, created_at=item.created_at, host=host, versions=versions, reason=reason)
    return Imported(reference, entry.unit, report.verdict, report.reason, attest(store, manifest, attached))


def _find_entry(manifest: Manifest, item: OfflineTrial) -> EngineEntry:
    """The engine that the results are about, by digest. Raises _Refused where they are of something else."""
    entry = next((entry for entry in manifest.engines if entry.digest == item.engine), None)
    if entry is None:
        raise _Refused(f"this version has no engine {item.engine[:80]}; was it published anew since?")
    pairs = {
        "manifest": (item.manifest, manifest.digest),
        "golden set": (item.golden, manifest.golden),
        "build key": (item.build_key, request_of(entry).key),
    }
    for what, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise _Refused(f"its {what} is {theirs[:80]}, and this version's {ours}; carry the version anew")
    return entry


def _check_device(entry: EngineEntry, device: KitDevice) -> None:
    """Raise _Refused where the engine is not for the device that it ran on."""
    capability = device.compute_capability
    if capability != entry.compute_capability:
        said = "a CPU" if capability is None else "sm_{}".format("".join(map(str, capability)))
        raise _Refused(f"it ran on {said}, and the engine is for {entry.target}; run the kit on a node that has one")
    if capability is not None and entry.product and product_of(capability, device.label) != entry.product:
        raise _Refused(f"it ran on {device.name[:80]}, and the engine is tuned for {entry.product}")


def _check_time(manifest: Manifest, stated: str) -> None:
    """Raise _Refused for a time before the version was published, or yet to come."""
    try:
        when, published = (datetime.fromisoformat(text) for text in (stated, manifest.created_at))
        early, late = when < published - _CLOCKS, when > datetime.now(UTC) + _CLOCKS
    except (ValueError, TypeError) as error:
        raise _Refused(f"it was made at {stated[:40]!r}, which is no time with a zone") from error
    if early or late:
        raise _Refused(f"it was made at {stated}, {'before this version was' if early else 'which is yet to come'}")


def _prove(store: Store, manifest: Manifest, entry: EngineEntry, spec: ModelSpec, item: OfflineTrial) -> Proof:
    """The engine stage: measured from the recorded answers, or a failed check where the engine broke there."""
    if item.outcome in _BROKE:
        return Proof((replace(CRASHED, note=str(item.reason)[:1000]),))
    if item.outcome not in ("passed", "wrong") or item.answers is None:
        raise _Refused(f"its outcome is {item.outcome[:40]!r}, which this version does not know")
    request = request_of(entry)
    limits = limits_of(spec, request.precision, "engine")
    check = CheckRecording(request, manifest.golden, limits, metrics_of(spec, request.precision), item.answers)
    with tempfile.TemporaryDirectory(prefix="enginery-import-") as folder:
        try:
            found = run_job(Job(f"judge {entry.unit}", check, store.uri, engine_limits(spec, "proof")), Path(folder))
        except IntegrityError as error:
            raise _Refused(str(error)) from error
    if not entry.hardware.is_cpu and _equals_reference(found.checks):
        raise _Refused(
            "its answers are those of the CPU's reference, bit for bit in every case, where a GPU's differ in the last "
            "places; run `enginery validate` on a node with that GPU"
        )
    return found


def _equals_reference(checks: tuple[Check, ...]) -> bool:
    """Whether every output in floating point has an infinite SQNR, which another device's arithmetic does not give."""
    found = [check.value for check in checks if check.joint == "engine" and check.name == "sqnr_db"]
    return bool(found) and all(value is not None and math.isinf(value) for value in found)
