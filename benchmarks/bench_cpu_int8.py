"""The CPU engine's quantized precisions against fp32, and against onnxruntime's own quantizer, in one run.

    python -m benchmarks.bench_cpu_int8 [--rounds 15] [--examples examples] [MODEL...]
    python -m tests.emulated_cpu avx2 python -m benchmarks.bench_cpu_int8

CPU time of one inference, one thread, the models taking turns; medians, and ratios to onnxruntime's default fp32. Every
engine is opened plainly. int8 `full` is what is built for CPUs with VNNI, whose sums saturate without; `uint8` is what
`reduced_range: never` builds for the others; `reduced`, with weights within -64..64, is what they get by default;
`option` is `full` in a session with ONNX Runtime's x64quantprecision; `modelled` is the time of `full` by the cost
model of searches and gains, and its speedup over modelled fp32 (`rates.ERROR` says how far off that is). The second
command shows a CPU without VNNI on an x86-64 that can be made to.
ResNet-18, `residual` (8 convolutions with residual connections, 32 by 32 pixels) and `eeg` (EEGNet: Lawhern et al.
2018) have random weights and BatchNorm statistics from scikit-learn's two photographs, or from sums of sines; the
others are the examples' real models on their real samples, and are left out where their weights are not at hand.
"""

import argparse
import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn

from builders.backends.onnxruntime import OnnxRuntime
from builders.backends.onnxruntime.session import open_model, session_options
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.types import BuildRequest, Target
from pipeline.quantization.insertion_points import prepare_model, tensors_to_measure
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.write import write
from pipeline.quantization.search.costs import CostModel
from pipeline.quantization.search.rates import peaks_of

Arrays = dict[str, np.ndarray]
Case = tuple[Path, Arrays, Arrays]  # a model, what it is calibrated on, what it is judged on
ENGINE = OnnxRuntime(intra_op_threads=1, reduced_range="never")
# With VNNI, and without.
WIDE, NARROW = Target("x86-64-v4-vnni"), Target("x86-64-v3")
LEAST_S = 0.005  # of one reading


class Block(nn.Module):
    """Two 3x3 convolutions and a residual connection."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside))
        self.second = nn.Sequential(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        project = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.shortcut = nn.Identity() if stride == 1 and inside == outside else project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class ResNet18(nn.Module):
    """The ImageNet architecture (He et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(Block(*item) for item in widths))
        self.head = nn.Linear(512, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class Residual(nn.Module):
    """Eight 3x3 convolutions, in pairs with a residual connection, and a head."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.blocks = nn.Sequential(*(Block(*item) for item in widths))
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(image).mean((2, 3)))


class EegNet(nn.Module):
    """EEGNet (Lawhern et al. 2018) of 22 channels and 256 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, (1, 64), padding="same", bias=False), nn.BatchNorm2d(8),
            nn.Conv2d(8, 16, (22, 1), groups=8, bias=False), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 4)),
            nn.Conv2d(16, 16, (1, 16), padding="same", groups=16, bias=False), nn.Conv2d(16, 16, 1, bias=False),
            nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 8)), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128, 4)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(signal))


def signals(count: int, seed: int) -> torch.Tensor:
    """Sums of three sines and noise, [count, 1, 22, 256]."""
    draw = torch.Generator().manual_seed(seed)
    array, rate = torch.arange(256) / 128, 4 + 26 * torch.rand((count, 1, 22, 3, 1), generator=draw)
    waves = torch.sin(2 * math.pi * (rate * array + torch.rand((count, 1, 22, 3, 1), generator=draw))).sum(3)
    return waves + 0.5 * torch.randn((count, 1, 22, 256), generator=draw)


def crops(count: int, seed: int, size: int = 224) -> torch.Tensor:
    """Random crops of scikit-learn's two photographs, of `size` by `size` pixels, normalised."""
    from sklearn.datasets import load_sample_images

    photographs = [torch.tensor(item.copy()).permute(2, 0, 1).float() / 255 for item in load_sample_images().images]
    rng, crops_found = np.random.default_rng(seed), []
    for index in range(count):
        image = photographs[index % 2]
        side = int(rng.integers(160, 400))
        top, left_number = (int(rng.integers(0, size - side + 1)) for size in image.shape[1:])
        crop = image[None, :, top : top + side, left_number : left_number + side]
        crops_found.append(nn.functional.interpolate(crop, size=(size, size), mode="bilinear", antialias=True))
    return (torch.cat(crops_found) - 0.45) / 0.225


