"""What a version was made of and what stands beside it: the names and digests that its manifest keeps."""

from collections.abc import Sequence

from enginery.core.digest import digest_of_path
from enginery.registry.evidence.build_details import LAYERS, RECIPE, RECORD
from pipeline.compile.verdict import JudgedUnit
from pipeline.spec.model import ModelSpec
from pipeline.values import BuildPlan, Graph
from validation.attribution.result import ATTRIBUTION

# Entries of a manifest's provenance: the engine whose kernels another has, with other weights.
REFITTED = "refitted from"


def graphs_of(plan: BuildPlan) -> list[Graph]:
    """The graphs of a plan's units, each once."""
    return list({unit.graph.flavour: unit.graph for unit in plan.units}.values())


def records(graphs: Sequence[Graph]) -> dict[str, str]:
    """What quantizing did, per graph."""
    return {f"{RECORD} {graph.flavour.name}": graph.record for graph in graphs if graph.record}


def recipes(graphs: Sequence[Graph]) -> dict[str, str]:
    """How the graphs were written, with the float models that a search wrote: for attribution, which rewrites them."""
    known = [(graph.flavour.name, graph.recipe) for graph in graphs if graph.recipe]
    found = {f"{RECIPE} {flavour}": recipe.digest for flavour, recipe in known}
    return found | {f"searched model of {flavour}": recipe.model for flavour, recipe in known if recipe.model}


def attributions(judged: Sequence[JudgedUnit]) -> dict[str, str]:
    """Which node drifted, per graph and engine that failed."""
    found = [item for each in judged for item in each.attributed]
    return {f"{ATTRIBUTION} {item.name}": item.digest for item in found if item.digest}


def layers(judged: Sequence[JudgedUnit]) -> dict[str, str]:
    """What compilers tell of the layers, per engine."""
    known = [(item.built.unit.name, dict(item.built.extras)) for item in judged if item.built.digest]
    return {f"{LAYERS} {unit}": extras["layers"] for unit, extras in known if "layers" in extras}


def list_refitted(judged: Sequence[JudgedUnit]) -> dict[str, str]:
    """The engines whose kernels these have."""
    built = [item.built for item in judged if item.built.digest]
    return {f"{REFITTED} {item.unit.name}": item.refitted_from for item in built if item.refitted_from}


def scales(graphs: Sequence[Graph]) -> dict[str, str]:
    """The scales of each int8 graph: one method chooses other ranges for other schemes."""
    return {f"scales {graph.flavour.name}": graph.scales for graph in graphs if graph.scales}


def data_digests(spec: ModelSpec) -> dict[str, str]:
    """The files that a spec names."""
    files = {
        "source": spec.source.file,
        "weights": spec.source.weights,
        "calibration data": spec.calibration.file if spec.calibration else None,
        "golden data": spec.golden.data if spec.golden else None,
    }
    return {name: digest_of_path(spec.file(file)) for name, file in files.items() if file}
