import dataclasses

import pytest

from builders.backends import discovery
from builders.backends.discovery import find_compatible_gpu, find_incompatibility
from builders.backends.tensorrt import TensorRT, TensorRTRTX
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.cuda import GpuDevice
from enginesmith.core.hardware.evaluation import judge
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.requirements import Requirement, Runtime, Weights, hardware_of
from enginesmith.core.types import BuildRequest
from tests.builders import graphs

COMPATIBLE = {"version_compatible": True}


def required(request: BuildRequest) -> tuple[Requirement, ...]:
    return discovery.configure(request.backend, dict(request.options)).requires(request)


def request_of(backend="tensorrt", options=None, precision="fp16", target="sm_80", built="10.16.1.11"):
    request = graphs.request(target, precision, backend, options=tuple((options or {}).items()))
    return dataclasses.replace(request, toolchain=((backend, built),))


@pytest.mark.parametrize(
    ("backend", "options", "built", "here", "serves"),
    [
        ("tensorrt", {}, "10.16.1.11", "10.16.1.11", True),
        ("tensorrt", {}, "10.16.1.11", "10.16", True),
        ("tensorrt", {}, "10.16.1.11", "10.16.0.72", False),
        ("tensorrt", COMPATIBLE, "10.16.1.11", "10.16.0.72", False),
        ("tensorrt", COMPATIBLE, "10.13.0.35", "10.16.1.11", True),
        ("tensorrt", COMPATIBLE, "10.16.1.11", "11.4.0.106", True),
        ("tensorrt", COMPATIBLE, "10.16.1.11", "12.0", False),
        ("tensorrt", COMPATIBLE, "11.0.0.114", "11.4.0.106", True),
        ("tensorrt", COMPATIBLE, "11.4.0.106", "10.16.1.11", False),
        ("tensorrt", COMPATIBLE, "8.6.1", "10.16.1.11", True),
        ("tensorrt", COMPATIBLE, "8.6.1", "9.3", False),
        ("tensorrt", COMPATIBLE, "8.6.1", "11.4.0.106", False),
        ("tensorrt", COMPATIBLE, "of our own", "11.4.0.106", False),
        ("tensorrt-rtx", {}, "1.7.1.116", "1.8.0.1", False),
    ],
)
def test_a_release_loads_only_its_engines(backend, options, built, here, serves):
    (runtime,) = (item for item in required(request_of(backend, options, built=built)) if isinstance(item, Runtime))
    verdicts = judge(runtime, Machine(runtimes={backend: here}))
    assert verdicts.state == ("met" if serves else "unmet") and verdicts.rules_out is not serves


AMPERE_PLUS = {"hardware_compatibility": "ampere_plus"}


@pytest.mark.parametrize(
    ("options", "precision", "built", "here", "serves"),
    [
        ({}, "fp16", "sm_80", "sm_80", True),
        ({}, "fp16", "sm_80", "sm_90", False),
        ({"hardware_compatibility": "same_compute_capability"}, "fp16", "sm_80", "sm_86", False),
        (AMPERE_PLUS, "fp16", "sm_80", "sm_90", True),
        (AMPERE_PLUS, "fp16", "sm_90", "sm_86", True),
        (AMPERE_PLUS, "fp16", "sm_80", "sm_75", False),
        (AMPERE_PLUS, "bf16", "sm_80", "sm_86", True),
        (AMPERE_PLUS, "fp8", "sm_90", "sm_86", False),
        (AMPERE_PLUS, "fp16", "sm_80", "cpu", False),
    ],
)
def test_a_gpu_runs_only_its_engines(options, precision, built, here, serves):
    processor = hardware_of(required(request_of(options=options, precision=precision, target=built)))
    assert (judge(processor, Machine.of(parse_targets(here)[0])).state == "met") is serves


def gpu(index, major, minor):
    return GpuDevice(index, f"GPU {index}", (major, minor))


def test_the_gpu_that_an_engine_was_built_for_ranks_first():
    wide_request, strict_request = (request_of(options=options) for options in (AMPERE_PLUS, {}))

    def chosen(request, *gpus):
        return find_compatible_gpu(required(request), request.target, gpus)

    assert chosen(wide_request, gpu(0, 9, 0), gpu(1, 8, 0)).index == 1
    assert chosen(wide_request, gpu(0, 7, 5), gpu(1, 9, 0)).index == 1
    assert chosen(wide_request, gpu(0, 7, 5)) is None
    assert chosen(strict_request, gpu(0, 9, 0)) is None


def test_a_weightless_engine_names_its_model():
    request = request_of(options={"strip_weights": True})
    assert Weights(request.model) in required(request) and Weights(request.model) not in required(request_of())


@pytest.mark.parametrize("backend", [TensorRT(), TensorRTRTX()])
def test_incompatible_engines_cause_no_import(tmp_path, monkeypatch, backend):
    monkeypatch.setattr("enginesmith.core.hardware.cuda.gpus", lambda: (gpu(0, 8, 9),))
    monkeypatch.setattr("builders.backends.tensorrt.build.load_runtime", lambda _: pytest.fail("imported"))
    monkeypatch.setattr(type(backend), "versions", lambda self: {self.name: "99.1"})
    engine = graphs.an_engine(tmp_path, b"plan", backend.name)
    old_request = dataclasses.replace(engine.request, toolchain=((backend.name, "1.2.3"),))
    with pytest.raises(EnginesmithError, match=r"needs TensorRT(-RTX)? 1\.2\.3, found 99\.1; install that version"):
        backend.open(dataclasses.replace(engine, request=old_request))
    remote_engine = graphs.an_engine(tmp_path, b"plan", backend.name, "sm_90")
    with pytest.raises(EnginesmithError, match=r"no sm_90 GPU on this machine, which has GPU 0 \(sm_89\)"):
        backend.open(remote_engine)


def test_each_of_its_wheels_shows_the_release(monkeypatch):
    monkeypatch.setattr("enginesmith.core.hardware.cuda.gpus", lambda: (gpu(0, 8, 0),))
    monkeypatch.setattr(TensorRTRTX, "versions", lambda self: {"tensorrt-rtx-cu12-libs": "1.7.1"})
    assert find_incompatibility(TensorRTRTX(), request_of("tensorrt-rtx", built="1.7.1.116")) is None
    assert "needs TensorRT-RTX 1.8.0, found 1.7.1" in str(
        find_incompatibility(TensorRTRTX(), request_of("tensorrt-rtx", built="1.8.0"))
    )