def untrained(
    model: nn.Module, name: str, inputs: Callable[[int, int], torch.Tensor], folder: Path, count: int = 32
) -> Case:
    """A model with random weights, whose norms have the statistics of such inputs."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # average over all batches
    with torch.no_grad():
        for seed in range(4):
            model(inputs(8, seed))
    path = exported(model, (inputs(2, 1),), folder / f"{name}.onnx", ["input"], {0: torch.export.Dim("batch", max=64)})
    return path, {"input": inputs(count, 100).numpy()}, {"input": inputs(max(16, count // 2), 200).numpy()}


def resnet(folder: Path) -> Case:
    torch.manual_seed(0)
    return untrained(ResNet18(), "resnet18", crops, folder)


def residual(folder: Path) -> Case:
    torch.manual_seed(0)
    return untrained(Residual(), "residual", lambda count, seed: crops(count, seed, 32), folder, 128)


def eeg(folder: Path) -> Case:
    torch.manual_seed(0)
    return untrained(EegNet(), "eeg", signals, folder, 128)


def of_example(name: str, names: list[str], folder: Path, examples: Path) -> Case | None:
    example = examples / name
    if not (example / "weights.safetensors").exists():
        print(f"{name}: no weights in {example}; its README says how to make them")
        return None
    from safetensors.torch import load_file

    module_spec = importlib.util.spec_from_file_location(f"{name}_model", example / "model.py")
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    model = module.build().eval()
    model.load_state_dict(load_file(example / "weights.safetensors"))
    calibration, golden = (np.load(example / f"{part}.npz") for part in ("calibration", "golden"))
    inputs = tuple(torch.tensor(calibration[name][:2]) for name in names)
    path = exported(model, inputs, folder / f"{name}.onnx", names, {0: torch.export.Dim("batch", max=64)})
    return path, {n: calibration[n][:128] for n in names}, {n: golden[n][:256] for n in names}


def exported(model: nn.Module, inputs: tuple[Any, ...], path: Path, names: list[str], dynamic: Any) -> Path:
    shapes = tuple(dynamic for _ in inputs)
    torch.onnx.export(
        model.eval(), inputs, str(path), dynamo=True, input_names=names,
        dynamic_shapes=shapes, opset_version=20, external_data=False, verbose=False,
    )  # fmt: skip
    return path


def measured(model: onnx.ModelProto, arrays: Arrays) -> Ranges:
    """MinMax of every tensor that int8 needs, eight samples at a time."""
    graph = prepare_model(model)
    tensors = tensors_to_measure(graph)
    tapped_model = onnx.ModelProto()
    tapped_model.CopyFrom(graph)
    del tapped_model.graph.output[:]
    tapped_model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    session = ort.InferenceSession(tapped_model.SerializeToString(), providers=["CPUExecutionProvider"])
    seen_values: dict[str, tuple[float, float]] = {}
    count = len(next(iter(arrays.values())))
    for start in range(0, count, 8):
        values = session.run(None, {name: array[start : start + 8] for name, array in arrays.items()})
        for name, value in zip(tensors, values, strict=True):
            low, high = seen_values.get(name, (np.inf, -np.inf))
            seen_values[name] = (min(low, float(value.min())), max(high, float(value.max())))
    return Ranges(seen_values, "minmax", "0" * 64, count)


def engine(model: onnx.ModelProto, place: Path, target: Target = WIDE) -> Path:
    """The CPU backend's own engine."""
    place.mkdir()
    onnx.save(model, place / "graph.onnx")
    request = BuildRequest("0" * 64, "fp32", target, "onnxruntime", (), (), ())
    return ENGINE.build(request, place / "graph.onnx", place).path


def opened(path: Path, option: bool = False) -> Callable[[Arrays], np.ndarray]:
    """An engine in the backend's session. option: with ONNX Runtime's own remedy for sums that saturate."""
    options = session_options("ORT_ENABLE_ALL", 1)
    if option:
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = open_model(path, options)
    return lambda inputs: session.run(None, inputs)[0]


