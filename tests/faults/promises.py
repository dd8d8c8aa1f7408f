"""Faults that no nearness on golden data shows: found by contracts, and by fuzzing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from enginesmith.core.reports.proof import Check
from enginesmith.core.types import TensorSpec
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.bench import Bench, Limits
from tests.faults.nets import COUNTED, MLP, after, mlp, rows
from tests.faults.table import Caught, Fault, blamed, caught
from tests.pipeline.quantization.small_nets import CPU, build, ranges_of
from tests.validation.attribution.planted import with_attribute, with_names

TENSORS = ("x", "h", "n", "m", "logits")
BITWISE = {"bitwise": {"runs": 3}}
# For calls beside the golden set: enough on a busy machine too.
TIME_S = 1.0
FREE: Limits = {"sqnr_db": None, "max_rel": None}


def promised(
    change: Callable[[ModelProto], ModelProto], contract: Mapping[str, Any], check: str, place: Callable[[Check], str]
) -> Callable[[Path], Caught]:
    """An engine that is near its graph and breaks a contract."""

    def plant(folder: Path) -> Caught:
        bench = Bench(folder, mlp(), rows())
        return caught(bench.engine(change(bench.canonical())).checks(contract), check, place)

    return plant


def noisy(model: ModelProto) -> ModelProto:
    """The last bits are drawn anew in every run."""
    return after(model, "logits", "noise = RandomNormalLike<scale=1e-6, seed=1.0>(was) logits = Add(was, noise)")


def tail(model: ModelProto) -> ModelProto:
    """A kernel that rounds the last sample of a batch otherwise."""
    text = f"{COUNTED} end = Sub(size, one) last = Equal(column, end) many = Greater(size, one) at = And(last, many) "
    return after(model, "logits", f"{text} factor = Where(at, k_1_0000005, k_1) logits = Mul(was, factor)")


def batch_statistics(folder: Path) -> Caught:
    """Exported in training mode: graph and engine agree, and each answer depends on the other requests."""
    text = MLP.replace("n = ", "mean = ReduceMean(h, batch) centred = Sub(h, mean) n = ").replace(
        "(h, g", "(centred, g"
    )
    bench = Bench(folder, mlp(text=text, batch=np.array([0])), rows())
    return caught([*bench.checks, *bench.engine().checks(BITWISE)], "engine contract batch size", _at)


def overconfident(folder: Path) -> Caught:
    """int8's limits of nearness leave room for logits that are all 12 % too large."""
    bench = Bench(folder, mlp(), rows(count=192))
    model = bench.canonical()
    graph, _ = quantize_int8(model, ranges_of(model, rows(2), TENSORS), CPU)
    engine = bench.engine(after(graph, "logits", "logits = Mul(was, k_1_12)"), graph, "int8")
    contract = {"distributional": {"rows": {"logits": {"ece": 0.02}}}}

    def place(check: Check) -> str:
        return "the graph" if "it is the graph's" in check.note else "the engine, not its graph"

    return caught(engine.checks(contract), "engine contract ece", place)


def wider_noise(folder: Path) -> Caught:
    """A stochastic model: both draw by themselves, so no two runs are near; the engine's spread is doubled."""
    text = "noise = RandomNormalLike<seed=1.0>(x) y = Add(x, noise)"
    bench = Bench(folder, with_names(build("float[batch,8] x", "float[batch,8] y", text, {})), rows())
    engine = bench.engine(with_attribute(bench.canonical(), "noise", scale=2.0, seed=2.0))
    contract = {"distributional": {"seeds": {"outputs": ["y"], "draws": 40}}}
    return caught(engine.checks(contract, FREE), "engine contract seeds", lambda check: f"output {check.output}")


def boxes_read_wrongly(folder: Path) -> Caught:
    """Centres taken for corners: every box lies half its size away."""
    net = with_names(
        build("float[batch,4,4] x", "float[batch,4,4] boxes", "a = Abs(x) boxes = Mul(a, ten)", {"ten": np.float32(10)})
    )
    samples = {"x": np.random.default_rng(1).normal(size=(48, 4, 4)).astype(np.float32)}
    bench = Bench(folder, net, samples, (TensorSpec("x", "float32", ("batch", 4, 4)),))
    text = "xy, wh = Split<axis=-1, num_outputs=2>(was) half = Mul(wh, k_0_5) corner = Add(xy, half) "
    text += "boxes = Concat<axis=-1>(corner, wh)"
    contract = {"structured": {"boxes": {"boxes": {"form": "xywh"}}}}
    engine = bench.engine(after(bench.canonical(), "boxes", text))
    return caught(engine.checks(contract, FREE), "engine contract boxes", lambda check: f"output {check.output}")


def end_lost(folder: Path) -> Caught:
    """A decoder whose end token (0) comes out as 9: a decision among many that may differ, but not this one."""
    net = with_names(
        build(
            "float[batch,6] x",
            "int64[batch,6] tokens",
            "a = Abs(x) b = Mul(a, four) c = Floor(b) tokens = Cast<to=7>(c)",
            {"four": np.float32(4)},
        )
    )
    samples = {"x": np.random.default_rng(1).normal(size=(48, 6)).astype(np.float32)}
    bench = Bench(folder, net, samples, (TensorSpec("x", "float32", ("batch", 6)),))
    text = "none = Equal(was, k_0i) tokens = Where(none, k_9i, was)"
    contract = {"structured": {"tokens": {"eos": {"token": 0}}}}
    engine = bench.engine(after(bench.canonical(), "tokens", text))
    free_fields = {"argmax_agreement": 0.5}
    return caught(engine.checks(contract, free_fields), "engine contract eos", lambda check: f"output {check.output}")


