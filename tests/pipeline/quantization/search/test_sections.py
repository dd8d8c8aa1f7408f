"""Where a model is cut so that groups are judged near, and that what is measured near is what the outputs show."""

import math

import numpy as np
import pytest
from onnx import ModelProto

from enginesmith.core.types import Dim, TensorSpec
from pipeline.quantization.graph import element_types
from pipeline.quantization.insertion_points import find_sites, prepare_model
from pipeline.quantization.schemes.qdq import quantize_int8
from pipeline.quantization.search import sensitivity
from pipeline.quantization.search.sections import Section, divide_sections
from pipeline.quantization.search.sensitivity import sweep
from pipeline.quantization.settings.groups import SmoothingGroup, find_groups
from pipeline.quantization.settings.runs import SessionRunner, group_runs
from tests.pipeline.quantization.search.outlier_nets import all_ranges
from tests.pipeline.quantization.small_nets import CPU, TENSORRT_FP32, build

WIDTH, LAYERS = 16, 8
# Two products around a Relu, whose result is added to what they read, and a constant, so that errors shrink beside it.
BLOCK = """
    u{i} = MatMul(x{i}, a{i})
    r{i} = Relu(u{i})
    d{i} = MatMul(r{i}, b{i})
    s{i} = Add(x{i}, d{i})
    x{j} = Add(s{i}, c)
"""
SKIPPING = "u = MatMul(x, a0)\n r = Relu(u)\n d = MatMul(r, a1)\n e = Relu(d)\n f = MatMul(e, a2)\n y = Add(f, u)"


def residual_net(layers: int = LAYERS) -> ModelProto:
    rng = np.random.default_rng(1)
    text = (
        "x0 = Relu(x)\n" + "".join(BLOCK.format(i=i, j=i + 1) for i in range(layers)) + f"y = MatMul(x{layers}, last)"
    )
    weights = {f"{side}{i}": rng.normal(size=(WIDTH, WIDTH)) / 5 for i in range(layers) for side in "ab"}
    return wrap(text, weights | {"last": rng.normal(size=(WIDTH, WIDTH)), "c": np.full(WIDTH, 1.0)})


def wrap(text: str, weights: dict[str, np.ndarray]) -> ModelProto:
    return prepare_model(build(f"float[batch,{WIDTH}] x", f"float[batch,{WIDTH}] y", text, weights))


def samples(count: int = 32) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(2).normal(size=(count, WIDTH)).astype(np.float32)}


def groups_of(model: ModelProto) -> tuple[SmoothingGroup, ...]:
    return find_groups(model, find_sites(model)[0])


def divided(model: ModelProto, least: int) -> list[Section]:
    return divide_sections(model, groups_of(model), element_types(model), least)


def damages(model: ModelProto, horizon: int, monkeypatch: pytest.MonkeyPatch, scheme=TENSORRT_FP32) -> np.ndarray:
    monkeypatch.setattr(sensitivity, "divide_sections", lambda *arguments: divide_sections(*arguments, horizon))
    result, _ = sweep(model, groups_of(model), {}, all_ranges(model, samples()), scheme, [samples()])
    return np.array([result[group.activation] for group in groups_of(model)])


def test_a_residual_net_is_cut_between_its_blocks():
    result = divided(residual_net(), 4)
    assert [section.end for section in result] == ["s1", "s3", "s5", "s7", None]
    expected = [["x0", "r0", "x1", "r1"], ["x2", "r2", "x3", "r3"]]
    assert [[group.activation for group in section.groups] for section in result][:2] == expected
    assert sum(len(section.groups) for section in result) == len(groups_of(residual_net()))


def test_nothing_is_cut_below_a_skip():
    model = wrap(SKIPPING, {f"a{i}": np.eye(WIDTH) for i in range(3)})
    assert [section.end for section in divided(model, 1)] == ["u", None]
    assert [section.end for section in divided(model, 2)] == [None]


def test_an_output_is_no_waist():
    model = residual_net(2)
    shown_output = model.graph.output.add()
    shown_output.CopyFrom(model.graph.output[0])
    shown_output.name = "x1"
    assert [section.end for section in divided(model, 1)] == ["u0", "d0", None]


