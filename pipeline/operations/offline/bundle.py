"""Bundles with which a machine without the registry proves engines, and their import."""

import math
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from builders.execution.jobs import Job
from builders.execution.local import workdir
from builders.execution.process import run_job
from enginesmith.core.codec import decode, document_error
from enginesmith.core.errors import InputError, IntegrityError, UnknownNameError
from enginesmith.core.hardware.machine import product_of
from enginesmith.core.names import Reference
from enginesmith.core.parsing import parse_json
from enginesmith.core.reports.proof import PASSED
from enginesmith.core.requirements import Json
from enginesmith.core.types import CPU_KIND, Engine
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest, pinned_engines, request_of
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions.lookup import locate
from pipeline.compile.ensembles.publication import GOLDEN
from pipeline.compile.ensembles.whole import LIMITS, WholeData
from pipeline.compile.steps.blobs import fetch, fetch_graph
from pipeline.compile.steps.keys import engine_limits
from pipeline.compile.steps.proofs import CRASHED, contract_of, padding_rules
from pipeline.operations.validate import PublishedEnsemble, Validated, attach, open_version, read_ensemble, spec_of
from pipeline.spec.model import ModelSpec
from pipeline.values import Proof
from validation.golden.golden_set import Case, GoldenSet
from validation.gpu.cases import save_cases
from validation.gpu.devices import BundledEnsemble, BundledNode, KitDevice, OfflineBundle
from validation.gpu.results import MAX_BYTES, OfflineTrial, Results


def write_offline_bundle(
    store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None = None
) -> OfflineBundle:
    """Write a version's engines and golden cases into a folder, for `python -m validation.gpu --carry` on a machine
    with torch, numpy and onnx; see `validation.gpu.devices`.

    targets: names of the targets to keep to; None for all.
    Raises InputError for a folder that holds something, for a version with a contract and for engines without weights
    of their own, UnknownNameError where no engine is left, IntegrityError for a damaged blob.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name an empty folder or a new one")
    if manifest.graphs:
        return _write_whole(store, manifest, folder, targets)
    entries = choose_engines(manifest, judge_entries(store, manifest), targets)
    return write_engines(store, manifest, folder, entries)


def choose_engines(
    manifest: Manifest, entries: Iterable[EngineEntry], targets: Collection[str] | None
) -> list[EngineEntry]:
    """Those of a version's engines that are for these targets. Raises UnknownNameError where none is."""
    engine_entries = [entry for entry in entries if entry.digest and (targets is None or entry.target in targets)]
    if not engine_entries:
        raise UnknownNameError(
            f"{manifest.reference} has no engine to carry{' for that target' if targets else ''}; "
            f"`enginesmith show {manifest.reference}` lists what it has"
        )
    return engine_entries


def own_runs(spec: ModelSpec) -> str:
    """The promise in a spec that recorded answers cannot prove, because it needs more runs; '' without one."""
    spec_terms = {"promises a contract": contract_of(spec), "lets servers pad": padding_rules(spec)}
    return next((promise for promise, terms in spec_terms.items() if terms), "")


def require_carriable(manifest: Manifest, spec: ModelSpec, engines: Collection[EngineEntry]) -> None:
    """Raise InputError for a version with `own_runs`, and for engines without weights of their own."""
    if obstacle := own_runs(spec):
        raise InputError(
            f"{manifest.reference} {obstacle}, and recorded answers cannot prove that; "
            "run `enginesmith validate` on a node with its GPU that reaches the registry"
        )
    if stripped_units := [entry.unit for entry in engines if entry.is_stripped]:
        raise InputError(
            f"{', '.join(stripped_units)}: an engine without weights takes them from the registry; "
            "prove it on a node that reaches the registry, or carry other targets"
        )


def write_engines(store: Store, manifest: Manifest, folder: Path, entries: Collection[EngineEntry]) -> OfflineBundle:
    """Write these engines of a version, and what proves them. Raises as `require_carriable`."""
    spec = spec_of(manifest)
    require_carriable(manifest, spec, entries)
    engine_folder = folder / "engines"
    engine_folder.mkdir(parents=True)
    engines = {}
    for entry in entries:
        digest = str(entry.digest)
        fetch_one = fetch_graph if entry.suffix == ".onnx" else fetch
        path = fetch_one(store, digest, engine_folder / f"{digest}{entry.suffix or ''}")
        engines[digest] = Engine(request_of(entry), path, digest, path.stat().st_size, path.suffix)
    golden = fetch(store, manifest.golden, folder / "golden.safetensors")
    save_cases(GoldenSet.load(golden), manifest.golden, folder)
    golden.unlink()
    version_fields = (manifest.model, manifest.version, manifest.digest, manifest.golden)
    bundle = OfflineBundle(*version_fields, tuple(engines.values()), folder)
    bundle.save()
    return bundle


