"""What calibration costs over plain fp32 inference, in CPU time and in memory, and what its methods are worth.

Every measurement runs in a fresh process on one core, onnxruntime's quantizer beside ours, on the same model and
samples: timm's ResNet-50 with random weights, whose BN statistics come from crops of scikit-learn's two photographs.
"x fp32" is the CPU time of the whole call divided by (samples x one fp32 inference in the same process).

Usage: python -m benchmarks.bench_calibration FOLDER [--only cost|quality] [--samples 32 128] [--model resnet18]
FOLDER, one for each model, keeps the model and the samples between runs. All models but `small` need the packages that
benchmarks/README.md names.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration_sides import (
    SIZE,
    modelopt_quantize,
    ort_quantize,
    our_quantize,
    our_samples,
    our_search,
    reader,
)

HELD_OUT = 32
MODELS = ("resnet50", "resnet50-zero", "resnet18", "resnet18-zero", "small")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COSTS = (
    "enginesmith minmax",
    "enginesmith mse",
    "enginesmith entropy",
    "enginesmith percentile",
    "ort MinMax",
    "ort Percentile",
)
WHOLE = ("enginesmith minmax", "ort MinMax")
# onnxruntime's histogram methods keep about 112 MB per sample.
MOST_SAMPLES_KEPT = 32


def crops(count: int, seed: int) -> np.ndarray:
    """Seeded crops and mirrorings of the photographs, normalised as for ImageNet."""
    from sklearn.datasets import load_sample_images

    photographs, rng = load_sample_images().images, np.random.default_rng(seed)
    array = np.empty((count, 3, SIZE, SIZE), np.float32)
    for index in range(count):
        photograph = photographs[rng.integers(len(photographs))]
        top, left_number = (int(rng.integers(length - SIZE)) for length in photograph.shape[:2])
        crop = photograph[top : top + SIZE, left_number : left_number + SIZE] / 255
        crop = crop[:, ::-1] if rng.random() < 0.5 else crop
        array[index] = ((crop - MEAN) / DEVIATION).transpose(2, 0, 1)
    return array


def make_model(path: Path, name: str) -> None:
    """Export a model. torchvision's C library does not load beside CPU-only torch, so its operators are declared."""
    import torch

    torch.manual_seed(0)
    net = _small() if name == "small" else _resnet(name)
    norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # a plain average over all batches
        norm.reset_running_stats()
    with torch.no_grad():
        for seed in range(4):
            net.train()(torch.from_numpy(crops(16, 1000 + seed)))
    batch = torch.export.Dim("batch", min=1, max=64)
    example = torch.from_numpy(crops(2, 3))
    program = torch.onnx.export(
        net.eval(), (example,), dynamo=True, input_names=["x"], output_names=["y"], dynamic_shapes=({0: batch},),
        opset_version=20,
    )  # fmt: skip
    program.save(path)


