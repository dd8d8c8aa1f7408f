"""Writes the folder that `python -m validation.gpu --carry` takes: the engines of a version, of a model or of an
ensemble, and what proves them."""

from collections.abc import Collection, Iterable
from pathlib import Path

from builders.execution.workdir import workdir
from enginesmith.core.codec import decode
from enginesmith.core.constraints import Json
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.registry.ensembles import pinned_engines
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.store.base import Store
from pipeline.compile.ensembles.whole import WholeData
from pipeline.compile.steps.blobs import fetch, fetch_graph
from pipeline.compile.steps.proofs import contract_of, padding_rules
from pipeline.operations.revalidate import read_ensemble, spec_of
from pipeline.spec.model import ModelSpec
from validation.golden.golden_set import Case, GoldenSet
from validation.gpu.cases import save_cases
from validation.gpu.offline_bundle import BundledEngine, BundledEnsemble, BundledNode, OfflineBundle


def write_offline_bundle(
    store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None = None
) -> OfflineBundle:
    """Write a version's engines and golden cases into a folder, for `python -m validation.gpu --carry` on a machine
    with torch, numpy and onnx; see `validation.gpu.offline_bundle`.

    targets: names of the targets to keep to; None for all. Raises InputError for a folder that holds something, for a
    version with a contract and for engines without weights of their own, UnknownNameError where no engine is left,
    IntegrityError for a damaged blob.
    """
    require_empty(folder)
    if manifest.graphs:
        return _write_whole(store, manifest, folder, targets)
    chosen = choose_engines(manifest, judge_entries(store, manifest), targets)
    return write_engines(store, manifest, folder, chosen)


def require_empty(folder: Path) -> None:
    """Raise InputError for a folder that holds something."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a folder that is, or that is not there yet")


def choose_engines(
    manifest: Manifest, entries: Iterable[EngineEntry], targets: Collection[str] | None
) -> list[EngineEntry]:
    """Those of a version's engines that are for these targets. Raises UnknownNameError where none is."""
    chosen = [entry for entry in entries if entry.digest and (targets is None or entry.target in targets)]
    if not chosen:
        raise UnknownNameError(
            f"{manifest.model}@{manifest.version} has no engine to carry{' for that target' if targets else ''}; "
            f"`enginesmith show {manifest.model}@{manifest.version}` lists what it has"
        )
    return chosen


def own_runs(spec: ModelSpec) -> str:
    """What a spec asks that takes runs of its own, and cannot be proven by recorded answers; '' for nothing."""
    asked = {"promises a contract": contract_of(spec), "lets servers pad": padding_rules(spec)}
    return next((words for words, terms in asked.items() if terms), "")


def require_carriable(manifest: Manifest, spec: ModelSpec, chosen: Collection[EngineEntry]) -> None:
    """Raise InputError for a version with `own_runs`, and for engines without weights of their own."""
    if what := own_runs(spec):
        raise InputError(
            f"{manifest.model}@{manifest.version} {what}, which takes runs that are judged while they are made; "
            "run `enginesmith validate` on a node with its GPU that reaches the registry"
        )
    if stripped := [entry.unit for entry in chosen if entry.is_stripped]:
        raise InputError(
            f"{', '.join(stripped)}: without weights of its own, which it takes from the registry; "
            "prove it on a node that reaches that, or carry other targets"
        )


def write_engines(store: Store, manifest: Manifest, folder: Path, chosen: Collection[EngineEntry]) -> OfflineBundle:
    """Write these engines of a version, and what proves them. Raises as `require_carriable`."""
    spec = spec_of(manifest)
    require_carriable(manifest, spec, chosen)
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


def _write_whole(store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None) -> OfflineBundle:
    """The engines of an ensemble's graphs, a folder for each graph, with the golden data of the whole. Raises
    InputError for functions between the graphs too."""
    if named := ", ".join(map(repr, decode(manifest.spec.get("functions", {}), dict[str, Json], "spec.functions"))):
        raise InputError(
            f"{manifest.model}@{manifest.version} runs code of its own between its graphs (functions {named}), which "
            "takes the packages and the machine that it is written for: run `enginesmith validate` on a node with that "
            "GPU that reaches the registry; or carry one of its graphs"
        )
    chosen = choose_engines(manifest, judge_entries(store, manifest), targets)
    parts = {entry.unit: list(pinned_engines(store, manifest, entry)) for entry in chosen}
    versions: dict[str, tuple[Manifest, dict[str, EngineEntry]]] = {}
    for graph, pinned, engine in (part for found in parts.values() for part in found):
        versions.setdefault(graph.name, (pinned, {}))[1][engine.unit] = engine
    for name, (pinned, engines) in versions.items():
        spec = spec_of(pinned)
        require_carriable(pinned, spec, engines.values())
        if spec.states():
            raise InputError(
                f"{manifest.model}@{manifest.version}: graph {name!r} has state, and sequences of several graphs are "
                "not carried: run `enginesmith validate` on a node with that GPU that reaches the registry; or carry "
                "one of its graphs"
            )
    graphs = {
        name: write_engines(store, pinned, folder / "graphs" / name, engines.values())
        for name, (pinned, engines) in versions.items()
    }
    with workdir() as place:
        whole = read_ensemble(manifest, store, place).golden
        save_cases(_cases(whole), whole.digest, folder)
    ensembles = tuple(
        BundledEnsemble(
            entry.unit,
            str(entry.digest),
            tuple(BundledNode(graph.name, str(engine.digest), graph.sources) for graph, _, engine in parts[entry.unit]),
            entry.inputs,
            entry.outputs,
        )
        for entry in chosen
    )
    about = manifest.model, manifest.version, manifest.digest, whole.digest
    made = OfflineBundle(*about, (), folder, ensembles, graphs)
    made.save()
    return made


def _cases(whole: WholeData) -> GoldenSet:
    """The golden data of the whole. What is expected of it lies in the registry."""
    batches = enumerate(whole.open().batches())
    return GoldenSet(tuple(Case(f"golden {index}", "golden", given, {}) for index, given in batches))
