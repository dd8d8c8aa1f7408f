"""Proofs of published ensembles on this machine: each of their graphs, and then the whole from end to end."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from builders.execution.workdir import workdir
from enginesmith.core.codec import decode
from enginesmith.core.constraints import Json
from enginesmith.core.errors import IntegrityError
from enginesmith.core.types import PRECISIONS
from enginesmith.registry.ensembles import functions_of, load_pinned, pinned_engines
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.additions import add_attestation
from pipeline.compile.ensembles.chain import ChainedGraph
from pipeline.compile.ensembles.connections import read_data
from pipeline.compile.ensembles.proof import prove
from pipeline.compile.ensembles.publication import GOLDEN, BuiltEnsemble, report_on, request_proof
from pipeline.compile.ensembles.units import EnsembleUnit
from pipeline.compile.run_context import RunContext
from pipeline.operations.revalidate import Attested, entries_of, revalidate, spec_of, why_not_here
from pipeline.spec.ensembles.model import EnsembleSpec, LoadedEnsemble


def revalidate_ensemble(
    manifest: Manifest,
    context: RunContext,
    targets: Collection[str] | None = None,
    engines: Collection[str] | None = None,
    again: bool = True,
) -> Iterator[Attested]:
    """Run each engine of an ensemble that can run here from end to end, once those of its graphs are proven here, and
    attach a report to it; say of the others why not. Reports on graphs are attached to their versions.

    targets, engines, again: as of `revalidate`, which says what is raised.
    """
    with workdir() as folder:
        built = read_ensemble(manifest, context.store, folder)
        for entry in entries_of(manifest, context.store, targets, engines):
            if not again and entry.status != "unproven":
                yield Attested(entry, entry.status, entry.reason)
                continue
            yield _prove(entry, manifest, built, context)


def ensemble_not_here(store: Store, manifest: Manifest, entry: EngineEntry) -> str | None:
    """Why an engine of an ensemble cannot be run here, which is why that of a graph cannot; None when it can."""
    for graph, _, engine in pinned_engines(store, manifest, entry):
        if reason := why_not_here(engine):
            return f"graph {graph.name!r}: {reason}"
    return None


def read_ensemble(manifest: Manifest, store: Store, folder: Path) -> BuiltEnsemble:
    """What an ensemble was published from. folder: for its golden data. Raises IntegrityError for what is lost, and for
    a spec that this installation cannot read."""
    try:
        files = decode(manifest.spec.get("graphs"), dict[str, Json], "spec.graphs")
        # JSON in the registry has its keys sorted; the order of the data flow is that of the pins.
        ordered = {graph.name: files[graph.name] for graph in manifest.graphs}
        spec = EnsembleSpec.model_validate({**manifest.spec, "graphs": ordered})
        digest = manifest.sources[GOLDEN]
    except (ValidationError, KeyError) as error:
        raise IntegrityError(f"{manifest.model}@{manifest.version} is no whole ensemble: {error}; build it") from error
    versions = {graph.name: load_pinned(store, graph) for graph in manifest.graphs}
    loaded = LoadedEnsemble(spec, {name: spec_of(pinned) for name, pinned in versions.items()})
    functions = {item.name: ChainedGraph.of_function(item) for item in functions_of(manifest)}
    chain = tuple(functions.get(name) or _graph(name, versions[name], loaded) for name in loaded.wiring())
    path = folder / f"golden{Path(spec.golden.data).suffix}"
    store.fetch(digest, path)
    outputs = next(entry.outputs for entry in manifest.engines)
    golden = read_data(loaded, spec.golden, (path, digest), spec.golden.labels)
    return BuiltEnsemble(loaded, versions, chain, golden, outputs)


def _graph(name: str, pinned: Manifest, loaded: LoadedEnsemble) -> ChainedGraph:
    outputs = next((entry.outputs for entry in pinned.engines if entry.outputs), ())
    return ChainedGraph(name, pinned.onnx, loaded.tensors(name), outputs, loaded.wiring()[name])


def _prove(entry: EngineEntry, manifest: Manifest, built: BuiltEnsemble, context: RunContext) -> Attested:
    parts = list(pinned_engines(context.store, manifest, entry))
    if reason := ensemble_not_here(context.store, manifest, entry):
        return Attested(entry, entry.status, reason)
    for graph, pinned, engine in parts:
        for found in revalidate(pinned, context, [engine.target], [str(engine.digest)], again=False):
            if found.entry.unit == engine.unit and found.verdict != "proven":
                return Attested(entry, found.verdict, f"graph {graph.name!r}: {found.reason}")
    unit = unit_of(entry, {graph.name: engine for graph, _, engine in parts})
    proof = prove(request_proof(unit, built), unit.name, context, afresh=True)
    report = report_on(entry, built.golden.digest, proof, None)
    return Attested(entry, report.verdict, report.reason, add_attestation(context.store, manifest, report))


def unit_of(entry: EngineEntry, engines: Mapping[str, EngineEntry]) -> EnsembleUnit:
    """The unit that an entry of an ensemble was made of. engines: of its graphs."""
    precision = next(each for each in PRECISIONS if each == entry.precision)
    return EnsembleUnit(entry.hardware, precision, engines, {})
