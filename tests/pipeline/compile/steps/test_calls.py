from typing import Any

import onnx
import pytest

from builders.backends import discovery
from enginesmith.core.codec import decode, encode_document
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.proof import Check, judge
from enginesmith.core.types import BuildRequest
from pipeline.compile.steps.proofs import CheckEngine, calls_of, repeats_bits
from pipeline.spec.model import ModelSpec, load_spec
from tests.faults.bench import Bench
from tests.faults.nets import after, mlp, rows, with_swapped
from tests.faults.sessions import SESSIONS, faulty_sessions, use_steady_clock
from tests.pipeline.projects import Project


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("calls") / "bench", mlp(), rows())


def test_errors_between_calls_fail_the_intended_check(bench, monkeypatch):
    use_steady_clock(monkeypatch)
    with faulty_sessions(SESSIONS["wrong from call 101 on"]):
        checks = bench.engine().checks(seconds=0.5)
    (failed,) = (check for check in checks if not check.passed)
    assert failed.name == "calls repeated" and "differ in their bits" in failed.note and failed.case.startswith("call ")
    verdict, reason = judge(checks)
    assert verdict == "failed" and reason.startswith("engine calls repeated at call ")
    assert decode(encode_document(failed), Check) == failed


def test_a_failing_golden_set_skips_sizes_and_calls_follow_the_spec(bench):
    checks = bench.engine(with_swapped(bench.canonical(), "w1", 1, 3)).checks()
    assert {check.name for check in checks if not check.passed} & {"sqnr_db"}
    assert not [check for check in checks if check.name == "sizes"]
    assert [check.passed for check in checks if check.name == "calls repeated"] == [True]
    reduced_engine = CheckEngine(bench.engine().blob, bench.golden, {}, calls=None)
    assert not [check for check in bench.run(reduced_engine).checks if check.name.startswith(("calls", "sizes"))]


def test_equal_bits_are_required_only_of_deterministic_cpu_backends_and_models(bench, tmp_path):
    request = bench.engine().blob.request
    onnx.save(bench.canonical(), tmp_path / "graph.onnx")
    changed_text = after(bench.canonical(), "logits", "noise = RandomNormalLike(was) logits = Add(was, noise)")
    onnx.save(changed_text, tmp_path / "drawn.onnx")
    assert repeats_bits(request, tmp_path / "graph.onnx") and not repeats_bits(request, tmp_path / "drawn.onnx")
    (gpu,) = parse_targets("sm_89")
    for backend, target, bits in (("xla", CPU, True), ("xla", gpu, False), ("tensorrt", gpu, False)):
        names = discovery.options_of(discovery.configure(backend, {})), ()
        other_request = BuildRequest("0" * 64, "fp32", target, backend, (), (), (), *names)
        assert repeats_bits(other_request, tmp_path / "graph.onnx") == bits
    assert request.seed == bench.engine().blob.request.seed


@pytest.mark.parametrize(
    ("asked", "seconds"), [({}, None), ({"calls": {"seconds": 30}}, 30.0), ({"calls": {"seconds": None}}, None)]
)
def test_a_spec_sets_the_duration(project: Project, asked: dict[str, Any], seconds: float | None) -> None:
    project.change_spec(validation={**asked, "contract": {"bitwise": {}}})
    spec = load_spec(project.spec)
    message = calls_of(ModelSpec.model_validate(spec.model_dump(mode="json", exclude_unset=True)))
    assert message is not None and (message.seconds, message.bitwise) == (seconds, True)
    assert [dim.name for dim in message.shapes.dims] == ["batch"]


@pytest.mark.parametrize("off", ["off", None, False])
def test_calls_times_and_attribution_can_be_turned_off(project: Project, off: object) -> None:
    project.change_spec(validation={"calls": off, "latency": off, "attribution": False})
    spec = load_spec(project.spec)
    assert calls_of(spec) is None and spec.validation.latency is None and spec.validation.attribution == "off"
