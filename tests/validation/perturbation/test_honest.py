import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from builders.backends.onnxruntime import OrtSession
from enginesmith.core.types import Precision, Tensors
from pipeline.quantization.schemes.cast import cast_float, emulate
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.nets import mlp, rows
from tests.pipeline.quantization.small_nets import CPU, ranges_of, x_net
from validation.comparison.sessions import drift_checks
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import HONEST_DB, LEAST_DB, OutputLimits, budgets, default_budget
from validation.limits.noise_floor import Noise, OutputFloor
from validation.limits.rounding import Honest, with_chance
from validation.metrics.drift import Drift, measure
from validation.perturbation.graph import perturb_graph
from validation.perturbation.honest import measure_rounding


def golden_of(session: OrtSession, count: int = 6) -> GoldenSet:
    x = rows(count=4 * count + 1)["x"]
    groups = {f"golden {index}": x[4 * index : 4 * index + 4] for index in range(count)} | {"batch=1": x[-1:]}
    cases = [
        Case(name, "edge" if "=" in name else "golden", {"x": v}, session.run({"x": v})) for name, v in groups.items()
    ]
    return GoldenSet(tuple(cases))


def honest_of(folder: Path, model: onnx.ModelProto, **more: object) -> Honest:
    return stages_of(folder, model, **more)[-1]


def stages_of(
    folder: Path, model: onnx.ModelProto, count: int = 6, half: Precision | None = None, **more: bool
) -> list[Honest]:
    path, opener = folder / "graph.onnx", partial(OrtSession, optimized=False)
    onnx.save(model, path)
    with OrtSession(path, optimized=False) as session:
        perturbed_graph = perturb_graph(path, opener, folder, half, more.pop("activation_blocks", False))
        return list(measure_rounding([path], perturbed_graph, golden_of(session, count), session, **more))


def in_int8(seed: int = 0) -> onnx.ModelProto:
    model = mlp(seed)
    return quantize_int8(model, ranges_of(model, rows(2), ("x", "h", "n", "m", "logits")), CPU)[0]


def test_honest_fp16_drift_is_near_that_of_omitted_roundings(tmp_path):
    graph = emulate(cast_float(mlp(), "fp16")[0])
    honest_drifts = honest_of(tmp_path, graph)
    onnx.save(mlp(), tmp_path / "whole.onnx")
    x = {"x": rows(count=24)["x"]}
    with OrtSession(tmp_path / "graph.onnx", optimized=False) as rounded, OrtSession(tmp_path / "whole.onnx") as whole:
        skipped = measure(rounded.run(x)["logits"], whole.run(x)["logits"]).sqnr_db
    assert abs(honest_drifts.drifts["logits", "golden"].sqnr_db - skipped) < 4  # the weights of `whole` are not rounded


def test_an_element_of_an_edge_weighs_more_than_one_of_the_golden_data(tmp_path):
    honest_drifts = honest_of(tmp_path, in_int8())
    golden, edge = (honest_drifts.drifts["logits", kind] for kind in ("golden", "edge"))
    assert 40 < golden.sqnr_db < 65 and edge.sqnr_db < golden.sqnr_db - 6
    assert golden.slices is not None and (golden.slices.axes[1].error_sq > 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_of_a_small_edge_is_as_strict_as_that_of_the_golden_cases(tmp_path, seed):
    honest_drifts = honest_of(tmp_path, emulate(cast_float(mlp(seed), "fp16")[0]))
    golden, edge = (honest_drifts.drifts["logits", kind] for kind in ("golden", "edge"))
    assert edge.max_rel >= 0.999 * golden.max_rel and edge.sqnr_db <= golden.sqnr_db + 0.001


@pytest.mark.parametrize(("filled", "most"), [(320, 0.0), (40, 1.0), (6, 12.0)])
def test_rounding_of_a_sparse_output_is_measured_on_nonzero_elements(filled, most):
    wide_drift = drift(60)
    assert most - 6 <= wide_drift.sqnr_db - with_chance(replace(wide_drift, count=320), filled).sqnr_db <= most


def test_a_repeated_measurement_gives_the_same_figures(tmp_path):
    assert honest_of(tmp_path, in_int8()) == honest_of(tmp_path, in_int8())


def test_an_unknown_rounding_has_a_reason(tmp_path):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 20]> net (float[n,8] x) => (float[n,8] y) '
        "{ r = RandomNormalLike(x) y = Add(x, r) }"
    )
    assert honest_of(tmp_path, model) == Honest(reason="RandomNormalLike gives random results")