def _small() -> Any:
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=4), nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(block(3, 8), block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def _resnet(name: str) -> Any:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
    except ImportError:
        raise SystemExit(
            f"{name} needs timm, which is not installed; see benchmarks/README.md, or use --model small"
        ) from None
    # timm's own start, zero_init_last, makes every residual branch zero, and with it half of the network.
    return timm.create_model(name.removesuffix("-zero"), pretrained=False, zero_init_last=name.endswith("-zero"))


def prepare(folder: Path, counts: list[int], model: str) -> None:
    """The model and one .npy per number of samples, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.onnx").exists():
        make_model(folder / "model.onnx", model)
    missing_counts = [count for count in counts if not (folder / f"{count}.npy").exists()]
    for count in missing_counts:
        np.save(folder / f"{count}.npy", crops(count, 1))
    if not (folder / "held_out.npy").exists():
        np.save(folder / "held_out.npy", crops(HELD_OUT, 2))


def session(model: Path, optimized: bool = True) -> Any:
    """An fp32 or Q/DQ session on one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def fp32_seconds(model: Path, samples: np.ndarray) -> float:
    """CPU time of one inference: the median of nine, in batches of one."""
    opened_session, times = session(model), []
    for index in range(10):
        start_s = time.process_time()
        opened_session.run(None, {"x": samples[index % len(samples)][None]})
        times.append(time.process_time() - start_s)
    return float(np.median(times[1:]))


def call(side: str, folder: Path, count: int, activation: str = "uint8", reuse: bool = False) -> Callable[[], Path]:
    """The whole quantize call of one side: calibrate, choose ranges, insert Q/DQ, write the model."""
    owner, method, *parameter = side.split()
    data, out_path = folder / f"{count}.npy", folder / f"{'-'.join(side.split())}-{activation}.onnx"
    if owner == "ort":
        return lambda: ort_quantize(folder / "model.onnx", data, out_path, method, activation)
    if owner == "modelopt":
        return lambda: modelopt_quantize(folder / "model.onnx", data, out_path, method)
    if method == "searched":
        return lambda: our_search(folder / "model.onnx", data, out_path, activation)
    percentile = float(parameter[0]) if parameter else None
    return lambda: our_quantize(folder / "model.onnx", data, out_path, method, activation, percentile, reuse)


def calibrate_only(side: str, folder: Path, count: int) -> Callable[[], object]:
    """Calibration up to the ranges, for uint8 activations and without writing a model."""
    owner, name = side.split()
    model, data = folder / "model.onnx", folder / f"{count}.npy"
    if owner == "ort":
        return lambda: ort_ranges(model, data, folder / "augmented.onnx", name)
    from pipeline.quantization.statistics.methods import method, ranges
    from pipeline.quantization.statistics.observe import observe

    chosen = method(name)

    def calibrate() -> object:
        seen_observations = observe(model, our_samples(data), histograms=chosen.needs_histogram, threads=1)
        return ranges(seen_observations, chosen, "uint8")

    return calibrate


def ort_ranges(model: Path, data: Path, augmented: Path, name: str) -> object:
    """What quantize_static does before it writes."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator
    from onnxruntime.quantization.registry import QDQRegistry

    calibrator = create_calibrator(
        model, sorted(QDQRegistry), augmented_model_path=str(augmented), calibrate_method=CalibrationMethod[name]
    )
    calibrator.collect_data(reader(data))
    return calibrator.compute_data()


def measure_cost(side: str, folder: Path, count: int, whole: str = "") -> dict[str, float]:
    """In this process: CPU per sample over fp32, wall time, and peak memory of the call."""
    samples = np.load(folder / f"{count}.npy", mmap_mode="r")
    work = call(side, folder, count) if whole else calibrate_only(side, folder, count)
    import onnxruntime.quantization  # noqa: F401  both sides start with everything imported

    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    single = fp32_seconds(folder / "model.onnx", np.array(samples[:10]))
    return {"x_fp32": cpu / count / single, "cpu_s": cpu, "wall_s": wall, "peak_mb": peak, "fp32_ms": single * 1e3}


def measure_quality(side: str, folder: Path, count: int, activation: str) -> dict[str, float]:
    """SQNR in dB against fp32 over held-out crops, both graphs as written."""
    written_rows = call(side, folder, count, activation, reuse=True)()
    samples = np.load(folder / "held_out.npy")
    fed_fields = [{"x": samples[start : start + 4]} for start in range(0, HELD_OUT, 4)]
    expected, actual = (
        np.concatenate([opened_session.run(None, inputs)[0] for inputs in fed_fields]).astype(np.float64)
        for opened_session in (session(folder / "model.onnx", False), session(written_rows, False))
    )
    noise = np.square(expected - actual).sum()
    centred_expected = expected - expected.mean(axis=0)  # what differs between samples, which is what a task reads
    return {
        "sqnr_db": float(10 * np.log10(np.square(expected).sum() / noise)),
        "sqnr_between_samples_db": float(10 * np.log10(np.square(centred_expected).sum() / noise)),
    }


def apart(what: str, *words: object) -> dict[str, float]:
    """Measure in a fresh process, so that one peak says nothing about another."""
    command = [sys.executable, "-m", "benchmarks.bench_calibration", "--measure", what, *map(str, words)]
    done_result = subprocess.run(command, capture_output=True, text=True)
    if done_result.returncode:
        return {"failed": done_result.returncode}
    return {name: round(value, 2) for name, value in json.loads(done_result.stdout.splitlines()[-1]).items()}


def costs(folder: Path, counts: list[int]) -> dict[str, Any]:
    """Calibration alone, and the whole quantize call."""
    costs_by_side: dict[str, Any] = {}
    for side in COSTS:
        for count in counts:
            if side.startswith("ort") and side != "ort MinMax" and count > MOST_SAMPLES_KEPT:
                continue
            for label in ("calibration", "whole") if side in WHOLE else ("calibration",):
                name = f"{side}, n={count}, {label}"
                costs_by_side[name] = apart("cost", side, folder, count, *(["whole"] if label == "whole" else []))
                print(name, costs_by_side[name], file=sys.stderr)
    return costs_by_side


def qualities(folder: Path, count: int) -> dict[str, Any]:
    our_texts = ["searched", "minmax", "mse", "entropy", "percentile 99.99", "percentile 99.999", "moving-average"]
    sides = [(f"enginesmith {name}", count) for name in our_texts] + [("ort MinMax", count)]
    sides += [("ort Percentile", min(count, MOST_SAMPLES_KEPT)), ("ort Entropy", min(count, MOST_SAMPLES_KEPT))]
    if importlib.util.find_spec("modelopt"):
        sides += [("modelopt max", count), ("modelopt entropy", min(count, MOST_SAMPLES_KEPT))]
    else:
        print("nvidia-modelopt is not installed: no rows for it", file=sys.stderr)
    qualities_by_side: dict[str, Any] = {}
    for side, samples in sides:
        for activation in ("int8",) if side.startswith("modelopt") else ("int8", "uint8"):
            name = f"{side}, {activation}, n={samples}"
            qualities_by_side[name] = apart("quality", side, folder, samples, activation)
            print(name, qualities_by_side[name], file=sys.stderr)
    return qualities_by_side


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        # onnxruntime's calibrators take all cores and spin while they wait: that would be CPU time too.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        action, side, folder, count, *rest = sys.argv[2:]
        function: Any = {"cost": measure_cost, "quality": measure_quality}[action]
        print(json.dumps(function(side, Path(folder), int(count), *rest)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("cost", "quality"))
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[32, 128])
    options = parser.parse_args()
    prepare(options.folder, [*options.samples, MOST_SAMPLES_KEPT], options.model)
    figures: dict[str, Any] = {}
    if options.only != "quality":
        figures["cost"] = costs(options.folder, options.samples)
    if options.only != "cost":
        figures["quality"] = qualities(options.folder, max(options.samples))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
