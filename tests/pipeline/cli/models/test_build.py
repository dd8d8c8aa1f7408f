from dataclasses import replace

import numpy as np
import onnx
import pytest

from enginesmith.core.types import BuildFailure
from enginesmith.registry.manifest import EngineEntry
from pipeline.cli.models.build import show_outcome
from pipeline.compile.publication.publish import HINTS
from pipeline.outcome import Outcome, UnitResult
from pipeline.values import Attributed
from tests.pipeline.projects import Project
from tests.pipeline.quantization.small_nets import build


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "bf16"), "precisions bf16: not in the spec, which has fp32, int8"),
        (("--target", "cpu,sm_90"), "targets sm_90: not in the spec"),
    ],
)
def test_an_unknown_selection_is_refused(project: Project, words: tuple[str, ...], message: str) -> None:
    result = project.build(*words)
    assert result.code == 2 and message in result.err


def test_a_partial_build_moves_no_channel_and_names_the_command(built: Project) -> None:
    output_before = built.run("registry", "history", "tiny:candidate").out
    result = built.run("build", built.spec, "--target", "cpu", "--precision", "fp32")
    assert result.code == 0 and "tiny@2 published\n" in result.out
    assert (
        "channel candidate did not move: this run built only cpu; fp32, not the whole spec; to move it, run "
        "`enginesmith promote tiny@2 tiny:candidate`, with --accept-loss if nodes lose" in result.err
    )
    json = built.build("--target", "cpu", "--precision", "fp32").json
    assert (json["version"], json["channel"], json["narrowed"]) == ("2", None, "cpu; fp32")
    assert built.run("registry", "history", "tiny:candidate").out == output_before
    refused = built.run("promote", "tiny@2", "tiny:candidate")
    assert refused.code == 2 and "tiny@2 has nothing for cpu int8, sm_75 int8, sm_89 fp32, " in refused.err
    assert built.run("promote", "tiny@2", "tiny:candidate", "--accept-loss").code == 0
    assert "cpu int8, sm_75 int8" in built.run("registry", "history", "tiny:candidate").out
    whole = built.build("--target", "all", "--precision", "fp32,int8").json
    assert (whole["version"], whole["channel"], whole["narrowed"]) == ("1", "candidate", None)


def test_a_failed_check_on_random_inputs_mentions_them(project: Project) -> None:
    rules = {"limits": {"int8": {"quantization": {"sqnr_db": 1000.0}}}, "latency": "off", "attribution": "off"}
    quantization = {"search": "never"}
    project.change_spec(precisions=["int8"], targets=["cpu"], golden=None, validation=rules, quantization=quantization)
    result = project.run("build", project.spec)
    assert result.code == 1 and "note: the checks ran on random numbers" in result.err
    project.change_spec(golden={"data": "golden.npz"})
    assert "random numbers" not in project.run("build", project.spec).err


def test_an_overflowing_fp16_graph_recommends_calibration_data(project: Project) -> None:
    model = build(
        "float[batch,5] x", "float[batch,5] y", "n = MatMul(x, w) h = Mul(n, big) s = MatMul(h, w) y = Div(s, big)",
        {"big": 6e4, "w": 3 * np.eye(5)},
    )  # fmt: skip
    onnx.save(model, project.spec.parent / "big.onnx")
    project.change_spec(
        source={"onnx": "big.onnx"}, inputs={"x": {"dtype": "float32", "shape": ["batch", 5]}}, outputs=["y"],
        precisions=["fp16"], targets=["cpu"], calibration=None, golden=None,
        validation={"latency": "off", "attribution": "off"},
    )  # fmt: skip
    result = project.run("build", project.spec)
    assert result.code == 1 and "with calibration.data these stay in fp32" in result.err
    x = np.random.default_rng(0).standard_normal((40, 1, 5)).astype(np.float32)
    np.savez(project.spec.parent / "seen.npz", x=x)
    project.change_spec(calibration={"data": "seen.npz"})
    assert project.run("build", project.spec).code == 0


