"""The names of TensorRT's API that our code uses, read from its syntax: 'Class.attribute', as in the bindings."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import builders.backends.tensorrt

# What the methods that make something give back. Functions of the bindings say so in their documentation.
MADE_BY = {
    "create_network": "INetworkDefinition", "create_builder_config": "IBuilderConfig",
    "create_optimization_profile": "IOptimizationProfile", "deserialize_cuda_engine": "ICudaEngine",
    "create_execution_context": "IExecutionContext", "create_engine_inspector": "EngineInspector",
    "create_runtime_config": "IRuntimeConfig", "create_serialization_config": "ISerializationConfig",
    "get_plugin_registry": "IPluginRegistry", "get_error": "ParserError", "get_timing_cache": "ITimingCache",
    "create_timing_cache": "ITimingCache",
}  # fmt: skip
# What comes in as an argument, or lies in an attribute, is known by its name.
BY_NAME = {
    "builder": "Builder", "network": "INetworkDefinition", "config": "IBuilderConfig", "runtime": "Runtime",
    "loaded": "ICudaEngine", "cuda_engine": "ICudaEngine", "context": "IExecutionContext", "problem": "ParserError",
    "registry": "IPluginRegistry", "owner": "Builder",
}  # fmt: skip
# How the module of the bindings is called.
_MODULE = ("trt", "self._trt")


def modules() -> dict[str, Path]:
    """Our modules that call TensorRT, by name."""
    folder = Path(builders.backends.tensorrt.__file__).parent
    return {path.stem: path for path in sorted(folder.rglob("*.py"))}


def names_used(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    used_text = set(_in(tree, BY_NAME))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (name := _of_module(base)) is not None:
                    used_text |= {f"{name}.{method}" for method in _public_methods(node)}
    return used_text


def _in(node: ast.AST, modules: Mapping[str, str]) -> Iterator[str]:
    """Names in a function or module; what is assigned in a function is known in it alone."""
    body = list(_own(node))
    modules = {**modules, **_assigned(body, modules)}
    for item in body:
        if isinstance(item, ast.Attribute):
            yield from _name(item, modules)
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in(item, modules)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without the bodies of functions inside."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own(child)


def _assigned(body: list[ast.AST], modules: Mapping[str, str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    for item in body:
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        if (class_name := _made(item.value)) is not None:
            entries[item.targets[0].id] = class_name
    return entries


def _made(value: ast.AST) -> str | None:
    """The class of what an expression makes: `trt.X(...)`, or `x.create_y(...)`, also behind an `and`."""
    if isinstance(value, ast.BoolOp):
        return _made(value.values[-1])
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    return _of_module(value.func) or MADE_BY.get(value.func.attr)


def _of_module(node: ast.AST) -> str | None:
    """'BuilderFlag.TF32' of `trt.BuilderFlag.TF32`."""
    text = ast.unparse(node)
    if "__" in text or not re.fullmatch(r"[\w.]+", text):
        return None
    return next((text.removeprefix(f"{name}.") for name in _MODULE if text.startswith(f"{name}.")), None)


def _name(node: ast.Attribute, modules: Mapping[str, str]) -> Iterator[str]:
    if (name := _of_module(node)) is not None:
        yield name
        return
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id in modules:
        yield f"{modules[owner.id]}.{node.attr}"
    elif isinstance(owner, ast.Call) and (class_name := _made(owner)) is not None:
        yield f"{class_name}.{node.attr}"
    elif isinstance(owner, ast.Attribute) and owner.attr.lstrip("_") in BY_NAME:
        yield f"{BY_NAME[owner.attr.lstrip('_')]}.{node.attr}"


def _public_methods(node: ast.ClassDef) -> list[str]:
    return [item.name for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