@pytest.mark.parametrize(
    ("operator", "reason"), [("Tanh", ""), ("Mish", ""), ("Swish", "no operator RandomUniformLike")]
)
def test_a_graph_of_a_newer_opset_is_measured_if_older_opsets_have_its_operators(tmp_path, operator, reason):
    model = x_net(f"h = MatMul(x, w) y = {operator}(h)", opset=24)
    onnx.save(model, tmp_path / "graph.onnx")
    with OrtSession(tmp_path / "graph.onnx", optimized=False) as session:
        perturbed_graph = perturb_graph(tmp_path / "graph.onnx", partial(OrtSession, optimized=False), tmp_path)
        golden = GoldenSet([Case("golden", "golden", {"x": np.ones((16, 5), np.float32)}, {})])
        (*_, honest_drifts) = measure_rounding([tmp_path / "graph.onnx"], perturbed_graph, golden, session)
    assert reason in honest_drifts.reason and bool(honest_drifts.drifts) is not bool(reason)


def test_a_large_model_is_measured_in_stages_that_only_loosen(tmp_path, monkeypatch):
    assert len(stages_of(tmp_path, in_int8())) == 1
    monkeypatch.setattr("validation.perturbation.honest.SMALL_BYTES", 0)
    for seed in range(3):
        first_budgets, last = (budgets("engine", "int8", None, honest) for honest in stages_of(tmp_path, in_int8(seed)))
        for kind in ("golden", "edge"):
            tight, loose = first_budgets.of("logits", kind), last.of("logits", kind)
            assert (
                (kind == "edge" or tight != loose) and tight.sqnr_db >= loose.sqnr_db and tight.max_rel <= loose.max_rel
            )
            assert tight.centered_sqnr_db >= loose.centered_sqnr_db
            assert (tight.quartile_sqnr_db or 0) >= (loose.quartile_sqnr_db or 0)


@pytest.mark.parametrize("graph", [emulate(cast_float(mlp(), "fp16")[0]), in_int8()], ids=["fp16", "int8"])
def test_a_thorough_measurement_of_a_large_graph_uses_more_samples(tmp_path, monkeypatch, graph):
    monkeypatch.setattr("validation.perturbation.honest.SMALL_BYTES", 0)
    few_stages, more_stages = (stages_of(tmp_path, graph, thorough=is_thorough)[-1] for is_thorough in (False, True))
    key = "logits", "golden"
    assert few_stages.drifts[key].count * 3 == more_stages.drifts[key].count, "8 and 24 samples"
    assert more_stages.drifts[key].max_rel >= few_stages.drifts[key].max_rel


