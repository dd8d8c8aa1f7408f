"""Nobody outside of a backend's own folder knows its class, its name or its options: what is asked of it is a value."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from builders.backends import discovery
from enginery.core.capabilities import SharedOptions

ROOT = Path(__file__).parents[3]
ROOMS = ("builders", "validation", "pipeline", "enginery")
OURS = {entry.name: entry.value for entry in discovery._entries().values() if entry.value.startswith("builders.")}
# 'builders/backends/tensorrt' of 'builders.backends.tensorrt:TensorRT'.
FOLDERS = {"/".join(value.partition(":")[0].split(".")[:3]) for value in OURS.values()}
COMPILERS = {"onnxruntime", "tensorrt", "tensorrt_rtx", "iree", "tvm", "tvm_ffi", "jax", "jaxlib"}
# Options whose names are words of their own: whoever writes one of them down speaks of that option.
# memory_mib is the spec's build.memory_mib as well.
OPTIONS = {option for name in OURS for option in discovery.option_fields(discovery.load(name)) if "_" in option}
OPTIONS -= {"memory_mib"}

# Who knows one all the same, and why.
IMPORTS = {
    "builders/reference.py": "the reference interpreter is ONNX Runtime: an interpreter is no choice of a spec",
    "builders/onnx_jax": "ONNX operators as JAX programs: a library that the backend of XLA compiles",
    "validation/gpu/probes.py": "a question about TensorRT-RTX alone, which no backend's request asks",
}
NAMES = {
    "pipeline/spec/model.py": "the backends of a spec that names none",
    "validation/gpu/probes.py": "a question about TensorRT-RTX alone, which no backend's request asks",
    "pipeline/cli/options.py": "--tensorrt and --tensorrt-rtx; any other runtime is stated with --runtime",
    "pipeline/compile/publication/publish.py": "a version's toolchain has the reference interpreter's distribution",
    "enginery/client/pull.py": "--fallback onnx gives the model itself, which ONNX Runtime runs",
}


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return tuple(
        (name, ast.parse(path.read_text()))
        for name, path in zip(names, paths, strict=True)
        if not any(name.startswith(f"{folder}/") for folder in FOLDERS)
    )


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def texts(tree: ast.Module) -> set[object]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def is_known(module: str) -> bool:
    return module.split(".")[0] in COMPILERS or "/".join(module.split(".")[:3]) in FOLDERS


def excepted(name: str, exceptions: dict[str, str]) -> bool:
    return any(name == known or name.startswith(f"{known}/") for known in exceptions)


def test_no_other_file_imports_a_backend_or_its_compiler():
    found = {name: sorted(set(filter(is_known, imported(tree)))) for name, tree in sources()}
    assert {name: modules for name, modules in found.items() if modules and not excepted(name, IMPORTS)} == {}


def test_no_other_file_names_a_backend():
    """The toy's, which is in a distribution of its own, is in no file at all."""
    found = {name: sorted(map(str, texts(tree) & {*OURS, "toy", "toy-compiler"})) for name, tree in sources()}
    assert {name: told for name, told in found.items() if told and not excepted(name, NAMES)} == {}


def test_no_other_file_names_an_option():
    found = {name: sorted(map(str, texts(tree) & OPTIONS)) for name, tree in sources()}
    found.pop("enginery/core/capabilities.py", None)
    assert {name: told for name, told in found.items() if told} == {}


def test_every_exception_is_needed():
    known = dict(sources())
    assert all(any(name == path or path.startswith(f"{name}/") for path in known) for name in (*IMPORTS, *NAMES))
    for name in NAMES:
        assert texts(known[name]) & OURS.keys(), f"{name} names none any more"


@pytest.mark.parametrize("name", sorted(OURS))
def test_an_option_with_a_shared_meaning_is_an_option(name):
    options = discovery.capabilities_of(name).options
    known = discovery.option_fields(discovery.load(name))
    for field in fields(SharedOptions):
        told = getattr(options, field.name)
        option = told[0] if isinstance(told, tuple) else told
        assert not option or option in known, f"{name} has no option {option}"
