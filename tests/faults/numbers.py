"""Faults in what an engine or a graph computes: found by nearness, and attributed to the node they were planted in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

from builders.backends.onnxruntime import OrtSession
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import TensorSpec
from pipeline.compile.steps.blobs import fetch, golden_set
from pipeline.quantization.schemes.cast import cast_float
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.bench import Bench
from tests.faults.nets import COUNTED, add_constants, after, mlp, rows, with_swapped, without
from tests.faults.table import Caught, Fault, blamed, caught
from tests.pipeline.quantization.small_nets import CPU, build, maker, ranges_of, run, x_net
from tests.validation.attribution.planted import weight, with_attribute, with_names, with_weight
from validation.comparison.sessions import expected_checks
from validation.limits.budget import budgets

SQNR, REL = "engine sqnr_db", "engine max_rel"
TENSORS = ("x", "h", "n", "m", "logits")


def in_engine(change: Callable[[ModelProto], ModelProto], check: str = SQNR) -> Callable[[Path], Caught]:
    """Compile the changed model as if it were the right one, prove it, and take it apart."""

    def plant(folder: Path) -> Caught:
        bench = Bench(folder, mlp(), rows())
        engine = bench.engine(change(bench.canonical()))
        return caught(engine.checks(), check, blamed(engine.attribution()))

    return plant


def rounded(model: ModelProto, name: str, bits: int) -> ModelProto:
    """A weight whose mantissa ends after so many bits."""
    bits_left = weight(model, name).view(np.uint32) >> np.uint32(23 - bits) << np.uint32(23 - bits)
    return with_weight(model, name, bits_left.view(np.float32))


def nan_at_a_place(folder: Path) -> Caught:
    text = f"{COUNTED} at = Equal(column, k_2i) bad = Where(at, k_nan, k_0) logits = Add(was, bad)"
    bench = Bench(folder, mlp(), rows())
    engine = bench.engine(after(bench.canonical(), "logits", text))

    def place(check: Check) -> str:
        index = check.note.removeprefix("at index [").split(",")[0]
        return f"position {index} of the batch, {blamed(engine.attribution())}"

    return caught(engine.checks(), "engine nonfinite", place)


def transposed(folder: Path) -> Caught:
    """A square output, so that no shape tells."""
    text = "a = MatMul(x, w) y = Transpose<perm=[0,2,1]>(a)"
    weights = {"w": np.random.default_rng(0).normal(size=(6, 4))}
    net = with_names(build("float[batch,4,6] x", "float[batch,4,4] y", text, weights))
    samples = {"x": np.random.default_rng(1).normal(size=(24, 4, 6)).astype(np.float32)}
    bench = Bench(folder, net, samples, (TensorSpec("x", "float32", ("batch", 4, 6)),))
    engine = bench.engine(with_attribute(bench.canonical(), "y", perm=[0, 1, 2]))
    return caught(engine.checks(), SQNR, blamed(engine.attribution()))


def overflow(folder: Path) -> Caught:
    """One sample is so large that a product leaves fp16, in a graph cast without a look at how large tensors get."""
    net = with_names(x_net("a = Abs(x) c = Max(a, x) b = Mul(a, c) y = Sqrt(b)"))
    samples = {"x": np.random.default_rng(1).normal(size=(48, 5)).astype(np.float32)}
    samples["x"][45] *= 1e3
    bench = Bench(folder, net, samples, (TensorSpec("x", "float32", ("batch", 5)),))
    graph = cast_float(bench.canonical(), "fp16")[0]
    place = blamed(bench.graph_attribution(graph, "fp16"))
    return caught(bench.graph_checks(graph, "fp16"), "quantization nonfinite", place)


def flipped_scale(folder: Path) -> Caught:
    bench = Bench(folder, mlp(), rows())
    model = bench.canonical()
    graph, _ = quantize_int8(model, ranges_of(model, rows(2), TENSORS), CPU)
    reader = maker(graph, maker(graph, "m0").input[1])
    add_constants(graph, {"flipped": -weight(graph, reader.input[1])})
    reader.input[1] = "flipped"
    place = blamed(bench.graph_attribution(graph, "int8"))
    return caught(bench.graph_checks(graph, "int8"), "quantization sqnr_db", place)


def wrong_range(folder: Path) -> Caught:
    """Calibrated on a range of one tensor that is a sixteenth of what it holds."""
    bench = Bench(folder, mlp(), rows())
    model = bench.canonical()
    ranges = ranges_of(model, rows(2), TENSORS)
    low, high = ranges.tensors["m"]
    wrong_ranges = replace(ranges, tensors={**ranges.tensors, "m": (low / 16, high / 16)})
    graph, _ = quantize_int8(model, wrong_ranges, CPU)
    (row,) = bench.graph_attribution(graph, "int8").blamed
    clipping = next(name for name in row.computed_by if name.startswith("QuantizeLinear/m"))
    return caught(bench.graph_checks(graph, "int8"), "quantization sqnr_db", f"node {row.node}, by {clipping}")


def off_by_one_bucket(folder: Path) -> Caught:
    """The bucket 5..16 is served by the kernel of 1..4 at its lower end: the fifth sample gets no answer."""
    text = f"{COUNTED} five = Equal(size, k_5i) last = Equal(column, k_4i) at = And(five, last) "
    text += "logits = Where(at, k_0, was)"
    bench = Bench(folder, mlp(), rows())
    engine = bench.engine(after(bench.canonical(), "logits", text))
    return caught(engine.checks(), SQNR, lambda check: f"{check.case}, {check.note}")


def other_version(folder: Path) -> Caught:
    """Version 1's engine under version 2's name: all three matrices are others."""
    engine = Bench(folder, mlp(0), rows()).engine(mlp(7))
    return caught(engine.checks(), SQNR, blamed(engine.attribution()))


def stale_golden(folder: Path) -> Caught:
    """A golden set that another version's model answered: the export stage alone fails."""
    old_bench, bench = Bench(folder / "old", mlp(7), rows()), Bench(folder / "new", mlp(0), rows())
    golden = golden_set(old_bench.store, old_bench.golden, old_bench.room())
    with OrtSession(fetch(bench.store, bench.onnx, bench.room() / "model.onnx"), optimized=False) as session:
        checks = expected_checks("export", session, golden, budgets("export", "fp32", golden.noise))
    bench.golden = bench.store.put_bytes(old_bench.store.read_blob(old_bench.golden))
    return caught([*checks, *bench.engine().checks()], "export sqnr_db", "the export stage; the engine stage is silent")


