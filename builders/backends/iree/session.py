"""Runs an IREE engine: on this CPU, and, never tried, on this machine's GPU."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from builders.backends import shape_profiles
from enginesmith.arrays import InputCheck
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import BuildRequest, Engine, Session, Tensors, TensorSpec, Untyped

_PLACES = re.compile(r"^Error invoking function: |[\w/<>.]+\.?[ch]?:\d+: [A-Z_]+; |; while (invoking|calling) [^;]*")


@contextmanager
def open_engine(engine: Engine, device: str) -> Iterator[Session]:
    """Load `engine` on a device, named as IREE does ('local-task', 'cuda://0').

    Raises EnginesmithError with IREE's words when it cannot be loaded.
    """
    import iree.runtime as runtime

    try:
        config = runtime.Config(device)
        module = runtime.VmModule.mmap(config.vm_instance, str(engine.path))
        context = runtime.SystemContext(vm_modules=[module], config=config)
        main = context.modules[module.name]["main"]
    except (ValueError, RuntimeError, KeyError) as error:
        raise EnginesmithError(f"IREE cannot load {engine.path.name}: {words(error)}; build it again") from error
    session = IreeSession(engine.request, main)
    try:
        yield session
    finally:
        session.close()


class IreeSession(Session):
    """A function of an engine on a device."""

    def __init__(self, request: BuildRequest, main: Untyped) -> None:
        self.inputs: Sequence[TensorSpec] = request.inputs
        self.outputs: Sequence[TensorSpec] = request.outputs
        self._request = request
        self._check = InputCheck(request.inputs, request.profiles)
        self._main: Untyped = main

    def close(self) -> None:
        """Let go of the function; `run` refuses from now on."""
        self._main = None

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """Run once. Raises DataError for arrays that fit no profile, EnginesmithError when IREE fails."""
        if self._main is None:
            raise EnginesmithError("the session of this IREE engine is closed; open it again")
        given, sizes = shape_profiles.checked_inputs(self._check, inputs)
        try:
            found = self._main(*given)
        except (ValueError, RuntimeError, IndexError) as error:
            raise EnginesmithError(f"IREE failed while running: {words(error)}") from error
        # copied: IREE's results are in memory of its own
        results = [np.array(value.to_host()) for value in (found if isinstance(found, tuple) else (found,))]
        results = [_signed_as(spec, array) for spec, array in zip(self.outputs, results, strict=True)]
        return shape_profiles.checked_outputs(self._request, results, sizes, "IREE")


def _signed_as(spec: TensorSpec, array: "np.ndarray") -> "np.ndarray":
    """The array's bits in the request's dtype: IREE's integers have a width and no sign, and come as signed ones."""
    wanted = np.dtype(spec.dtype) if spec.dtype.lstrip("u").startswith("int") else array.dtype
    same = array.dtype.kind in "iu" and wanted.itemsize == array.dtype.itemsize
    return array.view(wanted) if same else array


def words(error: Exception) -> str:
    """IREE's words without the places in its source code and without its stack."""
    first = " ".join(str(error).split("\n")[0].split())
    return _PLACES.sub("", first).rstrip("; ") or type(error).__name__