def test_a_cast_is_rounded_in_several_ways_and_omitted_edges_have_their_own_rounding(tmp_path, monkeypatch):
    """Where inputs are large, `d` cancels more: an edge that the others do not show. Twice honest rounding is allowed
    there, and no more; at no edge does another measurement tighten a limit."""
    monkeypatch.setattr("validation.perturbation.honest.SMALL_BYTES", 0)
    model = x_net("q = Mul(x, x) s = Add(q, x) d = Sub(s, q) y = MatMul(d, w)")
    x = np.random.default_rng(3).normal(size=(24, 5)).astype(np.float32)
    arrays = {"golden 0": x[:12], "golden 1": x[12:], "batch=1": 2 * x[:1], "batch=4": x[:4], "batch=16": 99 * x[:16]}
    arrays["batch=8"] = x[:8]
    cases = [Case(name, "edge" if "=" in name else "golden", {"x": value}, {}) for name, value in arrays.items()]
    golden, opener = GoldenSet(tuple(cases)), partial(OrtSession, optimized=False)
    onnx.save(model, tmp_path / "graph.onnx")
    with OrtSession(tmp_path / "graph.onnx", optimized=False) as reference:
        perturbed_graph = perturb_graph(tmp_path / "graph.onnx", opener, tmp_path, "fp16")
        stages = list(measure_rounding([], perturbed_graph, golden, reference, thorough=True))
        golden_only, all_cases = stages[-2:]
        assert stages[0].drifts["y", "golden"].count == 8 * 5, "of each group the first four samples"
        assert all_cases.drifts["y", "golden"] == golden_only.drifts["y", "golden"]
        assert all_cases.drifts["y", "batch=16"].sqnr_db < all_cases.drifts["y", "edge"].sqnr_db - 12
        all_limits = [OutputLimits(budgets("engine", "fp16", None, stage), stage.drifts) for stage in stages]
        for name in ("batch=8", "batch=16"):
            sqnr_db = [limits.at("y", "edge", 0, name)[0].sqnr_db or 0.0 for limits in all_limits]
            assert sqnr_db == sorted(sqnr_db, reverse=True)

        def failed(factor: float) -> set[str]:
            def answer(inputs: Tensors) -> Tensors:
                output, case = reference.run(inputs)["y"], "batch=16" if len(inputs["x"]) == 16 else "golden"
                size = factor * np.sqrt(np.square(output).mean()) * 10 ** (-all_cases.drifts["y", case].sqnr_db / 20)
                return {"y": output + size * np.random.default_rng(0).choice([-1, 1], output.shape).astype(np.float32)}

            candidate = Mock(inputs=reference.inputs, outputs=reference.outputs, run=answer)
            checks = drift_checks("engine", reference, candidate, golden, all_limits[-1])
            return {check.name for check in checks if not check.passed and check.case == "batch=16"}

        assert not failed(1.9) and "sqnr_db" in failed(2.1)


def test_a_thorough_measurement_of_a_small_graph_uses_more_cases(tmp_path):
    graph = emulate(cast_float(mlp(), "fp16")[0])
    few_stages, more = (stages_of(tmp_path, graph, count=15, thorough=is_thorough)[-1] for is_thorough in (False, True))
    key = "logits", "golden"
    assert few_stages.drifts[key].count * 15 == more.drifts[key].count * 12
    assert more.drifts[key].max_rel >= few_stages.drifts[key].max_rel
    assert len(stages_of(tmp_path, graph, count=12, thorough=True)) == 1, "there are no more cases"
    assert len(stages_of(tmp_path, graph, count=1, thorough=True, whole=True)) == 5, (
        "one case, as of a check, is one draw"
    )


def drift(sqnr_db: float, max_rel: float = 1e-3) -> Drift:
    return Drift(count=8, peak=1.0, max_abs=max_rel, expected_sq=1.0, error_sq=10 ** (-sqnr_db / 10), centered_sq=0.5)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8", "int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize(("honest", "limit"), [(70.0, 64.0), (16.0, 10.0), (5.0, LEAST_DB), (math.inf, 104.0)])
def test_the_limit_of_an_engine_is_twice_the_honest_rounding(precision, honest, limit):
    limits = budgets("engine", precision, None, Honest({("y", "golden"): drift(honest)}))
    budget, default = limits.of("y", "golden"), default_budget("engine", precision)
    assert budget.sqnr_db == budget.slice_sqnr_db == pytest.approx(limit, abs=0.1)
    assert f"honest {precision} rounding is {honest:.0f} dB below this output; twice" in limits.notes["y", "golden"]
    assert ("looser than" in limits.notes["y", "golden"]) == (limit < default.sqnr_db)
    assert limits.of("y", "edge") == default


