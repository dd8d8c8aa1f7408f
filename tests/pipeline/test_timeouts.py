from pathlib import Path
from typing import Any, NoReturn

import onnx
import pytest

from builders.execution.jobs import Job
from enginesmith.core.errors import EnginesmithError, StepError
from pipeline.compile.run_context import Work
from pipeline.compile.steps import attributions, calibration, engines, exports, graphs, keys, proofs, search
from pipeline.compile.steps.attributions import Suspect
from pipeline.outcome import judge_built
from pipeline.spec.model import load_spec
from pipeline.values import GraphVariant, Observed, Searched
from tests.pipeline.compile.test_steps import EXPORTED, an_engine, answering
from tests.pipeline.projects import Project

LIMITS = {
    "export_s": 11, "calibration_s": 12, "quantization_s": 13, "proof_s": 14, "latency_s": 15, "attribution_s": 16,
}  # fmt: skip
RANGES = Observed("d" * 64, "f" * 64, "e" * 64, 3)
LATENCY: dict[str, Any] = {"latency": {"seconds": 0.1}}
INT8 = GraphVariant("int8")
JUDGED = judge_built(an_engine(), "b" * 64, cannot_run="another machine's")

ENDLESS = """
<ir_version: 10, opset_import: ["" : 20]>
tiny (float[batch, 8] x) => (float[batch, 8] logits)
<bool go = {1}, float[1] zero = {0.0}> {
    logits = Loop("", go, x) <body = body (int64 i, bool before, float[batch, 8] a) => (bool again, float[batch, 8] b) {
        again = Identity(before)
        b = Add(a, zero)
    }>
}
"""


STEPS = {
    "export": lambda spec, context: exports.export(Work(spec, context)),
    "calibration": lambda spec, context: calibration.observe((0, 1), EXPORTED, Work(spec, context)),
    "merge": lambda spec, context: calibration.merge([RANGES, RANGES], Work(spec, context)),
    "choose": lambda spec, context: search.choose([Searched("int8")], EXPORTED, RANGES, Work(spec, context)),
    "quantization": lambda spec, context: graphs.quantize(INT8, EXPORTED, RANGES, {}, Work(spec, context)),
    "build": lambda spec, context: engines.build(an_engine().unit, Work(spec, context)),
    "proof": lambda spec, context: proofs.validate(an_engine(), EXPORTED, Work(spec, context)),
    "latency": lambda spec, context: keys.measure(JUDGED, EXPORTED, Work(spec, context)),
    "attribution": lambda spec, context: attributions.attribute(
        Suspect("engine", an_engine(), ("cpu fp32",)), "a" * 64, "b" * 64, Work(spec, context)
    ),
}
KEYS = {"merge": "timeouts.calibration_s", "choose": "timeouts.quantization_s", "build": "build.timeout_s"}


@pytest.mark.parametrize("step", STEPS)
def test_each_steps_time_limit_comes_from_the_spec(project: Project, tmp_path: Path, step: str) -> None:
    project.change_spec(timeouts=LIMITS, build={"timeout_s": 17}, validation=LATENCY)
    jobs: list[Job] = []

    def note(job: Job) -> NoReturn:
        jobs.append(job)
        raise StepError("noted", "cancelled")

    context = answering(tmp_path, note)
    with pytest.raises(EnginesmithError, match="noted"):
        STEPS[step](load_spec(project.spec), context)
    key = KEYS.get(step, f"timeouts.{step}_s")
    assert jobs[0].limits.timeout_s == {**LIMITS, "timeout_s": 17}[key.partition(".")[2]]
    assert jobs[0].limits.raise_timeout == f"raise {key} in the spec"


@pytest.mark.slow
def test_an_endless_loop_ends_at_the_limit_of_the_export(project: Project) -> None:
    onnx.save(onnx.parser.parse_model(ENDLESS), project.folder / "tiny.onnx")
    project.change_spec(timeouts={"export_s": 3}, precisions=["fp32"], targets=["cpu"], calibration=None, golden=None)
    result = project.build()
    assert result.code == 1
    assert "export: still running after its limit of 3 s; raise timeouts.export_s in the spec" in result.err
