"""A mix of formats against each one with floats beside it: SQNR at equal modelled cost, in one run.

    python -m benchmarks.bench_formats [SPEC] [--rates sm_120]        # a minute of CPU time for the default

A unit of nvfp4 may have products in nvfp4, fp8, int8, mxfp8 and floats (`search.steps`). The other mixes have fewer
formats. Each row is a latency between that of the mix at its fastest and that of floats, and has
the highest SQNR of each within it. SQNR is that of the outputs on calibration samples which no setting was fitted on,
by graphs that ONNX Runtime computes as GPUs would; latency is modelled by peak rates of the generation, at the sizes
that the spec tunes for.
"""

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import onnx

from enginesmith.core.types import Precision, QuantizationScheme
from pipeline.quantization.insertion_points import activations
from pipeline.quantization.search import trial
from pipeline.quantization.search.quality import SearchClock
from pipeline.quantization.search.rates import PEAKS
from pipeline.quantization.search.trial import FloatSide, FrontierPoint, SearchTarget
from pipeline.quantization.settings.runs import group_runs
from pipeline.quantization.statistics.methods import MINMAX, ranges
from pipeline.quantization.statistics.observe import observe
from pipeline.sources.export import export
from pipeline.sources.request import ExportRequest
from pipeline.spec.model import ModelSpec, load_spec
from validation.data.samples import Samples

SPEC = Path(__file__).parents[1] / "examples" / "digits" / "vit.yaml"
SCHEME = QuantizationScheme("int8", quantize_bias=False, float_precision="fp16")
MIXES: dict[str, tuple[Precision, ...]] = {
    "nvfp4, fp8, int8, mxfp8, floats": ("nvfp4", "fp8", "int8", "mxfp8"),
    "nvfp4, fp8, mxfp8, floats": ("nvfp4", "fp8", "mxfp8"),
    "nvfp4, fp8, floats": ("nvfp4", "fp8"),
    **{f"{name}, floats": (name,) for name in ("nvfp4", "mxfp8", "fp8", "int8")},
}
ROWS = 11


def export_spec(spec: ModelSpec, folder: Path) -> Path:
    source, shapes = spec.source, (spec.tensors(), spec.named_dims())
    labels = [spec.golden.labels] if spec.golden and spec.golden.labels else []
    golden = Samples.open(spec.file(spec.golden.data if spec.golden else ""), *shapes, labels)
    request = ExportRequest(
        source.kind, spec.folder, spec.source_file, *shapes, spec.outputs, source.function, source.arguments,
        source.weights, source.opset,
    )  # fmt: skip
    return export(request, golden, golden.column(labels[0]) if labels else None, folder).onnx


def run_front(side: FloatSide, target: SearchTarget, formats: tuple[Precision, ...], most: int) -> list[FrontierPoint]:
    """Points of the search through these formats, at most so many, all of them run."""
    with mock.patch.object(trial, "list_formats", lambda _: formats):
        (opened_trial,) = trial.open_trials(side, [target], "auto")
    count = len(opened_trial.ranked)
    depths = sorted({round(depth) for depth in np.linspace(0, count, min(count + 1, most))})
    return [opened_trial.point(opened_trial.ranked[:depth]) for depth in depths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?", type=Path, default=SPEC)
    parser.add_argument("--rates", default="sm_120", help="GPU generation whose peak rates model the cost")
    parser.add_argument("--points", type=int, default=100, help="of each mix that are run, at most")
    parser.add_argument("--mixes", nargs="*", default=[*MIXES], choices=[*MIXES], metavar="MIX")
    options = parser.parse_args()
    spec = load_spec(options.spec)
    shapes = spec.tensors(), spec.named_dims()
    with tempfile.TemporaryDirectory() as name:
        model = export_spec(spec, Path(name))
        samples = Samples.open(spec.folder / "calibration.npz", *shapes)
        seen_observations = observe(model, samples, activations(onnx.load(model)), histograms=False)
        runs = group_runs(samples.runs(), *shapes)
        side = FloatSide.of(onnx.load(model), runs, {}, None, None, SearchClock(), Path(name), shapes)
        fronts = {}
        for mix in options.mixes:
            start_s, formats, peaks = time.process_time(), MIXES[mix], PEAKS[options.rates].with_floats("fp16")
            target = SearchTarget(ranges(seen_observations, MINMAX, "int8"), SCHEME, None, formats[0], peaks)
            fronts[mix] = run_front(side, target, formats, options.points)
            print(f"{mix}: {len(fronts[mix])} graphs, {time.process_time() - start_s:.0f} CPU s", flush=True)
    times = [point.ms or 0.0 for point in fronts[options.mixes[0]]]
    print(f"{'ms within':>10}", *(f"{mix:>32}" for mix in fronts))
    for budget_ms in np.linspace(min(times), max(times), ROWS)[:-1]:
        best_values = [
            max((p.sqnr_db or 0.0 for p in front_points if (p.ms or 0.0) <= budget_ms), default=np.nan)
            for front_points in fronts.values()
        ]
        print(f"{budget_ms:10.4g}", *(f"{value:29.1f} dB" for value in best_values))


if __name__ == "__main__":
    main()
