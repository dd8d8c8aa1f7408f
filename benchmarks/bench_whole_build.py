"""What a build of an ONNX file costs over the sum of its parts as a script of onnx, onnxruntime and numpy.

    python -m benchmarks.bench_whole_build MODEL.onnx CALIBRATION.npz GOLDEN.npz [--runs 3]

MODEL takes arrays of [batch, sequence], as MiniLM does. Both sides make fp32 and int8 for the CPU: check and shape the
model, run it on golden data and at the ends of its dims, calibrate by extremes, quantize products with constant
weights, compare both graphs as they are written, build and compare the fp32 engine, time it. The script keeps nothing,
isolates nothing, and measures no noise floor, no slices, no repeated calls and no breakdown of time. The search of int8
and attribution, which start only where a check failed, have no counterpart there and are left out; `--attribution` says
what the latter adds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bench_pipeline import Cost, measure

SIZES = {"batch": (1, 8), "sequence": (1, 128)}
SECONDS, PROCESSES = 0.1, 5
Arrays = Mapping[str, Any]


def session(path: Path, optimized: bool = False, save: Path | None = None) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(save or "")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def script(model: Path, calibration: Path, golden: Path, folder: Path) -> None:
    """The parts, one after the other, in this process."""
    arrays, taken_arrays = dict(np.load(golden)), dict(np.load(calibration))
    cases = [*single(arrays), *(at_size(arrays, batch, length) for batch in SIZES["batch"] for length in (1, 64, 128))]
    fp32, int8, engine = (folder / f"{name}.onnx" for name in ("fp32", "int8", "engine"))
    loaded = onnx.shape_inference.infer_shapes(onnx.load(model), check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(loaded)
    onnx.save(loaded, fp32)
    compare(session(model), session(fp32), cases)
    onnx.save(quantized(loaded, extremes(loaded, single(taken_arrays), folder)), int8)
    compare(session(fp32), session(int8), cases)
    session(fp32, optimized=True, save=engine)
    compare(session(fp32), session(engine), cases)
    for _ in range(PROCESSES):
        opened_session = session(engine)
        for size in (1, 64, 128):
            end, inputs = time.perf_counter() + SECONDS / PROCESSES, at_size(arrays, 1 if size < 128 else 8, size)
            while time.perf_counter() < end:
                opened_session.run(None, inputs)


def single(arrays: Arrays) -> list[Arrays]:
    return [{name: array[i : i + 1] for name, array in arrays.items()} for i in range(len(next(iter(arrays.values()))))]


def at_size(arrays: Arrays, batch: int, length: int) -> Arrays:
    return {name: np.resize(array, (batch, length)) for name, array in arrays.items()}


def compare(expected: Any, actual: Any, cases: Sequence[Arrays]) -> None:
    """Print the SQNR in decibels over all cases, and the greatest error."""
    signal = noise = largest_value = 0.0
    for inputs in cases:
        for output, right_output in zip(expected.run(None, inputs), actual.run(None, inputs), strict=True):
            error = output.astype(np.float64) - right_output
            signal, noise = signal + float((output.astype(np.float64) ** 2).sum()), noise + float((error**2).sum())
            largest_value = max(largest_value, float(np.abs(error).max()))
    print(10 * np.log10(signal / noise) if noise else np.inf, largest_value)


def products(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    constant = {item.name for item in model.graph.initializer}
    return [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in constant]


def extremes(model: onnx.ModelProto, samples: Sequence[Arrays], folder: Path) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of what each product reads."""
    tapped_model, names = onnx.ModelProto(), list(dict.fromkeys(node.input[0] for node in products(model)))
    tapped_model.CopyFrom(model)
    for name in names:
        for kind in ("ReduceMin", "ReduceMax"):
            tapped_model.graph.node.append(helper.make_node(kind, [name], [f"{name}/{kind}"], keepdims=0))
            tapped_model.graph.output.append(helper.make_tensor_value_info(f"{name}/{kind}", TensorProto.FLOAT, []))
    onnx.save(tapped_model, folder / "tapped.onnx")
    opened = session(folder / "tapped.onnx", optimized=True)
    extreme_names = [f"{name}/{kind}" for name in names for kind in ("ReduceMin", "ReduceMax")]
    found = np.array([opened.run(extreme_names, inputs) for inputs in samples]).reshape(len(samples), len(names), 2)
    return {name: (float(found[:, i, 0].min()), float(found[:, i, 1].max())) for i, name in enumerate(names)}


