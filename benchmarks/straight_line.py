"""The main job as a script would do it: one process, one step after the other, no registry, no records, no isolation.

It calls the same functions as the pipeline for the same spec, so the difference is what the pipeline itself costs.
Usage: python benchmarks/straight_line.py SPEC FOLDER
"""

import sys
from pathlib import Path

import onnx

from builders.backends import discovery
from builders.backends.onnxruntime import OrtSession
from builders.backends.request_checks import profiles
from enginesmith.core.errors import EnginesmithError, digest_of_file
from enginesmith.core.types import BuildRequest, Engine
from pipeline.compile.plan import PlanCandidate, candidates
from pipeline.compile.steps.keys import metrics_of
from pipeline.quantization.insertion_points import activations, prepare_model, tensors_to_measure
from pipeline.quantization.schemes.cast import emulate
from pipeline.quantization.schemes.write import write
from pipeline.quantization.statistics.methods import MINMAX, ranges
from pipeline.quantization.statistics.observations import Observations
from pipeline.quantization.statistics.observe import observe
from pipeline.sources.export import export
from pipeline.sources.onnx_model import save_onnx, specs_of
from pipeline.sources.request import ExportRequest
from pipeline.spec.model import ModelSpec, load_spec
from pipeline.values import GraphVariant, Selection
from validation.comparison.sessions import drift_checks
from validation.comparison.tasks import task_checks
from validation.data.samples import Samples
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import default_budget


def main(spec_path: Path, folder: Path) -> None:
    """Export, calibrate, quantize, build and check; leave the engines in `folder`."""
    spec = load_spec(spec_path)
    model, golden = exported(spec, folder)
    seen_observations = calibrated(spec, model)
    graphs: dict[GraphVariant, Path] = {}
    for item in candidates(spec, Selection()):
        if item.variant not in graphs:
            graphs[item.variant] = written(spec, item.variant, model, seen_observations, golden, folder)
        try:
            build_and_check(spec, item, graphs[item.variant], golden, folder)
        except EnginesmithError as error:
            print(f"{item.target.name} {item.precision}: {error}", file=sys.stderr)


def exported(spec: ModelSpec, folder: Path) -> tuple[Path, GoldenSet]:
    source, golden = spec.source, spec.golden
    request = ExportRequest(
        source.kind,
        spec.folder,
        spec.source_file,
        spec.tensors(),
        spec.named_dims(),
        spec.outputs,
        source.function,
        source.arguments,
        source.weights,
        source.opset,
    )
    labels = (golden.labels,) if golden and golden.labels else ()
    samples = Samples.open(spec.file(golden.data), spec.tensors(), spec.named_dims(), labels) if golden else None
    column = samples.column(labels[0]) if samples and labels else None
    done_export = export(request, samples, column, folder)
    return done_export.onnx, GoldenSet.load(done_export.golden)


def calibrated(spec: ModelSpec, model: Path) -> Observations:
    graph = prepare_model(onnx.load(model))
    samples = Samples.open(spec.file(spec.calibration.data), spec.tensors(), spec.named_dims())
    return observe(model, samples, activations(graph), histograms=tensors_to_measure(graph))


def written(
    spec: ModelSpec, variant: GraphVariant, model: Path, seen: Observations, golden: GoldenSet, folder: Path
) -> Path:
    """The graph of a variant, compared with the fp32 graph."""
    if variant.precision == "fp32":
        return model
    activation = variant.scheme.activation if variant.scheme else "int8"
    graph, _ = write(onnx.load(model), variant.precision, variant.scheme, ranges(seen, MINMAX, activation))
    path = folder / f"{variant.precision}-{activation}.onnx"
    save_onnx(graph, path)
    check(spec, "quantization", variant.precision, model, shown(path, variant.precision), golden)
    return path


def shown(path: Path, precision: str) -> Path:
    """What the CPU can run in the graph's place, as the pipeline does."""
    if precision == "fp32":
        return path
    emulated_path = path.with_suffix(".emulated.onnx")
    onnx.save(emulate(onnx.load(path)), emulated_path)
    return emulated_path


def check(spec: ModelSpec, stage: str, precision: str, expected: Path, actual: Path, golden: GoldenSet) -> None:
    with OrtSession(expected, optimized=False) as session, OrtSession(actual, optimized=False) as right_session:
        drift_checks(stage, session, right_session, golden, default_budget(stage, precision))
        task_checks(right_session, golden, metrics_of(spec))


def build_and_check(spec: ModelSpec, item: PlanCandidate, graph: Path, golden: GoldenSet, folder: Path) -> None:
    inputs, outputs = specs_of(onnx.load(graph))
    request = BuildRequest(
        digest_of_file(graph),
        item.precision,
        item.target,
        item.backend.name,
        inputs,
        outputs,
        tuple(profiles(inputs, spec.named_dims())),
        discovery.options_of(item.backend),
        tuple(sorted(item.backend.versions().items())),
    )
    if item.backend.refuses(request):
        return
    workdir = folder / request.unit.replace(" ", "-")
    workdir.mkdir()
    engine: Engine = item.backend.build(request, graph, workdir)
    if item.backend.runs(item.target) is None:
        with item.backend.open(engine) as actual, OrtSession(shown(graph, item.precision), optimized=False) as expected:
            drift_checks("engine", expected, actual, golden, default_budget("engine", item.precision))
            task_checks(actual, golden, metrics_of(spec))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
