"""What ONNX Runtime's own loader takes from a model package, by the C API of 1.31; Python has no binding of it."""

import ctypes
from pathlib import Path
from typing import Any

import onnxruntime

# Places of functions in OrtApi, which only grows, and in the OrtModelPackageApi that one of them gives.
_API = {"GetErrorMessage": 2, "CreateEnv": 3, "CreateSessionOptions": 10, "SessionGetInputCount": 30}
_GET_PACKAGE_API = 427
_PACKAGE_API = {
    "CreateModelPackageOptionsFromSessionOptions": 0, "CreateModelPackageContext": 2,
    "ModelPackage_GetComponentNames": 6, "ModelPackage_GetVariantNames": 8, "ModelPackage_GetVariantEpName": 9,
    "SelectComponent": 11, "ModelPackageComponent_GetSelectedVariantName": 13, "CreateSession": 15,
}  # fmt: skip
_Table = ctypes.POINTER(ctypes.c_void_p)


class Loader:
    """A package that ONNX Runtime has opened. Raises ValueError with its words for one that it refuses."""

    def __init__(self, package: Path) -> None:
        (path,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
        base = ctypes.CDLL(str(path)).OrtGetApiBase
        base.restype = _Table
        minor = int(onnxruntime.__version__.split(".")[1])
        self._api = ctypes.CFUNCTYPE(_Table, ctypes.c_uint32)(base()[0])(minor)
        self._package_api = ctypes.CFUNCTYPE(_Table)(self._api[_GET_PACKAGE_API])()
        self._env = self._made("CreateEnv", 3, b"test")
        self._options = self._made("CreateSessionOptions")
        self._package = self._made("CreateModelPackageContext", str(package).encode())

    def components(self) -> list[str]:
        return self._names("ModelPackage_GetComponentNames")

    def variants(self, component: str) -> dict[str, str]:
        """The provider of each variant."""
        names = self._names("ModelPackage_GetVariantNames", component.encode())
        variant_keys = ((name, (self._package, component.encode(), name.encode())) for name in names)
        return {name: _text(self._made("ModelPackage_GetVariantEpName", *how)) for name, how in variant_keys}

    def select(self, component: str) -> tuple[str, int]:
        """The variant for this machine's CPU, and how many inputs the session of it has."""
        options = self._made("CreateModelPackageOptionsFromSessionOptions", self._env, self._options)
        chosen = self._made("SelectComponent", self._package, component.encode(), options)
        session = self._made("CreateSession", self._env, chosen, None)
        count = self._made("SessionGetInputCount", session)
        return _text(self._made("ModelPackageComponent_GetSelectedVariantName", chosen)), count.value or 0

    def _names(self, function: str, *arguments: Any) -> list[str]:
        names, count = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_size_t()
        self._call(function, self._package, *arguments, ctypes.byref(names), ctypes.byref(count))
        return [names[index].decode() for index in range(count.value)]

    def _made(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """The last argument of a function, which it fills in: a pointer or a count."""
        out_pointer = ctypes.c_void_p()
        self._call(function, *arguments, ctypes.byref(out_pointer))
        return out_pointer

    def _call(self, function: str, *arguments: Any) -> None:
        address = self._package_api[_PACKAGE_API[function]] if function in _PACKAGE_API else self._api[_API[function]]
        kinds = [ctypes.c_char_p if isinstance(item, bytes) else ctypes.c_void_p for item in arguments]
        if status := ctypes.CFUNCTYPE(ctypes.c_void_p, *kinds)(address)(*arguments):
            callback = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(self._api[_API["GetErrorMessage"]])
            raise ValueError(callback(status).decode())


def _text(pointer: ctypes.c_void_p) -> str:
    return ctypes.cast(pointer, ctypes.c_char_p).value.decode() if pointer else ""
