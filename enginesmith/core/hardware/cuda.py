"""The CUDA driver API calls for running an engine, through ctypes, without torch and cuda-python.

libcuda.so.1 comes with the driver, so a machine without it has no usable GPU. Device memory and streams are created in
each device's primary context, which the CUDA runtime (hence TensorRT) uses too. Function names and attribute numbers:
NVIDIA CUDA Driver API reference, `cuda.h`. This module never ran on a GPU: tests use a replacement of libcuda that
works on host memory.
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
    """A GPU that this process may use, by its index among those in CUDA_VISIBLE_DEVICES.

    memory_bytes: 0 if unknown.  compute_mode: CUcomputemode; every value except DEFAULT_MODE excludes a second process.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int = 0
    compute_mode: int = DEFAULT_MODE


def gpus() -> tuple[GpuDevice, ...]:
    """The GPUs that this process may use; empty if the driver is missing or fails."""
    try:
        driver = _driver()
        count = c_int()
        _check(driver, driver.cuDeviceGetCount(byref(count)), "cuDeviceGetCount")
        return tuple(_gpu(driver, index) for index in range(count.value))
    except UnavailableError:
        return ()


def index_of(compute_capability: tuple[int, int] | None) -> int:
    """The index of the first GPU with a compute capability. Raises EnginesmithError if this machine has none."""
    gpu_indices = [gpu.index for gpu in gpus() if gpu.compute_capability == compute_capability]
    if not gpu_indices:
        raise EnginesmithError(
            f"this machine has no GPU of capability {compute_capability}; run this on a node with one"
        )
    return gpu_indices[0]


def explain_missing_gpu(target: Target) -> str | None:
    """The reason why no GPU of this machine runs engines for `target`; None if one does, or for CPU targets."""
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
    """libcuda, initialised. Raises UnavailableError if it is missing or finds no GPU."""
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
    """The primary context of one GPU, with a stream and named buffers, which are freed on exit. Never run on a GPU.

    A context belongs to one thread: use a Device in the thread that created it.
    Raises UnavailableError if the driver is missing, EnginesmithError if it refuses a call.
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
        """The stream's handle, as TensorRT expects it."""
        return self._stream.value or 0

    def buffer(self, name: str, size_bytes: int) -> int:
        """The device address of a named buffer of at least `size_bytes`. A buffer that must grow loses its content."""
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
        """Copy the named buffer into a C-contiguous array of any shape and dtype."""
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
        """Seconds that the GPU needs for the work that `work` enqueues on the stream, measured between two events."""
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
        finally:  # else the stream would stay in capture mode and refuse other work
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
