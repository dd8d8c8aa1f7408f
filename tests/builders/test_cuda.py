"""The CUDA driver calls, over a libcuda that is compiled here and works on host memory."""

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from builders import cuda, tensorrt_session
from builders.cuda import Device, Gpu, gpus
from builders.errors import DataError, EngineryError, UnavailableError
from builders.tensorrt import TensorRTRTX
from builders.types import ShapeProfile, TensorSpec
from tests.builders import graphs

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int live = 0, contexts = 0, streams = 0, init = 0;
int cuInit(unsigned f) { return init; }
int cuGetErrorName(int e, const char **s) {
  *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_NO_DEVICE"; return 0;
}
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, d ? "Tesla T4" : "NVIDIA L4", n); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? (d ? 7 : 8) : (d ? 5 : 9); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = d ? 16ull << 30 : 24ull << 30; return 0; }
int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &contexts; contexts++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { contexts--; return 0; }
int cuCtxSetCurrent(void *c) { return c == &contexts ? 0 : 1; }
int cuStreamCreate(void **s, unsigned f) { *s = &streams; streams++; return 0; }
int cuStreamDestroy_v2(void *s) { streams--; return s == &streams ? 0 : 1; }
int cuStreamSynchronize(void *s) { return s == &streams ? 0 : 1; }
int cuMemAlloc_v2(uint64_t *p, size_t n) {
  if (n > 1u << 30) return 2;
  *p = (uint64_t)(uintptr_t)malloc(n); live++; return 0;
}
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 3 << 20; *t = 4 << 20; return 0; }
int cuMemFree_v2(uint64_t p) { free((void *)(uintptr_t)p); live--; return 0; }
int cuMemcpyHtoD_v2(uint64_t d, const void *s, size_t n) { memcpy((void *)(uintptr_t)d, s, n); return 0; }
int cuMemcpyDtoH_v2(void *d, uint64_t s, size_t n) { memcpy(d, (const void *)(uintptr_t)s, n); return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(SOURCE)
    path = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "cuda.c"], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def driver(library, monkeypatch):
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: library)
    yield library
    ctypes.c_int.in_dll(library, "init").value = 0


def counter(library, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def test_the_gpus_are_listed_with_name_and_capability(driver):
    assert gpus() == (Gpu(0, "NVIDIA L4", (8, 9), 24 << 30), Gpu(1, "Tesla T4", (7, 5), 16 << 30))
    assert cuda.cuda_version() == "13.2"


def test_a_target_runs_where_its_capability_is(driver):
    assert TensorRTRTX().runs(graphs.request("sm_75").target) is None
    assert "which has NVIDIA L4 (sm_89), Tesla T4 (sm_75)" in TensorRTRTX().runs(graphs.request("sm_80").target)


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    def missing(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    assert gpus() == ()
    with pytest.raises(UnavailableError, match="no NVIDIA driver"):
        Device(0)


def test_a_driver_that_does_not_answer_is_no_gpu(driver):
    ctypes.c_int.in_dll(driver, "init").value = 100
    assert gpus() == ()
    with pytest.raises(UnavailableError, match="CUDA_ERROR_NO_DEVICE to cuInit"):
        Device(0)


def test_arrays_go_there_and_back_and_nothing_leaks(driver):
    sent = np.arange(10, dtype="f")
    with Device(0) as device:
        device.put("x", sent)
        received = np.zeros_like(sent)
        device.get("x", received)
        device.buffer("empty", 0)
        device.wait()
        assert device.used_bytes() == 1 << 20
    np.testing.assert_array_equal(received, sent)
    assert [counter(driver, name) for name in ("live", "contexts", "streams")] == [0, 0, 0]


def test_a_buffer_is_reused_until_it_is_too_small(driver):
    with Device(0) as device:
        first = device.buffer("x", 100)
        assert device.buffer("x", 50) == first
        device.buffer("x", 1000)
        assert counter(driver, "live") == 1


def test_an_allocation_that_fails_names_the_driver_error(driver):
    with Device(0) as device, pytest.raises(EngineryError, match="CUDA_ERROR_OUT_OF_MEMORY to cuMemAlloc_v2"):
        device.buffer("x", 2 << 30)


class FakeContext:
    """Doubles `image` into `logits`, in the 'device' memory whose addresses it is given."""

    def __init__(self):
        self.addresses, self.shapes, self.profiles = {}, {}, []

    def set_optimization_profile_async(self, index, stream):
        self.profiles.append(index)
        return True

    def set_input_shape(self, name, shape):
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name):
        return self.shapes["image"]

    def execute_async_v3(self, stream):
        count = int(np.prod(self.shapes["image"]))
        source = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self.addresses["image"]))
        target = np.ctypeslib.as_array((ctypes.c_float * count).from_address(self.addresses["logits"]))
        target[:] = source * 2
        return True


BUCKETS = tuple(ShapeProfile((("image", (low, 8), (high, 8), (high, 8)),)) for low, high in ((1, 2), (3, 16)))


def session_over(device, context):
    outputs = (TensorSpec("logits", "float32", ("batch", 8)),)
    request = graphs.request("sm_89", profiles=BUCKETS, outputs=outputs)
    return tensorrt_session.EngineSession(request, context, device, SimpleNamespace(messages=[]))


def test_a_session_moves_arrays_and_picks_the_profile(driver):
    context = FakeContext()
    with Device(0) as device:
        session = session_over(device, context)
        for batch in (2, 16, 3):
            image = np.random.default_rng(0).standard_normal((batch, 8)).astype("f")
            np.testing.assert_array_equal(session.run({"image": image})["logits"], image * 2)
    assert context.profiles == [0, 1, 1]


def test_a_strided_input_is_made_contiguous(driver):
    image = np.arange(64, dtype="f").reshape(8, 8).T[:4]
    with Device(0) as device:
        np.testing.assert_array_equal(session_over(device, FakeContext()).run({"image": image})["logits"], image * 2)


def test_a_shape_outside_every_profile_is_a_data_error(driver):
    with Device(0) as device, pytest.raises(DataError, match="no optimization profile holds image"):
        session_over(device, FakeContext()).run({"image": np.zeros((17, 8), "f")})


def test_what_tensorrt_refuses_at_run_time_is_an_error_with_its_words(driver):
    context = FakeContext()
    with Device(0) as device:
        session = session_over(device, context)

        def refuse(stream):
            session._said.messages.append(("ERROR", "Cuda failure: out of memory"))
            return False

        context.execute_async_v3 = refuse
        with pytest.raises(EngineryError, match="out of memory; remedy: free GPU memory"):
            session.run({"image": np.zeros((1, 8), "f")})


def test_a_shape_that_depends_on_data_is_refused(driver):
    context = FakeContext()
    context.get_tensor_shape = lambda name: (-1, 8)
    with Device(0) as device, pytest.raises(EngineryError, match="depends on data"):
        session_over(device, context).run({"image": np.zeros((1, 8), "f")})