def quantized(model: onnx.ModelProto, ranges: Mapping[str, tuple[float, float]]) -> onnx.ModelProto:
    """The model with Q/DQ before each product, its weights as int8 by column."""
    graph, nodes = model.graph, list[onnx.NodeProto]()
    weights, done_sources = {item.name: item for item in graph.initializer}, set[str]()
    chosen = {node.output[0] for node in products(model)}

    def constant(name: str, array: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    for node in list(graph.node):
        if node.output[0] in chosen:
            source, weight = node.input[0], node.input[1]
            if source not in done_sources:
                low, high = min(ranges[source][0], 0.0), max(ranges[source][1], 0.0)
                step = np.float32((high - low) / 255)
                pair = constant(f"{source}/scale", step), constant(f"{source}/zero", np.uint8(round(-low / step)))
                nodes.append(helper.make_node("QuantizeLinear", [source, *pair], [f"{source}/q"]))
                nodes.append(helper.make_node("DequantizeLinear", [f"{source}/q", *pair], [f"{source}/dq"]))
                done_sources.add(source)
            values = numpy_helper.to_array(weights[weight])
            scale = (np.abs(values).max(0) / 127).astype("f")
            graph.initializer.remove(weights[weight])
            pair = constant(f"{weight}/q", np.rint(values / scale).astype(np.int8)), constant(f"{weight}/scale", scale)
            nodes.append(helper.make_node("DequantizeLinear", [*pair], [f"{weight}/dq"], axis=1))
            node.input[:] = [f"{source}/dq", f"{weight}/dq"]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return model


def write_spec(folder: Path, model: Path, calibration: Path, golden: Path, attribution: bool) -> Path:
    for path in (model, calibration, golden):
        (folder / path.name).write_bytes(path.read_bytes())
    names = [value.name for value in onnx.load(model).graph.input]
    dims = {
        name: {"min": low, "opt": low if name == "batch" else 64, "max": high} for name, (low, high) in SIZES.items()
    }
    spec = {
        "model": "whole",
        "source": {"onnx": model.name},
        "inputs": {name: {"dtype": "int64", "shape": [*SIZES]} for name in names},
        "dims": dims,
        "precisions": ["fp32", "int8"],
        "targets": ["cpu"],
        "calibration": {"data": calibration.name},
        "quantization": {"search": "never"},
        "golden": {"data": golden.name},
        **({} if attribution else {"validation": {"attribution": "off"}}),
    }
    (folder / "spec.yaml").write_text(json.dumps(spec))
    return folder / "spec.yaml"


def one_round(files: Sequence[Path], attribution: bool) -> tuple[Cost, Cost]:
    """The script, and a build into an empty registry; each in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = write_spec(folder, *files, attribution)
        build = [sys.executable, "-m", "enginesmith", "build", spec, "--registry", folder / "registry"]
        executables = [sys.executable, "-m", "benchmarks.bench_whole_build", *files, "--script", folder]
        return measure(executables), measure([*build, "--runner", "inprocess"], (0, 1))  # 1: int8 may fail its checks


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs=3, type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--attribution", action="store_true")
    parser.add_argument("--script", type=Path)
    options = parser.parse_args()
    if options.script:
        script(*options.files, options.script)
        return
    load, rounds = os.getloadavg()[0], [one_round(options.files, options.attribution) for _ in range(options.runs)]
    sides = {
        f"{side}_{label}_s": [round(getattr(round_result[index], label), 1) for round_result in rounds]
        for index, side in enumerate(("script", "build"))
        for label in ("cpu", "wall")
    }
    ratios = {
        label: statistics.median(getattr(b, label) / getattr(a, label) for a, b in rounds) for label in ("cpu", "wall")
    }
    print(json.dumps({"load_before": round(load, 1), **sides, "build_over_script": ratios}, indent=2))


if __name__ == "__main__":
    main()