def wrong_labels(folder: Path) -> Caught:
    """Class 0 is called 1 in the data, and so on: every stage is near, and the task is not done."""
    model = mlp()
    decided_index = run(model, rows()).argmax(-1)
    bench = Bench(folder, model, rows(), labels=(decided_index + 1) % 10)
    return caught([*bench.checks, *bench.engine().checks()], "task accuracy", "the task; all stages are silent")


BOTH, QUANTIZED = frozenset({REL}), frozenset({"quantization max_rel"})
# The engine's kernel computes all three.
SECOND = "node MatMul_m0 (with Add_m1, Relu_m)"
EVERYWHERE = f"node LayerNormalization_n, node MatMul_h0 (with Add_h1, Relu_h), node MatMul_logits, {SECOND}"
FAULTS = (
    Fault("a swapped weight", in_engine(lambda m: with_swapped(m, "w2", 3, 8)), SQNR, SECOND, BOTH),
    Fault("a dropped bias", in_engine(lambda m: without(m, "m1")), SQNR, SECOND, BOTH),
    Fault(
        "a wrong epsilon (1e-3 for 1e-5)",
        in_engine(lambda m: with_attribute(m, "n", epsilon=1e-3)), SQNR, "node LayerNormalization_n",
    ),
    Fault("a kernel that keeps 13 bits", in_engine(lambda m: rounded(m, "w2", 13)), SQNR, SECOND),
    Fault("a transposed output", transposed, SQNR, "node Transpose_y", BOTH),
    Fault("NaN at one position of the batch", nan_at_a_place, "engine nonfinite",
          "position 2 of the batch, node MatMul_logits"),
    Fault("an off-by-one bucket", off_by_one_bucket, SQNR, "batch=5, worst of 4 edges", BOTH),
    Fault("an engine of another version", other_version, SQNR, EVERYWHERE, BOTH),
    Fault("a stale golden set", stale_golden, "export sqnr_db",
          "the export stage; the engine stage is silent", frozenset({"export max_rel"})),
    Fault("labels in a wrong order", wrong_labels, "task accuracy", "the task; all stages are silent"),
    Fault("fp16 overflow", overflow, "quantization nonfinite", "node Mul_b"),
    Fault("one flipped scale", flipped_scale, "quantization sqnr_db", "node MatMul_m0", QUANTIZED),
    Fault("a calibration range 16 times too small", wrong_range, "quantization sqnr_db",
          "node MatMul_logits, by QuantizeLinear/m_quantized", QUANTIZED),
)  # fmt: skip
