"""Nobody outside of a backend's own folder knows its class, its name or its options: what is asked of it is a value."""

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from builders.backends import discovery
from enginesmith.core.capabilities import SharedOptions
from enginesmith.core.types import QuantizationScheme

ROOT = Path(__file__).parents[3]
ROOMS = ("builders", "validation", "pipeline", "enginesmith")
OURS = {entry.name: entry.value for entry in discovery._entries().values() if entry.value.startswith("builders.")}
# 'builders/backends/tensorrt' of 'builders.backends.tensorrt:TensorRT'.
FOLDERS = {"/".join(value.partition(":")[0].split(".")[:3]) for value in OURS.values()}
COMPILERS = {"onnxruntime", "tensorrt", "tensorrt_rtx", "iree", "tvm", "tvm_ffi", "jax", "jaxlib"}
# Options whose names are words of their own: whoever writes one of them down speaks of that option.
# memory_mib is the spec's build.memory_mib as well.
OPTIONS = {option for name in OURS for option in discovery.option_fields(discovery.load(name)) if "_" in option}
OPTIONS -= {"memory_mib"}
# What is looked for has one of them; parsing all files takes 2 s.
WORDS = re.compile("|".join((*OURS, *COMPILERS, *OPTIONS, "toy", "discovery")))

# Who knows one all the same, and why.
IMPORTS = {
    "builders/reference.py": "the reference interpreter is ONNX Runtime: an interpreter is no choice of a spec",
    "enginesmith/opening.py": "opens what a server pulled, without `builders`; engines of others are given opened",
}
NAMES = {
    "builders/backends/known_faults.py": "the table of faults that users have reported says of which compiler",
    "enginesmith/cli/__init__.py": "the extras of the distribution, some of which are called as their backend is",
    "pipeline/spec/sections.py": "the backends of a spec that names none",
    "pipeline/compile/publication/publish.py": "a version's toolchain has the reference interpreter's distribution",
    "pipeline/drafts/model_package.py": "what opens the engines, as a spec's serve calls it",
    "pipeline/drafts/onnx_model.py": "the name of a platform of Triton's, whose configurations are read",
    "enginesmith/client/layouts/triton_config.py": "which of Triton's backends opens an engine",
    "enginesmith/client/layouts/model_package.py": "which of ONNX Runtime's execution providers runs an engine",
    "enginesmith/client/locate.py": "--fallback onnx gives the model itself, which ONNX Runtime runs",
}


@cache
def sources() -> dict[str, tuple[set[str], set[object]]]:
    """What every file outside of the backends' folders imports, and its constants."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {
        name: read(ast.parse(text if WORDS.search(text) else ""))
        for name, text in texts.items()
        if not any(name.startswith(f"{folder}/") for folder in FOLDERS)
    }


def read(tree: ast.Module) -> tuple[set[str], set[object]]:
    modules, constants = set[str](), set[object]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant):
            constants.add(node.value)
    return modules, constants


def is_known(module: str) -> bool:
    return module.split(".")[0] in COMPILERS or "/".join(module.split(".")[:3]) in FOLDERS


def excepted(name: str, exceptions: dict[str, str]) -> bool:
    return any(name == exception or name.startswith(f"{exception}/") for exception in exceptions)


def test_no_other_file_imports_a_backend_or_its_compiler():
    result = {name: sorted(filter(is_known, modules)) for name, (modules, _) in sources().items()}
    assert {name: modules for name, modules in result.items() if modules and not excepted(name, IMPORTS)} == {}


def test_no_other_file_names_a_backend():
    """The toy's, which is in a distribution of its own, is in no file at all."""
    names = {*OURS, *(name.replace("-", "_") for name in OURS), "toy", "toy-compiler"}
    result = {name: sorted(map(str, texts & names)) for name, (_, texts) in sources().items()}
    assert {name: message for name, message in result.items() if message and not excepted(name, NAMES)} == {}


def test_code_that_judges_engines_of_a_fleet_names_no_backend():
    """What an engine requires is in its manifest. Coverage asks whether what is missing could be built."""
    files = {name: modules for name, (modules, _) in sources().items() if name.startswith("pipeline/fleet/")}
    assert {name for name, modules in files.items() if "builders.backends.discovery" in modules} == {
        "pipeline/fleet/coverage.py"
    }


def test_no_other_file_names_an_option():
    result = {name: sorted(map(str, texts & OPTIONS)) for name, (_, texts) in sources().items()}
    result.pop("enginesmith/core/capabilities.py", None)
    assert {name: message for name, message in result.items() if message} == {}


def test_every_exception_is_needed():
    source_texts = sources()
    assert all(any(name == path or path.startswith(f"{name}/") for path in source_texts) for name in (*IMPORTS, *NAMES))
    for name in NAMES:
        assert source_texts[name][1] & OURS.keys(), f"{name} names none any more"


@pytest.mark.parametrize("name", sorted(OURS))
def test_an_option_with_a_shared_meaning_is_an_option(name):
    options = discovery.capabilities_of(name).options
    option_fields = discovery.option_fields(discovery.load(name))
    for field in fields(SharedOptions):
        message = getattr(options, field.name)
        option = message[0] if isinstance(message, tuple) else message
        assert not option or option in option_fields, f"{name} has no option {option}"


def test_backends_that_share_a_graph_have_one_scheme_of_quantization():
    """Otherwise each builds one of its own."""
    settings = {"onnxruntime": {"reduced_range": "never"}}
    users: dict[QuantizationScheme, set[str]] = {}
    for name in OURS:
        users.setdefault(discovery.configure(name, settings.get(name, {})).scheme, set()).add(name)
    assert users == {
        QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32"): {"onnxruntime", "aotinductor", "xla"},
        QuantizationScheme("int8", quantize_bias=False, float_precision="fp32"): {"iree", "tvm"},
        QuantizationScheme("int8", quantize_bias=False, float_precision="fp16"): OURS.keys()
        - {"onnxruntime", "aotinductor", "xla", "iree", "tvm"},
    }