def test_a_group_that_is_read_behind_a_waist_ends_there():
    text = "u = MatMul(x, a0)\n v = Relu(u)\n w = MatMul(v, a1)\n s = Relu(w)\n t = MatMul(x, a2)\n y = Mul(s, t)"
    model = wrap(text, {f"a{i}": np.eye(WIDTH) for i in range(3)})
    assert [section.end for section in divided(model, 1)] == ["w", None]
    assert [group.activation for group in divided(model, 1)[-1].groups] == ["x"]


@pytest.mark.parametrize("scheme", [TENSORRT_FP32, CPU], ids=["tensorrt", "cpu"])
def test_errors_measured_nearby_equal_those_at_the_outputs(monkeypatch, scheme):
    model = residual_net()
    exact_array, near_array = (damages(model, horizon, monkeypatch, scheme) for horizon in (1000, 4))
    off_number = 10 * np.log10(near_array / exact_array)
    assert np.array_equal(near_array[-5:], exact_array[-5:]), "those of the last two sections are measured there"
    assert 0 < abs(off_number[:-5]).mean() < 1.5
    # Without what the rest of the model makes of them they would be far off.
    monkeypatch.setattr(sensitivity, "_gain", lambda *_: 1.0)
    assert abs(10 * np.log10(damages(model, 4, monkeypatch, scheme) / exact_array))[:4].mean() > 3


def test_a_tail_ends_a_section_behind_its_own_group(monkeypatch):
    seen = []
    inner = sensitivity.write_searched
    monkeypatch.setattr(
        sensitivity, "write_searched", lambda *arguments: seen.append(len(arguments[0].graph.node)) or inner(*arguments)
    )
    for layers in (8, 16):
        damages(residual_net(layers), 4, monkeypatch)
    assert len(seen) == 17 + 33 and max(seen) <= 4 * 5 + 1


def test_damages_equal_those_of_groups_quantized_alone(monkeypatch):
    model, inputs = residual_net(2), samples()
    groups, ranges = groups_of(model), all_ranges(model, samples())
    exact_output = SessionRunner(model).run(inputs)["y"].astype(np.float64)
    for group, noise in zip(groups, damages(model, 1000, monkeypatch), strict=True):
        other_texts = {node: "fp32" for other_group in groups if other_group is not group for node in other_group.nodes}
        actual = SessionRunner(quantize_int8(model, ranges, TENSORRT_FP32, other_texts)[0]).run(inputs)["y"]
        assert noise == pytest.approx(np.square(actual - exact_output).sum() / np.square(exact_output).sum(), rel=1e-3)


def test_a_group_without_a_finite_answer_has_infinite_damage():
    weights = {"a0": np.eye(WIDTH), "a1": np.eye(WIDTH), "one": np.float32(1)}
    model = wrap("u = MatMul(x, a0)\n v = Add(u, one)\n w = Log(v)\n y = MatMul(w, a1)", weights)
    entries = {"x": np.full((4, WIDTH), -0.999, np.float32)}
    entries["x"][0] = 127 * 0.999 / 25.6  # by which -0.999 is rounded below -1
    ranges = all_ranges(model, entries)
    result, _ = sweep(model, groups_of(model), {}, ranges, TENSORRT_FP32, [entries])
    assert result["x"] == math.inf and result["w"] < 1


def test_only_the_needed_part_of_a_joined_run_is_kept(monkeypatch):
    model, single_sample = residual_net(), samples(16)["x"]
    rows, joined_runs = TensorSpec("x", "float32", ("batch", WIDTH)), []
    ((_, joined_run),) = group_runs(
        ((i + 1, {"x": single_sample[i : i + 1]}) for i in range(16)), (rows,), (Dim("batch", 1, 16, 16),)
    )
    inner = sensitivity._within
    monkeypatch.setattr(sensitivity, "_within", lambda *args: joined_runs.append(inner(*args)) or joined_runs[-1])
    for max_bytes in (1 << 20, 1 << 14, 1):
        monkeypatch.setattr(sensitivity, "MOST_KEPT", max_bytes)
        sweep(model, groups_of(model), {}, all_ranges(model, samples()), TENSORRT_FP32, [joined_run])
    counts = [[len(values["x"]) for values in runs] for runs in joined_runs]
    assert counts[0] == [16] and 1 < counts[1][0] < 16 and counts[2] == [1]
    assert np.array_equal(joined_runs[1][0]["x"], single_sample[: counts[1][0]])
    held_bytes = sum(array.nbytes for array in joined_runs[1][0].values())
    assert held_bytes <= 1 << 14 < held_bytes * (counts[1][0] + 1) // counts[1][0], "one more is too many"
