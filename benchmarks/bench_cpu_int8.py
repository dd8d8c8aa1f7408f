"""The CPU engine's quantized precisions against fp32, and against onnxruntime's own quantizer, in one run.

    python benchmarks/bench_cpu_int8.py [--rounds 15] [--minilm examples/minilm]

CPU time of one inference, one thread, the models taking turns; medians, and ratios to onnxruntime's default fp32.
ResNet-18 has random weights and BatchNorm statistics from scikit-learn's two photographs; MiniLM is the example's real
encoder on its real sentences, and is left out where its weights are not at hand.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn

from builders.onnxruntime import OnnxRuntime
from builders.types import BuildRequest, Target
from pipeline.quantization.calibration.ranges import Ranges
from pipeline.quantization.graphs.placement import tensors_to_measure
from pipeline.quantization.graphs.sites import prepared
from pipeline.quantization.schemes.write import write

Arrays = dict[str, np.ndarray]
ENGINE = OnnxRuntime(intra_op_threads=1)


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


def crops(count: int, seed: int) -> torch.Tensor:
    """Random crops of scikit-learn's two photographs, 224x224, normalised."""
    from sklearn.datasets import load_sample_images

    photographs = [torch.tensor(item.copy()).permute(2, 0, 1).float() / 255 for item in load_sample_images().images]
    rng, found = np.random.default_rng(seed), []
    for index in range(count):
        image = photographs[index % 2]
        side = int(rng.integers(160, 400))
        top, left = (int(rng.integers(0, size - side + 1)) for size in image.shape[1:])
        crop = image[None, :, top : top + side, left : left + side]
        found.append(nn.functional.interpolate(crop, size=(224, 224), mode="bilinear", antialias=True))
    return (torch.cat(found) - 0.45) / 0.225


def resnet(folder: Path) -> tuple[Path, Arrays, Arrays]:
    torch.manual_seed(0)
    model = ResNet18().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # average over all batches
    with torch.no_grad():
        for seed in range(4):
            model(crops(8, seed))
    path = exported(model, (crops(2, 1),), folder / "resnet18.onnx", ["image"], {0: torch.export.Dim("batch", max=64)})
    return path, {"image": crops(32, 100).numpy()}, {"image": crops(16, 200).numpy()}


def minilm(folder: Path, example: Path) -> tuple[Path, Arrays, Arrays] | None:
    if not (example / "weights.safetensors").exists():
        return None
    from safetensors.torch import load_file

    found = importlib.util.spec_from_file_location("minilm_model", example / "model.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    model = module.build().eval()
    model.load_state_dict(load_file(example / "weights.safetensors"))
    names = ["input_ids", "attention_mask"]
    calibration, golden = (np.load(example / f"{name}.npz") for name in ("calibration", "golden"))
    inputs = tuple(torch.tensor(calibration[name][:2]) for name in names)
    path = exported(model, inputs, folder / "minilm.onnx", names, {0: torch.export.Dim("batch", max=64)})
    return path, {n: calibration[n][:128] for n in names}, {n: golden[n][:32] for n in names}


def exported(model: nn.Module, inputs: tuple[Any, ...], path: Path, names: list[str], dynamic: Any) -> Path:
    shapes = tuple(dynamic for _ in inputs)
    torch.onnx.export(
        model.eval(), inputs, str(path), dynamo=True, input_names=names, output_names=["result"],
        dynamic_shapes=shapes, opset_version=20, external_data=False, verbose=False,
    )  # fmt: skip
    return path


def measured(model: onnx.ModelProto, arrays: Arrays) -> Ranges:
    """MinMax of every tensor that int8 needs, eight samples at a time."""
    graph = prepared(model)
    tensors = tensors_to_measure(graph)
    tapped = onnx.ModelProto()
    tapped.CopyFrom(graph)
    del tapped.graph.output[:]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    session = ort.InferenceSession(tapped.SerializeToString(), providers=["CPUExecutionProvider"])
    seen: dict[str, tuple[float, float]] = {}
    count = len(next(iter(arrays.values())))
    for start in range(0, count, 8):
        values = session.run(None, {name: array[start : start + 8] for name, array in arrays.items()})
        for name, value in zip(tensors, values, strict=True):
            low, high = seen.get(name, (np.inf, -np.inf))
            seen[name] = (min(low, float(value.min())), max(high, float(value.max())))
    return Ranges(seen, "minmax", "0" * 64, count)


def engine(model: onnx.ModelProto, precision: str, folder: Path) -> Callable[[Arrays], np.ndarray]:
    """The CPU backend's own engine, opened as a serving node opens it."""
    place = folder / precision
    place.mkdir()
    onnx.save(model, place / "graph.onnx")
    request = BuildRequest("0" * 64, "fp32", Target("cpu"), "onnxruntime", (), (), ())
    session = ENGINE.session(ENGINE.build(request, place / "graph.onnx", place).path)
    return lambda inputs: next(iter(session.run(inputs).values()))


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

    out = folder / "peer.onnx"
    quantize_static(
        str(path), str(out), Reader(), per_channel=True, op_types_to_quantize=op_types,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return out


def race(runners: Mapping[str, Callable[[Arrays], np.ndarray]], inputs: Arrays, rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of one inference; the runners take turns within every round."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(rounds + 1):
        for name, run in runners.items():
            begun = time.process_time()
            run(inputs)
            run(inputs)
            if index:  # the first round warms up
                times[name].append((time.process_time() - begun) * 500)
    return {name: statistics.median(values) for name, values in times.items()}


def sqnr_db(expected: np.ndarray, actual: np.ndarray) -> float:
    noise = np.square(expected.astype(np.float64) - actual).sum()
    return float(10 * np.log10(np.square(expected.astype(np.float64)).sum() / noise)) if noise else np.inf


def bench(name: str, case: tuple[Path, Arrays, Arrays], folder: Path, rounds: int) -> None:
    path, calibration, held_out = case
    model, place = onnx.load(path), folder / name
    place.mkdir()
    ranges = measured(model, calibration)
    runners = {"onnxruntime fp32": plain(path), "enginery fp32": engine(model, "fp32", place)}
    op_types = ["MatMul"] if name == "minilm" else None
    runners["onnxruntime U8S8"] = plain(peer(path, calibration, place, op_types))
    for precision in ("int8", "int8-dynamic", "int4"):
        graph, _ = write(model, precision, ENGINE.scheme(), ranges)  # type: ignore[arg-type]
        runners[f"enginery {precision}"] = engine(graph, precision, place)
    expected = runners["onnxruntime fp32"](held_out)
    quality = {key: sqnr_db(expected, run(held_out)) for key, run in runners.items()}
    for batch in (1, 8):
        times = race(runners, {key: array[:batch] for key, array in held_out.items()}, rounds)
        fp32 = times["onnxruntime fp32"]
        for key, value in times.items():
            print(f"{name:9} batch {batch}  {key:22} {value:8.2f} ms  {fp32 / value:5.2f} x  {quality[key]:6.1f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minilm", type=Path, default=Path(__file__).parent.parent / "examples" / "minilm")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench("resnet18", resnet(folder), folder, given.rounds)
        if case := minilm(folder, given.minilm):
            bench("minilm", case, folder, given.rounds)
        else:
            print(f"minilm: no weights in {given.minilm}; its README says how to make them")


if __name__ == "__main__":
    main()