def test_variation_and_greatest_error_have_limits_from_honest_rounding_too():
    budget = budgets("engine", "int8", None, Honest({("y", "edge"): drift(50)})).of("y", "edge")
    assert budget.centered_sqnr_db == pytest.approx(50 - 3 - HONEST_DB, abs=0.1)
    assert budget.max_rel == pytest.approx(4e-3)


def test_quantization_to_integers_keeps_its_documented_limits():
    assert budgets("quantization", "int8", Noise({"y": {"golden": OutputFloor(135.0, 1e-6)}})).measured == {}


def test_an_ill_conditioned_models_noise_floor_loosens_a_default_with_a_note():
    """float32 itself is 65 dB from exact, and two honest kernels 63.5 dB from each other."""
    noise = Noise({"y": {"golden": OutputFloor(65.0, 1e-3)}})
    for stage in ("export", "engine"):
        limits = budgets(stage, "fp32", noise)
        assert limits.of("y", "golden").sqnr_db == 45 and limits.of("y", "golden").max_rel == pytest.approx(
            1e-3 * 10**1.5
        )
        assert limits.notes["y", "golden"] == "float32's own noise is 65 dB below this output (looser than 80)"
    assert (
        budgets("engine", "fp32", Noise({"y": {"golden": OutputFloor(20.0, 1.0)}})).of("y", "golden").sqnr_db
        == LEAST_DB
    )


@pytest.mark.parametrize("written", [80.0, 20.0])
def test_limits_of_the_spec_replace_measured_limits(written):
    honest_drifts = Honest({("y", "golden"): drift(50)})
    limits = budgets("engine", "int8", None, honest_drifts).override({"sqnr_db": written})
    assert limits.of("y", "golden").sqnr_db == written and not limits.notes
    assert limits.of("y", "golden").slice_sqnr_db <= min(written, default_budget("engine", "int8").slice_sqnr_db)
    lifted_value = budgets("engine", "int8", None, honest_drifts).override({"sqnr_db": None}).of("y", "golden")
    assert lifted_value.sqnr_db is lifted_value.slice_sqnr_db is lifted_value.centered_sqnr_db is None
    other_value = budgets("engine", "int8", None, honest_drifts).override({"max_rel": 0.5}).of("y", "golden")
    assert other_value.max_rel == 0.5 and other_value.sqnr_db == 44.0


def test_a_part_of_a_model_has_the_limits_of_its_outputs():
    honest_drifts = Honest({("y", "golden"): drift(50), ("z", "golden"): drift(12)})
    assert budgets("engine", "int8", None, honest_drifts).tightest.sqnr_db == 44.0
    assert budgets("engine", "int8", None, Honest({("y", "golden"): drift(12)})).tightest.sqnr_db == 6.0
    assert budgets("engine", "int8", None).tightest == default_budget("engine", "int8")


def test_the_measurement_has_a_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, readings = in_int8(), iter([100.0, 105.0, 111.0])
    monkeypatch.setattr("validation.perturbation.honest.BASE_MIB", 10)
    monkeypatch.setattr("validation.perturbation.honest.held_mib", lambda _: next(readings))
    assert honest_of(tmp_path, model) == Honest(reason="its runs were ended when they held over 10 MiB")
    assert next(readings, None) is None, "it was looked at before each run"


def test_the_measurement_has_a_time_limit_and_raises_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_int8()
    monkeypatch.setattr("validation.perturbation.honest.MOST_S", -1.0)
    assert honest_of(tmp_path, model) == Honest(reason="its runs were ended after -1 s")

    def fail(*_: object) -> None:
        raise KeyError("no such tensor")

    monkeypatch.setattr("validation.perturbation.graph.with_rounding", fail)
    assert honest_of(tmp_path, model) == Honest(reason="'no such tensor'")