def test_a_graph_that_selects_other_rows_names_a_suitable_metric(project: Project) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((5, 8)), "flat": np.array([-1]), "zero": np.float32(0)}
    text = "m = MatMul(x, w) all = Reshape(m, flat) more = Greater(all, zero) y = Compress(all, more)"
    onnx.save(build("float[batch,5] x", "float[n] y", text, weights), project.spec.parent / "selecting.onnx")
    np.savez(project.spec.parent / "seen.npz", x=rng.standard_normal((40, 30, 5)).astype(np.float32))
    project.change_spec(
        source={"onnx": "selecting.onnx"}, inputs={"x": {"dtype": "float32", "shape": [30, 5]}}, outputs=["y"],
        dims=None, precisions=["int8"], targets=["cpu"], calibration={"data": "seen.npz"}, golden=None,
        quantization={"search": "never"}, validation={"attribution": "off"},
    )  # fmt: skip
    result = project.run("build", project.spec)
    assert result.code == 1 and "let a task metric judge" in result.err


class Broken(UnitResult):
    failure = BuildFailure("cpu fp16", "error", "drift", "\n".join(map(str, range(20))), "enginesmith redo 12")


@pytest.mark.parametrize(("rules", "printed"), [(24, True), (25, False)])
def test_failures_are_reported_with_remedies_without_long_proposals(capsys, rules, printed) -> None:
    snippet = "\n".join(
        ["quantization:", "  overrides:", *('    - {match: "n", precision: fp32}' for _ in range(rules))]
    )
    blame = Attributed("quantization", "graph fp16", ("cpu fp16 onnxruntime",), None, "many", snippet)
    entry = EngineEntry("cpu", "fp16", "onnxruntime", "failed", "drift", notes=HINTS[1:])
    show_outcome(Outcome("tiny", None, False, (Broken(entry, attributed=(blame,)),), {"fp16": {"a": 0.5}}, page="p"))
    output = capsys.readouterr()
    assert (output.out.count("match:") == rules) is printed and "fp16 graph: a 0.5" in output.out
    advice = "if you replace quantization.overrides in the spec by:" if printed else "only with 25 nodes left in float;"
    assert output.err.replace(" the report has the rules", "").splitlines() == [
        *(
            "failed: cpu fp16 onnxruntime: drift",
            "  reproduce: enginesmith redo 12",
            *(f"  | {n}" for n in range(5, 20)),
        ),
        *("  which node (quantization): many", f"graph fp16 passes {advice}", *(f"note: {hint}" for hint in HINTS[1:])),
        *("tiny: nothing was published, because no engine passed", "report: p"),
    ]


def test_an_engine_for_a_single_runtime_names_it(capsys):
    entry = EngineEntry("sm_89", "fp16", "tensorrt-rtx", "unproven", "no GPU", compute_capability=(8, 9))
    for opened_by, output in (("tensorrt-rtx", "no GPU; opens in TensorRT for RTX only"), ("tensorrt", "no GPU\n")):
        show_outcome(Outcome("tiny", None, False, (UnitResult(replace(entry, backend=opened_by)),), {}, page="p"))
        assert output in capsys.readouterr().out


def test_a_plan_of_only_refusals_exits_with_1(project: Project) -> None:
    project.change_spec(targets=["sm_75"], precisions=["fp32"], calibration=None)
    result = project.run("plan", project.spec)
    assert result.code == 1 and "0 build, 0 cached, 1 refused" in result.out
    assert project.run("plan", "--all", project.spec.parent).code == 1
    project.change_spec(targets=["sm_90"], backends={"tensorrt-rtx": {}})
    output = project.run("plan", project.spec).out
    assert output.count("support matrix") == 1 and "here" not in output, "it is built nowhere"


def test_each_mistake_of_several_starts_with_error(project: Project) -> None:
    project.change_spec(modle="x", precisions=["fp31"])
    lines = project.run("plan", project.spec).err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"error: {project.spec}:") for line in lines)


def test_a_plan_builds_nothing(project: Project) -> None:
    result = project.run("plan", project.spec, "--json")
    assert result.code == 0 and {unit["action"] for unit in result.json["units"]} == {"build", "refused"}
    assert not (project.registry / "models").exists() and not (project.registry / "records" / "build").exists()
