"""Runs a TVM engine: on this CPU, and, never tried, on this machine's GPU."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from builders.backends import shape_profiles
from enginesmith.arrays import InputCheck
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware import cuda
from enginesmith.core.types import BuildRequest, Engine, Session, Tensors, TensorSpec, Untyped


@contextmanager
def open_engine(engine: Engine) -> Iterator[Session]:
    """Load `engine`. Raises EnginesmithError with TVM's words when it cannot be."""
    import tvm
    from tvm import relax

    target = engine.request.target
    device = tvm.cpu() if target.is_cpu else tvm.cuda(cuda.index_of(target.compute_capability))
    # At a new path: TVM unloads no library, and finds loaded ones by their path with links resolved. Where the file of
    # an engine was replaced it would run the functions of the earlier one.
    with tempfile.TemporaryDirectory(prefix="enginesmith-tvm-") as folder:
        path = Path(folder) / engine.path.name
        try:
            path.hardlink_to(engine.path)
        except OSError:  # another file system, or not ours to link to
            shutil.copyfile(engine.path, path)
        try:
            main = relax.VirtualMachine(tvm.runtime.load_module(str(path)), device)["main"]
        except (RuntimeError, ValueError, AttributeError, OSError) as error:
            raise EnginesmithError(f"TVM cannot load {engine.path.name}: {words(error)}; build it again") from error
    session = TvmSession(engine.request, main, device)
    try:
        yield session
    finally:
        session.close()


class TvmSession(Session):
    """A function of an engine on a device."""

    def __init__(self, request: BuildRequest, main: Untyped, device: Untyped) -> None:
        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._request, self._device = request, device
        self._check = InputCheck(request.inputs, request.profiles)
        self._main: Untyped = main

    def close(self) -> None:
        """Let go of the function; `run` refuses from now on."""
        self._main = None

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """Run once. Raises DataError for arrays that fit no profile, EnginesmithError when TVM fails."""
        import tvm
        import tvm_ffi

        if self._main is None:
            raise EnginesmithError("the session of this TVM engine is closed; open it again")
        arrays, sizes = shape_profiles.checked_inputs(self._check, inputs)
        given = [tvm.runtime.tensor(array, self._device) for array in arrays]
        try:
            found = self._main(*given)
        except (ValueError, RuntimeError, TypeError) as error:
            raise EnginesmithError(f"TVM failed while running: {words(error)}") from error
        results = list(found) if isinstance(found, Sequence) and not isinstance(found, tvm_ffi.Shape) else [found]
        # An output that is a shape has no `numpy`, but sizes.
        arrays = [item.numpy() if hasattr(item, "numpy") else np.array(list(item), np.int64) for item in results]
        return shape_profiles.checked_outputs(self._request, arrays, sizes, "TVM")


def words(error: Exception) -> str:
    """The first line of TVM's message; the rest is its stack."""
    return str(error).strip().split("\n")[0] or type(error).__name__
