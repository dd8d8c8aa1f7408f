"""The calls of the CUDA driver API that running an engine takes, through ctypes: without torch and cuda-python.

libcuda.so.1 comes with the driver, so where it is missing there is no GPU to run on. Device memory and streams are made
in each device's primary context, which the CUDA runtime (hence TensorRT) uses too.
Function names and attribute numbers: NVIDIA CUDA Driver API reference, `cuda.h`. Nothing here was ever run on a GPU:
tests exercise it over a stand-in for libcuda that works on host memory.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.core.types import Target, Untyped

if TYPE_CHECKING:
    import numpy as np

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
DEFAULT_MODE = 0  # CU_COMPUTEMODE_DEFAULT: several processes may have a context
_NAME_BYTES = 100
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@dataclass(frozen=True)
class GpuDevice:
    """A GPU that this process may use (CUDA_VISIBLE_DEVICES counts), by its index in that set.

    memory_bytes: 0 is unknown.  compute_mode: CUcomputemode; any but DEFAULT_MODE keeps a second process out.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int = 0
    compute_mode: int = DEFAULT_MODE


def gpus() -> tuple[GpuDevice, ...]:
    """The GPUs that this process may use; empty without a driver, or where the driver fails."""
    try:
        driver = _driver()
        count = c_int()
        _check(driver, driver.cuDeviceGetCount(byref(count)), "cuDeviceGetCount")
        return tuple(_gpu(driver, index) for index in range(count.value))
    except UnavailableError:
        return ()


def index_of(compute_capability: tuple[int, int] | None) -> int:
    """The index of the first GPU of a compute capability. Raises EnginesmithError when this machine has none."""
    gpu_indices = [gpu.index for gpu in gpus() if gpu.compute_capability == compute_capability]
    if not gpu_indices:
        raise EnginesmithError(
            f"this machine has no GPU of capability {compute_capability}; run this on a node with one"
        )
    return gpu_indices[0]


def explain_missing_gpu(target: Target) -> str | None:
    """The reason why no GPU of this machine runs engines for `target`; None if one does, and for CPU targets."""
    devices = gpus()
    if target.is_cpu or any(gpu.compute_capability == target.compute_capability for gpu in devices):
        return None
    gpu_names = ", ".join(f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})" for gpu in devices)
    return f"no {target.sm} GPU on this machine" + (f", which has {gpu_names}" if gpu_names else "")


def cuda_version() -> str | None:
    """The newest CUDA version that the driver supports, such as '13.0'; None without a driver."""
    try:
        driver = _driver()
        version_code = c_int()
        _check(driver, driver.cuDriverGetVersion(byref(version_code)), "cuDriverGetVersion")
    except UnavailableError:
        return None
    return f"{version_code.value // 1000}.{version_code.value % 1000 // 10}"


def _gpu(driver: Untyped, index: int) -> GpuDevice:
    name, size = ctypes.create_string_buffer(_NAME_BYTES), c_size_t()
    _check(driver, driver.cuDeviceGetName(name, _NAME_BYTES, c_int(index)), "cuDeviceGetName")
    major, minor, compute_mode = (_attribute(driver, attribute, index) for attribute in (_MAJOR, _MINOR, _MODE))
    _check(driver, driver.cuDeviceTotalMem_v2(byref(size), c_int(index)), "cuDeviceTotalMem")
    return GpuDevice(index, name.value.decode(), (major, minor), size.value, compute_mode)


def _attribute(driver: Untyped, attribute: int, index: int) -> int:
    value = c_int()
    _check(driver, driver.cuDeviceGetAttribute(byref(value), attribute, c_int(index)), "cuDeviceGetAttribute")
    return value.value


