"""What chooses, pulls and compares engines names no compiler: what an engine requires stands in its manifest."""

import ast
from collections.abc import Iterator
from pathlib import Path

from builders.backends import discovery

ROOT = Path(__file__).parents[3]
ROOMS = ("enginesmith", "pipeline/fleet")
# Its options and its table of extras are a person's words, as those of `pipeline/cli` are.
COMMANDS = ROOT / "enginesmith/cli"
# The model as it was exported is served as an ONNX file, by the runtime of that name (docs/guides/client.md).
# Which of Triton's backends opens an engine is said of Triton, whose backends have these names, too.
BY_TRITON = ("onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "tensorrt")
# So are the execution providers of ONNX Runtime, of which a model package has one for each variant.
ALLOWED = {
    ("locate.py", "onnxruntime"),
    *(("triton_config.py", name) for name in BY_TRITON),
    *(("model_package.py", name) for name in BY_TRITON[:3]),
}


def _files() -> Iterator[Path]:
    for room in ROOMS:
        yield from (path for path in (ROOT / room).rglob("*.py") if COMMANDS not in path.parents)


def test_no_module_names_an_installed_backend_or_an_option_of_one() -> None:
    names = set(discovery.names())
    options = {option for name in names for option in discovery.option_fields(discovery.load(name)) if "_" in option}
    known = {name.replace("_", "-") for name in names} | options
    assert {"tensorrt-rtx", "onnxruntime", "hardware_compatibility", "strip_weights"} <= known
    found = {
        (path.name, node.value)
        for path in _files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and {node.value, node.value.replace("_", "-")} & known
    }
    assert found == ALLOWED


def test_no_module_looks_for_backends() -> None:
    for path in _files():
        found = {
            alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if path.name != "coverage.py":  # the fleet asks whether what is missing could be built
            assert not found & {"builders.backends.discovery", "builders.backends.discovery.find_incompatibility"}, path
