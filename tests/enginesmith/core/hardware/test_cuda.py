"""The CUDA driver calls, over a libcuda that is compiled here and works on host memory."""

import ctypes

import numpy as np
import pytest

from builders.backends import discovery
from builders.backends.aotinductor import AotInductor
from enginesmith.core.errors import EnginesmithError, InputError, UnavailableError
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.cuda import Device, GpuDevice, gpus
from pipeline.canary.engines import check_shared_gpu
from tests.builders import graphs
from tests.builders.fake_cuda import compiled, counter


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def driver(library, monkeypatch):
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: library)
    yield library
    for name in ("init", "mode"):
        ctypes.c_int.in_dll(library, name).value = 0


def test_the_gpus_are_listed_with_name_and_capability(driver):
    assert gpus() == (GpuDevice(0, "NVIDIA L4", (8, 9), 24 << 30), GpuDevice(1, "Tesla T4", (7, 5), 16 << 30))
    assert cuda.cuda_version() == "13.2"


def test_an_exclusive_gpu_runs_no_canary(driver):
    check_shared_gpu(graphs.request("sm_89").target)
    ctypes.c_int.in_dll(driver, "mode").value = 3
    with pytest.raises(InputError, match=r"NVIDIA L4 is in exclusive-process mode.*nvidia-smi"):
        check_shared_gpu(graphs.request("sm_89").target)
    check_shared_gpu(graphs.request("cpu").target)
    check_shared_gpu(graphs.request("sm_90").target)


def test_a_target_runs_on_its_capability(driver):
    cpu, t4, a100 = (graphs.request(name).target for name in ("cpu", "sm_75", "sm_80"))
    assert cuda.explain_missing_gpu(cpu) is None and cuda.explain_missing_gpu(t4) is None
    assert (
        cuda.explain_missing_gpu(a100) == "no sm_80 GPU on this machine, which has NVIDIA L4 (sm_89), Tesla T4 (sm_75)"
    )


@pytest.mark.parametrize("name", discovery.names())
def test_every_backend_lists_the_present_gpus_in_the_same_words(driver, monkeypatch, name):
    monkeypatch.setattr(AotInductor, "versions", lambda self: {"torch": "2.13.0+cu130"})
    result, a100 = discovery.configure(name, {}), graphs.request("sm_80").target
    if result.serves(a100):
        assert result.runs(a100) == "no sm_80 GPU on this machine, which has NVIDIA L4 (sm_89), Tesla T4 (sm_75)"


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    assert gpus() == ()
    with pytest.raises(UnavailableError, match="no NVIDIA driver"):
        Device(0)


def test_a_silent_driver_gives_no_gpu(driver):
    ctypes.c_int.in_dll(driver, "init").value = 100
    assert gpus() == ()
    with pytest.raises(UnavailableError, match="CUDA_ERROR_NO_DEVICE to cuInit"):
        Device(0)


def test_arrays_are_copied_both_ways_without_leaks(driver):
    sent_array = np.arange(10, dtype="f")
    with Device(0) as device:
        device.put("x", sent_array)
        received_array = np.zeros_like(sent_array)
        assert device.seconds(lambda: device.get("x", received_array)) == 2.5e-3
        device.buffer("empty", 0)
        device.wait()
        assert device.used_bytes() == 1 << 20
    np.testing.assert_array_equal(received_array, sent_array)
    assert [counter(driver, name).value for name in ("live", "contexts", "streams")] == [0, 0, 0]


def test_a_buffer_is_reused_until_it_is_too_small(driver):
    with Device(0) as device:
        first_count = device.buffer("x", 100)
        assert device.buffer("x", 50) == first_count
        device.buffer("x", 1000)
        assert counter(driver, "live").value == 1


def test_an_allocation_that_fails_names_the_driver_error(driver):
    with Device(0) as device, pytest.raises(EnginesmithError, match="CUDA_ERROR_OUT_OF_MEMORY to cuMemAlloc_v2"):
        device.buffer("x", 2 << 30)