def plain(path: Path) -> Callable[[Arrays], np.ndarray]:
    """onnxruntime with its defaults, one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def peer(path: Path, arrays: Arrays, folder: Path, op_types: list[str] | None) -> Path:
    """onnxruntime's quantize_static, U8S8 per channel, over the same samples."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            count = len(next(iter(arrays.values())))
            self.left = iter([{n: a[i : i + 1] for n, a in arrays.items()} for i in range(count)])

        def get_next(self) -> Any:
            return next(self.left, None)

    out_path = folder / "peer.onnx"
    quantize_static(
        str(path), str(out_path), Reader(), per_channel=True, op_types_to_quantize=op_types,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return out_path


def race(runners: Mapping[str, Callable[[Arrays], np.ndarray]], inputs: Arrays, rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of one inference; the runners take turns within every round."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    start_s = time.process_time()
    next(iter(runners.values()))(inputs)
    runs = max(2, int(LEAST_S / (time.process_time() - start_s)))
    for index in range(rounds + 1):
        for name, run in runners.items():
            start_s = time.process_time()
            for _ in range(runs):
                run(inputs)
            if index:  # the first round warms up
                times[name].append((time.process_time() - start_s) * 1000 / runs)
    return {name: statistics.median(values) for name, values in times.items()}


def sqnr_db(expected: np.ndarray, actual: np.ndarray) -> float:
    noise = np.square(expected.astype(np.float64) - actual).sum()
    return float(10 * np.log10(np.square(expected.astype(np.float64)).sum() / noise)) if noise else np.inf


def bench(name: str, case: tuple[Path, Arrays, Arrays], folder: Path, rounds: int) -> None:
    path, calibration, held_out = case
    model, place = onnx.load(path), folder / name
    place.mkdir()
    ranges = measured(model, calibration)
    runners = {"onnxruntime fp32": plain(path), "enginesmith fp32": opened(engine(model, place / "fp32"))}
    op_types = ["MatMul"] if name in ("minilm", "encoder") else None
    runners["onnxruntime U8S8"] = plain(peer(path, calibration, place, op_types))
    whole_scheme = ENGINE.scheme
    formats: dict[str, str] = {}
    for precision in ("int8", "int8-dynamic"):
        graph, notes = write(model, precision, whole_scheme, ranges)  # type: ignore[arg-type]
        formats = formats or dict.fromkeys(notes.quantized, precision)
        full = engine(graph, place / precision)
        runners[f"{precision} full"], runners[f"{precision} option"] = opened(full), opened(full, option=True)
        runners[f"{precision} uint8"] = opened(engine(graph, place / f"{precision} uint8", NARROW))
        reduced, _ = write(model, precision, replace(whole_scheme, weight_levels=64), ranges)  # type: ignore[arg-type]
        runners[f"{precision} reduced"] = opened(engine(reduced, place / f"{precision} reduced"))
    runners["enginesmith int4"] = opened(engine(write(model, "int4", whole_scheme, ranges)[0], place / "int4"))
    expected = runners["onnxruntime fp32"](held_out)
    quality = {key: sqnr_db(expected, run(held_out)) for key, run in runners.items()}
    for batch in (1, 8):
        inputs = {key: array[:batch] for key, array in held_out.items()}
        times = race(runners, inputs, rounds)
        fp32 = times["onnxruntime fp32"]
        for key, value in times.items():
            print(
                f"{this_kind().name} {name:9} batch {batch}  {key:22} {value:9.3f} ms  {fp32 / value:5.2f} x  "
                f"{quality[key]:6.1f} dB"
            )
        costs = CostModel.of(prepare_model(model), {key: array.shape for key, array in inputs.items()})
        peaks = peaks_of(Target(this_kind().name), "fp32")
        if costs and peaks:
            float_ms, int8_ms = (costs.estimate_ms(names, peaks) for names in ({}, formats))
            label = f"{this_kind().name} {name:9} batch {batch}  {'int8 modelled':22}"
            print(f"{label} {int8_ms:9.3f} ms  {float_ms / int8_ms:5.2f} x")


MODELS: dict[str, Callable[[Path, Path], Case | None]] = {
    "resnet18": lambda folder, _: resnet(folder),
    "digits": lambda folder, examples: of_example("digits", ["image"], folder, examples),
    "encoder": lambda folder, examples: of_example("encoder", ["input_ids", "attention_mask"], folder, examples),
    "residual": lambda folder, _: residual(folder),
    "eeg": lambda folder, _: eeg(folder),
    "minilm": lambda folder, examples: of_example("minilm", ["input_ids", "attention_mask"], folder, examples),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--examples", type=Path, default=Path(__file__).parent.parent / "examples")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all of them by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for model in options.models or MODELS:
            if case := MODELS[model](Path(name), options.examples):
                bench(model, case, Path(name), options.rounds)


if __name__ == "__main__":
    main()