def _write_whole(store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None) -> OfflineBundle:
    """The engines of an ensemble's graphs, a folder for each graph, with the ensemble's golden data. Raises InputError
    for functions between the graphs too."""
    if names := ", ".join(map(repr, decode(manifest.spec.get("functions", {}), dict[str, Json], "spec.functions"))):
        raise InputError(
            f"{manifest.reference} runs code of its own between its graphs (functions {names}), which "
            "needs the packages and the machine that it is written for: run `enginesmith validate` on a node with that "
            "GPU that reaches the registry; or carry one of its graphs"
        )
    whole_entries = choose_engines(manifest, judge_entries(store, manifest), targets)
    pins = {entry.unit: list(pinned_engines(store, manifest, entry)) for entry in whole_entries}
    versions: dict[str, tuple[Manifest, dict[str, EngineEntry]]] = {}
    for graph, pinned_manifest, engine in (pin for unit_pins in pins.values() for pin in unit_pins):
        versions.setdefault(graph.name, (pinned_manifest, {}))[1][engine.unit] = engine
    for name, (pinned_manifest, engines) in versions.items():
        spec = spec_of(pinned_manifest)
        require_carriable(pinned_manifest, spec, engines.values())
        if spec.states():
            raise InputError(
                f"{manifest.reference}: graph {name!r} has state, and sequences of several graphs are "
                "not carried: run `enginesmith validate` on a node with that GPU that reaches the registry; or carry "
                "one of its graphs"
            )
    graphs = {
        name: write_engines(store, pinned_manifest, folder / "graphs" / name, engines.values())
        for name, (pinned_manifest, engines) in versions.items()
    }
    with workdir() as scratch_folder:
        whole_data = read_ensemble(manifest, store, scratch_folder).golden
        save_cases(_cases(whole_data), whole_data.digest, folder)
    ensembles = tuple(
        BundledEnsemble(
            entry.unit,
            str(entry.digest),
            tuple(BundledNode(graph.name, str(engine.digest), graph.sources) for graph, _, engine in pins[entry.unit]),
            entry.inputs,
            entry.outputs,
        )
        for entry in whole_entries
    )
    version_fields = manifest.model, manifest.version, manifest.digest, whole_data.digest
    bundle = OfflineBundle(*version_fields, (), folder, ensembles, graphs)
    bundle.save()
    return bundle


def _cases(whole_data: WholeData) -> GoldenSet:
    """The ensemble's golden data; the expected outputs stay in the registry."""
    batches = enumerate(whole_data.open().batches())
    return GoldenSet(tuple(Case(f"golden {index}", "golden", case_inputs, {}) for index, case_inputs in batches))


# Judges the results of engines that were carried to a machine without the registry.
#
# What the results say of themselves is checked where it can be: engine, build key, golden set and manifest against the
# registry, the device against the engine's target, the time against the version's. Drift is measured here, between the
# recorded answers and the graph that the engine was built from, under this version's limits, so that a changed verdict,
# number or limit in the file has no effect. What cannot be checked is that the answers came from that engine on that
# GPU: whoever can compute the model can make up answers that fit.

# Clocks differ by less than this.
_CLOCKS = timedelta(minutes=10)
_BROKE = ("load failed", "run failed", "crashed")


class _Refused(Exception):  # noqa: N818 - an answer about the results, not a bug
    """Why results are not believed."""


def import_file(store: Store, path: Path) -> list[Validated]:
    """Judge the engines of a results file, and attach the reports. Raises IntegrityError for a file that the kit did
    not write, that is not whole, or that holds no carried engine."""
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        results = Results.from_json(parse_json(data, MAX_BYTES))
    except IntegrityError as error:
        raise document_error(str(path), error) from error
    if not results.carried:
        raise IntegrityError(
            f"{path} holds no carried engines; run the kit with --carry FOLDER, which `enginesmith validate REF "
            "--carry FOLDER` writes"
        )
    return list(import_results(store, results))


def import_results(store: Store, results: Results) -> Iterator[Validated]:
    """Judge each carried engine, and attach the reports; 'refused' for results that cannot be of their engine. Raises
    IntegrityError for a damaged registry."""
    for trial in results.carried:
        reference, unit = f"{trial.model}@{trial.version}"[:200], trial.unit[:200]
        if trial.outcome in ("skipped", "not finished"):
            yield Validated(reference, unit, "unproven", f"not run there: {str(trial.reason)[:300]}")
            continue
        try:
            yield _import_entry(store, results, trial)
        except _Refused as error:
            yield Validated(reference, unit, "refused", str(error))


