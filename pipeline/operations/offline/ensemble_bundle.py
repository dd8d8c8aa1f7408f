"""Writes the folder that the kit takes of an ensemble, and proves the whole by what its engines answered there."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from builders.execution.jobs import WorkerContext
from builders.execution.workdir import workdir
from enginesmith.core.codec import decode
from enginesmith.core.constraints import Json
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.registry.ensembles import pinned_engines
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from pipeline.compile.ensembles.proof import ProveEnsemble
from pipeline.compile.ensembles.whole import WholeData
from pipeline.operations.offline.bundle import choose_engines, require_carriable, require_empty, write_engines
from pipeline.operations.revalidate import spec_of
from pipeline.operations.revalidate_ensemble import read_ensemble
from pipeline.values import Proof
from validation.golden.golden_set import Case, GoldenSet
from validation.gpu.cases import save_cases
from validation.gpu.offline_bundle import BundledEnsemble, BundledNode, OfflineBundle
from validation.gpu.recording import Answers


def write_ensemble_bundle(
    store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None = None
) -> OfflineBundle:
    """Write the engines of an ensemble's graphs, a folder for each graph, with the golden data of the whole.

    targets: as of `write_offline_bundle`, which says what is raised; InputError for functions between the graphs too.
    """
    require_empty(folder)
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
                "one "
                "of its graphs"
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


@dataclass(frozen=True)
class CheckEnsembleRecording:
    """Measure the drift of an ensemble's recorded answers, as `proof` does with the engines at hand."""

    proof: ProveEnsemble
    answers: Answers

    def run(self, context: WorkerContext) -> Proof:
        """The checks. Raises IntegrityError for an answer that is damaged or missing: it says nothing of the
        engines."""
        from validation.gpu.recording import replay_session

        blobs = self.proof.engines
        engines = {name: replay_session(blob.request, self.answers, name) for name, blob in blobs.items()}
        found = self.proof.compare(engines, context, alone=False)
        if broken := [check for check in found.checks if check.name == "runs" and check.joint == "engine"]:
            raise IntegrityError(f"case {broken[0].case!r}: {broken[0].note}")
        return found