def _driver() -> Untyped:
    """libcuda, initialised. Raises UnavailableError when there is none, or it finds no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(f"no NVIDIA driver on this machine ({error}); run this on a node with a GPU") from error
    _check(driver, driver.cuInit(c_uint(0)), "cuInit")
    return driver


def _check(driver: Untyped, status: int, call: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorName(status, byref(text))
    error_name = text.value.decode() if text.value else f"error {status}"
    error_class = UnavailableError if call.startswith(("cuInit", "cuDevice", "cuDriver")) else EnginesmithError
    raise error_class(f"the NVIDIA driver answers {error_name} to {call}; check the driver with nvidia-smi")


class Device:
    """One GPU's primary context with a stream and named buffers, which are freed on exit. Never run on a GPU.

    A context is current in one thread: use a Device in the thread that created it.
    Raises UnavailableError when the driver is missing, EnginesmithError when it refuses a call.
    """

    def __init__(self, index: int) -> None:
        self._driver = _driver()
        self._index = c_int(index)
        self._buffers: dict[str, tuple[c_uint64, int]] = {}
        context, stream = c_void_p(), c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._index)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", byref(stream), c_uint(0))
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for name in list(self._buffers):
            self._free(name)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._index)

    @property
    def stream(self) -> int:
        """The stream's handle, as TensorRT takes it."""
        return self._stream.value or 0

    def buffer(self, name: str, size_bytes: int) -> int:
        """The device address of a named buffer of at least `size_bytes`; one that is too small loses its content."""
        if name in self._buffers and self._buffers[name][1] >= size_bytes:
            return self._buffers[name][0].value
        self._free(name)
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(max(1, size_bytes)))
        self._buffers[name] = (address, size_bytes)
        return address.value

    def put(self, name: str, array: "np.ndarray") -> int:
        """Copy a C-contiguous array of any shape and dtype into the named buffer, and return its device address."""
        address = self.buffer(name, array.nbytes)
        self._call("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes))
        return address

    def get(self, name: str, array: "np.ndarray") -> None:
        """Fill a C-contiguous array of any shape and dtype from the named buffer."""
        address, _ = self._buffers[name]
        self._call("cuMemcpyDtoH_v2", c_void_p(array.ctypes.data), address, c_size_t(array.nbytes))

    def used_bytes(self) -> int:
        """GPU memory in use by all processes, in bytes."""
        free_size, total_size = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free_size), byref(total_size))
        return total_size.value - free_size.value

    def wait(self) -> None:
        """Wait until all work on the stream is done."""
        self._call("cuStreamSynchronize", self._stream)

    def forget(self, prefix: str) -> None:
        """Free the buffers whose names start with `prefix`."""
        for name in [name for name in self._buffers if name.startswith(prefix)]:
            self._free(name)

    def seconds(self, work: Callable[[], None]) -> float:
        """Seconds that the GPU takes for what `work` enqueues on the stream, measured between two events."""
        start_event, end_event = c_void_p(), c_void_p()
        self._call("cuEventCreate", byref(start_event), c_uint(0))
        self._call("cuEventCreate", byref(end_event), c_uint(0))
        try:
            self._call("cuEventRecord", start_event, self._stream)
            work()
            self._call("cuEventRecord", end_event, self._stream)
            self._call("cuEventSynchronize", end_event)
            milliseconds = c_float()
            self._call("cuEventElapsedTime", byref(milliseconds), start_event, end_event)
            return milliseconds.value * 1e-3
        finally:
            self._call("cuEventDestroy_v2", start_event)
            self._call("cuEventDestroy_v2", end_event)

    def capture(self, work: Callable[[], None]) -> "CudaGraph":
        """Capture what `work` enqueues on the stream as a CUDA graph, without running it. Raises EnginesmithError."""
        self._call("cuStreamBeginCapture_v2", self._stream, c_int(_CAPTURE_THREAD_LOCAL))
        graph = c_void_p()
        try:
            work()
        finally:  # a stream left in this state would take nothing else
            status = self._driver.cuStreamEndCapture(self._stream, byref(graph))
        _check(self._driver, status, "cuStreamEndCapture")
        try:
            executable = c_void_p()
            self._call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return CudaGraph(
            lambda: self._call("cuGraphLaunch", executable, self._stream),
            lambda: self._call("cuGraphExecDestroy", executable),
        )

    def _free(self, name: str) -> None:
        if name in self._buffers:
            self._call("cuMemFree_v2", self._buffers.pop(name)[0])

    def _call(self, function: str, *arguments: Untyped) -> None:
        _check(self._driver, getattr(self._driver, function)(*arguments), function)


@dataclass(frozen=True)
class CudaGraph:
    """A captured CUDA graph: `launch` enqueues it on the stream, `close` destroys it."""

    launch: Callable[[], None]
    close: Callable[[], None]