def fuzzed(change: Callable[[ModelProto], ModelProto], name: str) -> Callable[[Path], Caught]:
    """An engine that every check on golden data passes; what fuzzing makes of it."""

    def plant(folder: Path) -> Caught:
        bench = Bench(folder, mlp(), rows())
        engine = bench.engine(change(bench.canonical()))
        if wrong_names := [check.name for check in engine.checks() if not check.passed]:
            return Caught(f"engine {wrong_names[0]}", "", "", "")
        report = engine.fuzzed()
        if not report.smallest:
            return Caught("nothing", "", "", "")
        check = report.smallest[0].failed[0]
        result = caught([check], f"engine {check.name}", report.smallest[0].case)
        return Caught(f"fuzz {check.name}", result.place, result.measured, result.limit)

    return plant


def at_one_size(folder: Path) -> Caught:
    """Between the ends of a bucket, where no case of the golden set lies."""
    bench = Bench(folder, mlp(), rows())
    engine = bench.engine(at_size(bench.canonical(), "wrong = Equal(size, k_15i)"))

    def place(check: Check) -> str:
        return f"{check.case.removesuffix(' values=realistic')}, {blamed(engine.attribution([check.case]))}"

    return caught(engine.checks(seconds=TIME_S), "engine sizes", place)


def now_and_then(folder: Path) -> Caught:
    """One call in about 50 answers zeros; none of the first 88 does."""
    bench = Bench(folder, mlp(), rows())
    text = "drawn = RandomUniform<shape=[1], seed=9.0>() bad = Greater(drawn, k_0_98) logits = Where(bad, k_0, was)"
    engine = bench.engine(after(bench.canonical(), "logits", text))
    result = caught(engine.checks(seconds=TIME_S), "engine calls repeated", "one call in many")
    return replace(result, measured="1 or more" if float(result.measured or 0) >= 1 else result.measured)


def at_size(model: ModelProto, condition: str) -> ModelProto:
    """The last sample of a batch of some sizes gets zeros."""
    text = f"{COUNTED} {condition} end = Sub(size, one) last = Equal(column, end) at = And(wrong, last) "
    return after(model, "logits", f"{text} logits = Where(at, k_0, was)")


def leaking(folder: Path) -> Caught:
    """Something of the whole batch is multiplied by 0 and added: no number changes, until one of them is NaN."""
    text = "whole = ReduceMean(was, k_0i) none = Mul(whole, k_0) logits = Add(was, none)"
    bench = Bench(folder, mlp(), rows())
    engine = bench.engine(after(bench.canonical(), "logits", text))
    return caught(engine.checks(), "engine magnitudes", lambda check: check.case)


def few_tokens(folder: Path) -> Caught:
    """A mean over tokens that is wrong for rows of one or two, where golden rows have three to five."""
    text = "m = Cast<to=1>(mask) wide = Unsqueeze(m, last) kept = Mul(x, wide) sum = ReduceSum<keepdims=0>(kept, one) "
    text += "count = ReduceSum(m, one) mean = Div(sum, count) y = MatMul(mean, w)"
    weights = {"w": np.random.default_rng(0).normal(size=(8, 4)), "one": np.array([1]), "last": np.array([2])}
    net = build("float[batch,6,8] x, int64[batch,6] mask", "float[batch,4] y", text, weights)
    rng = np.random.default_rng(1)
    samples = {"x": rng.normal(size=(48, 6, 8)).astype(np.float32)}
    samples["mask"] = (np.arange(6) < rng.integers(3, 6, (48, 1))).astype(np.int64)
    specs = TensorSpec("x", "float32", ("batch", 6, 8)), TensorSpec("mask", "int64", ("batch", 6))
    bench = Bench(folder, with_names(net), samples, specs)
    text = "tokens = ReduceSum(mask, k_1i) few = Less(tokens, k_3i) by = Where(few, k_1_5, k_1) y = Mul(was, by)"
    return caught(bench.engine(after(bench.canonical(), "y", text)).checks(), "engine magnitudes", lambda c: c.case)


def _at(check: Check) -> str:
    return f"output {check.output}, {check.case}"


FAULTS = (
    Fault("a nondeterministic op", promised(noisy, BITWISE, "engine contract bitwise", lambda c: f"output {c.output}"),
          "engine contract bitwise", "output logits", frozenset({"engine calls repeated"})),
    Fault("a kernel that rounds the end of a batch otherwise",
          promised(tail, {"bitwise": {"position": True}}, "engine contract batch position", _at),
          "engine contract batch position", "output logits, 16 of 16"),
    Fault("normalization over the batch", batch_statistics, "engine contract batch size", "output logits, first of 16"),
    Fault("overconfident int8 logits (12 %)", overconfident, "engine contract ece", "the engine, not its graph",
          frozenset({"engine sqnr_db", "engine max_rel", "engine contract js", "engine contract flips",
                     "engine contract brier"})),
    Fault("a sampler with twice the spread", wider_noise, "engine contract seeds", "output y"),
    Fault("boxes by their centres", boxes_read_wrongly, "engine contract boxes", "output boxes"),
    Fault("a lost end of sequence", end_lost, "engine contract eos", "output tokens"),
    Fault("a wrong answer at one size inside a bucket", at_one_size, "engine sizes", "batch=15, node MatMul_logits"),
    Fault("a wrong answer in one call of 50", now_and_then, "engine calls repeated", "one call in many"),
    Fault("an answer beyond the last profile", fuzzed(lambda m: at_size(m, "wrong = Greater(size, k_16i)"), "x"),
          "fuzz max_rel", "batch=17 values=realistic"),
    Fault("a mask with one or two tokens", few_tokens, "engine magnitudes", "batch=4 values=lengths"),
    Fault("one request's NaN in all answers", leaking, "engine magnitudes", "batch=4 values=nan"),
)  # fmt: skip