def _import_entry(store: Store, results: Results, trial: OfflineTrial) -> Validated:
    """Judge an engine and attach the report; an ensemble's engine only after those of its graphs are proven."""
    manifest = locate(store, Reference(trial.model, trial.version)).manifest
    require(store, manifest)
    entry = _find_entry(manifest, trial)
    _check_device(entry, results.device)
    _check_time(manifest, trial.created_at)
    for graph, pinned_manifest, engine in pinned_engines(store, manifest, entry) if manifest.graphs else ():
        graph_entry = next(peer for peer in judge_entries(store, pinned_manifest) if peer.unit == engine.unit)
        if graph_entry.status not in PASSED:
            return Validated.of(manifest, entry, graph_entry.status, f"graph {graph.name!r}: {graph_entry.reason}")
    cpu = results.host.get(CPU_KIND, "a CPU of unknown kind")[:200]
    name, answers = f"judge {entry.unit}", trial.answers or {}
    with open_version(manifest, store) as version:
        if isinstance(version, PublishedEnsemble):
            ensemble_check = replace(version.check(entry, store), recorded=answers)
            report = version.judge(entry, _prove(entry, trial, Job(name, ensemble_check, store.uri, LIMITS)), cpu)
        else:
            if trait := own_runs(version.spec):
                raise _Refused(
                    f"{manifest.reference} {trait}, which needs separate runs; run `enginesmith validate "
                    f"{manifest.reference}` on a node with that GPU"
                )
            # Other sizes and repeated calls run as long as time allows, which is not known in advance.
            check = replace(version.check(entry), calls=None, recorded=answers)
            job = Job(name, check, store.uri, engine_limits(version.spec, "proof"))
            report = version.judge(entry, _prove(entry, trial, job), store, cpu)
    device = results.device
    device_fields = {"device_name": device.name, "device_driver": device.driver, "device_cuda": device.cuda}
    host = {**{name: value[:200] for name, value in results.host.items()}, **device_fields}
    versions = {name: value[:100] for name, value in (trial.versions or {}).items()}
    reason = f"{report.reason}; answers recorded on {device.name}, judged here"
    report = replace(report, created_at=trial.created_at, host=host, versions=versions, reason=reason)
    return attach(store, manifest, report)


def _find_entry(manifest: Manifest, trial: OfflineTrial) -> EngineEntry:
    """The engine that has the digest in the results. Raises _Refused if the version has no such engine, or a field
    differs."""
    entry = next((entry for entry in manifest.engines if entry.digest == trial.engine), None)
    if entry is None:
        raise _Refused(f"this version has no engine {trial.engine[:80]}; was it published again since?")
    value_pairs = {
        "manifest": (trial.manifest, manifest.digest),
        "golden set": (trial.golden, manifest.sources.get(GOLDEN) or manifest.golden),
        "build key": (trial.build_key, entry.build_key or ""),
    }
    for fact_name, (trial_value, own_text) in value_pairs.items():
        if trial_value != own_text:
            raise _Refused(
                f"its {fact_name} is {trial_value[:80]}, but this version's is {own_text}; write the folder again with "
                "`enginesmith validate --carry`"
            )
    return entry


def _check_device(entry: EngineEntry, device: KitDevice) -> None:
    capability = device.compute_capability
    if capability != entry.compute_capability:
        hardware = "a CPU" if capability is None else "sm_{}".format("".join(map(str, capability)))
        raise _Refused(
            f"it ran on {hardware}, but the engine is for {entry.target}; run the kit on a node that has one"
        )
    if capability is not None and entry.product and product_of(capability, device.label) != entry.product:
        raise _Refused(f"it ran on {device.name[:80]}, but the engine is tuned for {entry.product}")


def _check_time(manifest: Manifest, made_at: str) -> None:
    """Raise _Refused for a time before the version was published, or yet to come."""
    try:
        ran_at, published_at = (datetime.fromisoformat(text) for text in (made_at, manifest.created_at))
        is_early, is_late = ran_at < published_at - _CLOCKS, ran_at > datetime.now(UTC) + _CLOCKS
    except (ValueError, TypeError, OverflowError) as error:
        raise _Refused(f"it was made at {made_at[:40]!r}, which is not a time with a zone") from error
    if is_early or is_late:
        raise _Refused(f"it is from {made_at}, {'before this version was published' if is_early else 'in the future'}")


def _prove(entry: EngineEntry, trial: OfflineTrial, judge: Job[Proof]) -> Proof:
    """The engine stage: measured from the recorded answers, or a failed check if the engine failed on that machine."""
    if trial.outcome in _BROKE:
        return Proof((replace(CRASHED, note=str(trial.reason)[:1000]),))
    if trial.outcome != "recorded" or trial.answers is None:
        raise _Refused(f"its outcome is {trial.outcome[:40]!r}, which this version does not know")
    with tempfile.TemporaryDirectory(prefix="enginesmith-import-") as folder:
        try:
            proof = run_job(judge, Path(folder))
        except IntegrityError as error:
            raise _Refused(str(error)) from error
    # In floating point another device's arithmetic does not give every output an infinite SQNR.
    sqnr_values = [check.value for check in proof.checks if check.stage == "engine" and check.name == "sqnr_db"]
    is_reference = all(value is not None and math.isinf(value) for value in sqnr_values)
    if sqnr_values and is_reference and not entry.hardware.is_cpu:
        raise _Refused(
            "its answers equal those of the CPU's reference bit for bit in every case, but a GPU's differ in the last "
            "places; run `enginesmith validate` on a node with that GPU"
        )
    return proof
