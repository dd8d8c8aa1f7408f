"""A libcuda that is compiled here and works on host memory, and stand-ins for what TensorRT makes of an engine."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int live = 0, contexts = 0, streams = 0, init = 0, capturing = 0, graphs = 0, events = 0, uncapturable = 0;
intptr_t made = 0;
void (*replay)(int) = 0;
int cuInit(unsigned f) { return init; }
int cuGetErrorName(int e, const char **s) {
  *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_NO_DEVICE";
  if (e == 900) *s = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
  return 0;
}
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, d ? "Tesla T4" : "NVIDIA L4", n); return 0; }
int mode = 0;
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 20 ? mode : a == 75 ? (d ? 7 : 8) : (d ? 5 : 9);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = d ? 16ull << 30 : 24ull << 30; return 0; }
int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &contexts; contexts++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { contexts--; return 0; }
int cuCtxSetCurrent(void *c) { return c == &contexts ? 0 : 1; }
int cuStreamCreate(void **s, unsigned f) { *s = &streams; streams++; return 0; }
int cuStreamDestroy_v2(void *s) { streams--; return s == &streams ? 0 : 1; }
int cuStreamSynchronize(void *s) { return s == &streams && !capturing ? 0 : 1; }
int cuMemAlloc_v2(uint64_t *p, size_t n) {
  if (n > 1u << 30) return 2;
  *p = (uint64_t)(uintptr_t)malloc(n); live++; return 0;
}
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 3 << 20; *t = 4 << 20; return 0; }
int cuMemFree_v2(uint64_t p) { free((void *)(uintptr_t)p); live--; return 0; }
int cuMemcpyHtoD_v2(uint64_t d, const void *s, size_t n) { memcpy((void *)(uintptr_t)d, s, n); return 0; }
int cuMemcpyDtoH_v2(void *d, uint64_t s, size_t n) { memcpy(d, (const void *)(uintptr_t)s, n); return 0; }
int cuEventCreate(void **e, unsigned f) { *e = &events; events++; return 0; }
int cuEventRecord(void *e, void *s) { return e == &events && s == &streams ? 0 : 1; }
int cuEventSynchronize(void *e) { return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) { *ms = 2.5f; return 0; }
int cuEventDestroy_v2(void *e) { events--; return 0; }
int cuStreamBeginCapture_v2(void *s, int mode) { if (capturing) return 1; capturing = 1; return 0; }
int cuStreamEndCapture(void *s, void **g) {
  if (!capturing) return 1;
  capturing = 0; *g = &graphs; return uncapturable;
}
int cuGraphInstantiateWithFlags(void **e, void *g, uint64_t f) { *e = (void *)++made; graphs++; return 0; }
int cuGraphDestroy(void *g) { return 0; }
int cuGraphLaunch(void *e, void *s) { if (replay) replay((int)(intptr_t)e); return 0; }
int cuGraphExecDestroy(void *e) { graphs--; return 0; }
"""


def compiled(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "cuda.c").write_text(SOURCE)
    path = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "cuda.c"], check=True)
    return ctypes.CDLL(str(path))


def counter(library, name: str):
    return ctypes.c_int.in_dll(library, name)


class FakeContext:
    """Doubles `image` into `logits`, in the 'device' memory whose addresses it is given; captured, it does so later."""

    def __init__(self, engine: "FakeEngine", strategy: object = None):
        self.engine, self.strategy = engine, strategy
        self.addresses, self.shapes, self.profiles, self.calls = {}, {}, [], []
        self.profiler = None

    def set_optimization_profile_async(self, index, stream):
        self.profiles.append(index)
        return True

    def set_input_shape(self, name, shape):
        self.calls.append("shape")
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        self.calls.append("address")
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name):
        return self.shapes["image"]

    def execute_async_v3(self, stream):
        self.calls.append("execute")
        self.engine.do(lambda: self._double(dict(self.addresses), self.shapes["image"]))
        return True

    def _double(self, addresses, shape):
        count = int(np.prod(shape))
        source = np.ctypeslib.as_array((ctypes.c_float * count).from_address(addresses["image"]))
        target = np.ctypeslib.as_array((ctypes.c_float * count).from_address(addresses["logits"]))
        target[:] = source * 2


class FakeEngine:
    """A loaded engine over the fake driver: what is captured is kept, and done again when its graph is launched."""

    streamable_weights_size = 1000
    weight_streaming_budget_v2 = None

    def __init__(self, library, make=FakeContext, on_host=(), shaping=()):
        self.library, self.make, self.on_host, self.shaping = library, make, on_host, shaping
        self.contexts, self.captured, self.launched = [], [], []
        self._replay = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._again)
        ctypes.c_void_p.in_dll(library, "replay").value = ctypes.cast(self._replay, ctypes.c_void_p).value
        self._first = ctypes.c_ssize_t.in_dll(library, "made").value

    def create_execution_context(self, strategy):
        self.contexts.append(self.make(self, strategy))
        return self.contexts[-1]

    def create_runtime_config(self):
        return SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)

    def get_tensor_location(self, name):
        return "HOST" if name in self.on_host else "DEVICE"

    def is_shape_inference_io(self, name):
        return name in self.shaping

    def get_weight_streaming_automatic_budget(self):
        return 600

    def do(self, work):
        if counter(self.library, "capturing").value:
            self.captured.append(work)
        else:
            work()

    def _again(self, number):
        self.launched.append(number)
        self.captured[number - self._first - 1]()


class Said:
    def __init__(self):
        self.messages = []


TRT = SimpleNamespace(
    ExecutionContextAllocationStrategy=SimpleNamespace(STATIC="static", ON_PROFILE_CHANGE="on profile change"),
    TensorLocation=SimpleNamespace(HOST="HOST"),
    CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole graph"),
)
