"""What the progress monitor costs a build: TensorRT-RTX with and without it, in turn, on two deep graphs.

    python -m benchmarks.bench_tensorrt_monitor [--rounds 12]

CPU seconds and wall-clock seconds of `build_serialized_network`, medians and their ratio, with an interval from 2,000
resamples of the rounds; and how often TensorRT called. TensorRT-RTX autotunes nothing, so full TensorRT calls more
often and over a longer time; it was not at hand.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tensorrt_rtx as trt
from onnx import TensorProto, helper, numpy_helper

from builders.backends.tensorrt.build import monitor
from builders.backends.tensorrt.library import recorder

RNG = np.random.default_rng(0)


def residual(path: Path, blocks: int = 48, width: int = 64) -> tuple[Path, str, list[tuple[int, ...]]]:
    """`blocks` blocks of two convolutions with a residual Add."""
    nodes, weights, text_before = [], [], "x"
    for index in range(blocks):
        for half in "ab":
            weight = f"w{index}{half}"
            array = RNG.standard_normal((width, width, 3, 3)).astype("f") * 0.05
            weights.append(numpy_helper.from_array(array, weight))
        inner_texts = [f"{index}{name}" for name in ("c", "r", "d", "s", "o")]
        nodes += [
            helper.make_node("Conv", [text_before, f"w{index}a"], [inner_texts[0]], pads=[1] * 4),
            helper.make_node("Relu", [inner_texts[0]], [inner_texts[1]]),
            helper.make_node("Conv", [inner_texts[1], f"w{index}b"], [inner_texts[2]], pads=[1] * 4),
            helper.make_node("Add", [inner_texts[2], text_before], [inner_texts[3]]),
            helper.make_node("Relu", [inner_texts[3]], [inner_texts[4]]),
        ]
        text_before = inner_texts[4]
    return _saved(path, nodes, weights, text_before, (width, 32, 32))


def encoder(path: Path, layers: int = 12, width: int = 384) -> tuple[Path, str, list[tuple[int, ...]]]:
    """`layers` transformer layers with one head: attention and a feed-forward part, each normalized."""
    nodes, weights, node_before = [], [], "x"

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(RNG.standard_normal(shape).astype("f") * 0.05, name))
        return name

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    for i in range(layers):
        q, k, v = (node("MatMul", [node_before, weight(f"w{i}{n}", width, width)], f"{i}{n}") for n in "qkv")
        scores = node("MatMul", [q, node("Transpose", [k], f"{i}kt", perm=[0, 2, 1])], f"{i}scores")
        mixed_node = node("MatMul", [node("Softmax", [scores], f"{i}soft"), v], f"{i}mixed")
        scale, bias = weight(f"g{i}a", width), weight(f"h{i}a", width)
        seen = node("LayerNormalization", [node("Add", [mixed_node, node_before], f"{i}add"), scale, bias], f"{i}seen")
        wide_node = node("MatMul", [seen, weight(f"u{i}", width, 4 * width)], f"{i}wide")
        gate = node("Mul", [wide_node, node("Sigmoid", [wide_node], f"{i}sigmoid")], f"{i}gate")
        back = node("MatMul", [gate, weight(f"d{i}", 4 * width, width)], f"{i}back")
        scale, bias = weight(f"g{i}b", width), weight(f"h{i}b", width)
        node_before = node("LayerNormalization", [node("Add", [back, seen], f"{i}sum"), scale, bias], f"{i}out")
    return _saved(path, nodes, weights, node_before, (64, width))


def _saved(path: Path, nodes: Any, weights: Any, last: str, shape: tuple[int, ...]) -> Any:
    value_infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "deep", value_infos[:1], value_infos[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path, "x", [(size, *shape) for size in (1, 4, 8)]


class Counted:
    """Counts how often it is asked, and is never asked to stop."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> bool:
        self.times += 1
        return False


def build(model: Path, name: str, shapes: list[tuple[int, ...]], watching: Any) -> tuple[float, float]:
    """CPU and wall-clock seconds of one build."""
    recorder_name = recorder("tensorrt_rtx")
    builder = trt.Builder(recorder_name)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, recorder_name)
    if not parser.parse_from_file(str(model)):
        raise SystemExit("the graph does not parse")
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    if watching is not None:
        config.progress_monitor = watching
    profile = builder.create_optimization_profile()
    profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    cpu, wall = time.process_time(), time.perf_counter()
    if builder.build_serialized_network(network, config) is None:
        raise SystemExit("the build failed")
    return time.process_time() - cpu, time.perf_counter() - wall


def ratio(with_it: list[float], without: list[float]) -> str:
    """Ratio of the medians, with 95 % of its resamples."""
    pairs = np.array([with_it, without])
    drawn_pairs = [pairs[:, RNG.integers(0, pairs.shape[1], pairs.shape[1])] for _ in range(2000)]
    low, high = np.quantile([np.median(a) / np.median(b) for a, b in drawn_pairs], [0.025, 0.975])
    return f"{statistics.median(with_it) / statistics.median(without):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print a row for each graph."""
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=12)
    rounds = options.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        for make in (residual, encoder):
            case = make(Path(folder) / f"{make.__name__}.onnx")
            build(*case, None)
            results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for index in range(rounds):
                for is_watched in (index % 2 == 0, index % 2 == 1):
                    stop_count, phases = Counted(), list[str]()
                    watching_monitor = monitor(trt, stop_count, phases.append) if is_watched else None
                    results[is_watched].append(build(*case, watching_monitor))
            steps = _steps(case)
            cpu, wall = (ratio([a[i] for a in results[True]], [a[i] for a in results[False]]) for i in (0, 1))
            median = statistics.median(result[1] for result in results[False])
            print(f"{make.__name__}: {median:.2f} s, {steps} steps; with the monitor, CPU x {cpu}, wall clock x {wall}")


def _steps(case: Any) -> int:
    class Counting(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps = 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            pass

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002 - TensorRT's signature
            self.steps += 1
            return True

    counting = Counting()
    build(*case, counting)
    return counting.steps


if __name__ == "__main__":
    main()
