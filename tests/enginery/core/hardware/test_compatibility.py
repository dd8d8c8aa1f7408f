"""Which engine runs with which runtime and on which GPU: the rules, asked before anything is loaded."""

import dataclasses
import re

import pytest

from builders.backends.tensorrt import TensorRT, TensorRTRTX
from builders.backends.tensorrt.runtime.fitting import fitting_gpu, version_misfit
from enginery.core.errors import EngineryError
from enginery.core.hardware.compatibility import hardware_serves, version_serves
from enginery.core.hardware.cuda import Gpu
from tests.builders import graphs

COMPATIBLE = {"version_compatible": True}


@pytest.mark.parametrize(
    ("backend", "options", "built", "here", "serves"),
    [
        ("tensorrt", {}, "10.16.1.11", "10.16.1.11", True),
        ("tensorrt", {}, "10.16.1.11", "10.16", True),
        ("tensorrt", {}, "10.16.1.11", "10.16.0.72", False),
        ("tensorrt", COMPATIBLE, "10.16.1.11", "10.16.0.72", False),
        ("tensorrt", COMPATIBLE, "10.13.0.35", "10.16.1.11", True),
        ("tensorrt", COMPATIBLE, "10.16.1.11", "11.4.0.106", True),
        ("tensorrt", COMPATIBLE, "11.0.0.114", "11.4.0.106", True),
        ("tensorrt", COMPATIBLE, "11.4.0.106", "10.16.1.11", False),
        ("tensorrt", COMPATIBLE, "8.6.1", "10.16.1.11", True),
        ("tensorrt", COMPATIBLE, "8.6.1", "11.4.0.106", False),
        ("tensorrt-rtx", COMPATIBLE, "1.7.1.116", "1.8.0.1", False),
    ],
)
def test_which_release_loads_an_engine(backend, options, built, here, serves):
    assert version_serves(backend, options, built, here) is serves


AMPERE_PLUS = {"hardware_compatibility": "ampere_plus"}


@pytest.mark.parametrize(
    ("backend", "options", "precision", "built", "here", "serves"),
    [
        ("tensorrt", {}, "fp16", (8, 0), (8, 0), True),
        ("tensorrt", {}, "fp16", (8, 0), (9, 0), False),
        ("tensorrt", {"hardware_compatibility": "same_compute_capability"}, "fp16", (8, 0), (8, 6), False),
        ("tensorrt", AMPERE_PLUS, "fp16", (8, 0), (9, 0), True),
        ("tensorrt", AMPERE_PLUS, "fp16", (9, 0), (8, 6), True),
        ("tensorrt", AMPERE_PLUS, "fp16", (8, 0), (7, 5), False),
        ("tensorrt", AMPERE_PLUS, "fp8", (9, 0), (8, 6), False),
        ("tensorrt", AMPERE_PLUS, "fp16", (8, 0), None, False),
        ("tensorrt", AMPERE_PLUS, "fp16", None, None, True),
        ("tensorrt-rtx", AMPERE_PLUS, "fp16", (8, 0), (9, 0), False),
    ],
)
def test_which_gpu_runs_an_engine(backend, options, precision, built, here, serves):
    assert hardware_serves(backend, options, precision, built, here) is serves


def gpu(index, major, minor):
    return Gpu(index, f"GPU {index}", (major, minor))


def test_the_gpu_that_an_engine_was_built_for_comes_first():
    request = graphs.request("sm_80", "fp16", "tensorrt", options=tuple(AMPERE_PLUS.items()))
    assert fitting_gpu(request, (gpu(0, 9, 0), gpu(1, 8, 0))).index == 1
    assert fitting_gpu(request, (gpu(0, 7, 5), gpu(1, 9, 0))).index == 1
    assert fitting_gpu(request, (gpu(0, 7, 5),)) is None
    assert fitting_gpu(dataclasses.replace(request, options=()), (gpu(0, 9, 0),)) is None


BUILT = (("plugin /opt/a.so", "a" * 64), ("tensorrt", "10.16.1.11"), ("tensorrt-cu12-libs", "10.16.1.11"))


@pytest.mark.parametrize(
    ("options", "here", "words"),
    [
        ({}, {}, None),
        (
            {},
            {"tensorrt": "11.4.0.106", "plugin /opt/a.so": "a" * 64},
            "built with tensorrt 10.16.1.11, and 11.4.0.106",
        ),
        (COMPATIBLE, {"tensorrt": "11.4.0.106", "plugin /opt/a.so": "a" * 64}, None),
        ({}, {"tensorrt": "10.16.1.11", "plugin /opt/a.so": "absent"}, "/opt/a.so, .* is not on this machine"),
        ({}, {"tensorrt": "10.16.1.11", "plugin /opt/a.so": "b" * 64}, "/opt/a.so, .* is another library here"),
    ],
)
def test_an_engine_of_another_release_or_plugin_is_told_before_it_is_loaded(options, here, words):
    found = version_misfit("tensorrt", options, dict(BUILT), here or dict(BUILT))
    if words is None:
        assert found is None
    else:
        assert re.search(words, str(found))


@pytest.mark.parametrize("backend", [TensorRT(), TensorRTRTX()])
def test_nothing_is_imported_for_an_engine_that_does_not_fit(tmp_path, monkeypatch, backend):
    monkeypatch.setattr("enginery.core.hardware.cuda.gpus", lambda: (gpu(0, 8, 9),))
    monkeypatch.setattr(type(backend), "_import", lambda self: pytest.fail("imported"))
    monkeypatch.setattr(type(backend), "versions", lambda self: {self.name: "99.1"})
    engine = graphs.an_engine(tmp_path, b"plan", backend.name)
    old = dataclasses.replace(engine.request, toolchain=((backend.name, "1.2.3"),))
    with pytest.raises(EngineryError, match=r"built with .* 1\.2\.3, and 99\.1 is installed"):
        backend.open(dataclasses.replace(engine, request=old))
    elsewhere = graphs.an_engine(tmp_path, b"plan", backend.name, "sm_90")
    with pytest.raises(EngineryError, match=r"no sm_90 GPU on this machine, which has GPU 0 \(sm_89\)"):
        backend.open(elsewhere)
