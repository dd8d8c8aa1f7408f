"""Loads an entry point of user code and its weights."""

import ast
import importlib.util
import inspect
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from enginesmith.core.errors import ModelError
from enginesmith.core.text import join_first, suggest
from enginesmith.rooms import FindIn

if TYPE_CHECKING:
    import torch

# Finds the source files of the Python entry point that a spec names, and calls it, with errors for its author.
#
# The cache key of an export digests these files, so they must be found within milliseconds and without importing torch:
# imports are read from the syntax tree. It does not show what is only known when the code runs:
# `importlib.import_module(name)`, compiled extension modules, and data that the code opens itself. For this reason
# weights have their own place in the spec.


def _search_folders(root: Path, entry: Path, module: str) -> tuple[Path, ...]:
    """The folders of the entry point's absolute imports: its own, then the spec's; for a dotted module only the spec's,
    as in Python. Both are resolved."""
    return (root.resolve(),) if module else tuple(dict.fromkeys((entry.resolve().parent, root.resolve())))


def source_files(root: Path, entry: Path, module: str = "") -> tuple[Path, ...]:
    """The entry file and every local module that it imports, directly or not, as sorted resolved paths.

    root: the spec's folder.  entry: the Python file, inside it.  module: its dotted name, if it is imported by that
    name, which also runs the packages that contain it.
    Raises ModelError for a file that is missing, outside `root`, or not Python.
    """
    folders = _search_folders(root, entry, module)
    source_paths: set[Path] = set()
    waiting_files = [entry, *(_module_files(root, module) if module else ())]
    while waiting_files:
        path = waiting_files.pop()
        file = path.resolve()
        if not file.is_relative_to(root.resolve()):
            raise ModelError(
                f"source file {str(path)!r} is outside the spec's folder {str(root.resolve())!r}; move it inside"
            )
        if not file.is_file():
            raise ModelError(f"source file {str(path)!r} does not exist; correct source.torch in the spec")
        if file not in source_paths:
            source_paths.add(file)
            waiting_files += _local_imports(file, folders)
    return tuple(sorted(source_paths))


def why_no_function(root: Path, entry: Path, function: str, module: str = "") -> str:
    """The reason why a spec's entry point cannot be called, found without running it; '' if it can or may. root, entry,
    module: as for `source_files`."""
    try:
        source_files(root, entry, module)
        tree = _parse(entry)
    except ModelError as error:
        return str(error)
    nodes = list(ast.walk(tree))
    symbols = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    symbols |= {node.id for node in nodes if isinstance(node, ast.Name)}
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    symbols |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    if function in symbols or symbols & {"*", "__getattr__", "globals", "exec", "setattr", "vars"}:
        return ""
    function_names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    suggestion = suggest(function, function_names, f"its functions: {', '.join(function_names) or 'none'}")
    return f"{entry} has no function {function!r}; {suggestion}"


def imported_packages(root: Path, entry: Path, module: str = "") -> tuple[str, ...]:
    """Top-level names of the packages that the source files import, without local and standard modules; sorted.

    root, entry, module: as for `source_files`. Imports inside these packages are not followed.
    """
    folders = _search_folders(root, entry, module)
    packages: set[str] = set()
    for node in (node for file in source_files(root, entry, module) for node in ast.walk(_parse(file))):
        if isinstance(node, ast.Import):
            packages |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    local_packages = {name for name in packages if any(any(_module_files(folder, name)) for folder in folders)}
    return tuple(sorted(packages - local_packages - sys.stdlib_module_names))


def _local_imports(file: Path, folders: tuple[Path, ...]) -> Iterator[Path]:
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            for folder in folders:
                yield from (path for name in node.names for path in _module_files(folder, name.name))
        elif isinstance(node, ast.ImportFrom):
            # `from a import b` may mean the module a.b, or something inside module a.
            prefix = f"{node.module}." if node.module else ""
            modules = [prefix + name.name for name in node.names if name.name != "*"] or [node.module or ""]
            search_folders = file.parents[node.level - 1 : node.level] if node.level else folders
            yield from (
                path for folder_path in search_folders for name in modules for path in _module_files(folder_path, name)
            )


def _module_files(folder: Path, dotted: str) -> Iterator[Path]:
    """The files that importing a dotted name from a folder would run: each package on the way, and the module."""
    path = folder
    for segment in dotted.split("."):
        path = path / segment
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        line = getattr(error, "lineno", None) or 1
        version = platform.python_version()
        raise ModelError(
            f"{file}:{line}: not Python that version {version} can read: {error or 'nested too deeply'}"
        ) from error


REASON_CHARACTERS = 500


def call_entry_point(root: Path, file: str, function: str, arguments: Mapping[str, Any], module: str = "") -> Any:
    """Import `file`, below `root`, and call its function with keyword arguments. Use it inside `importing_from`.

    module: the file's dotted name, if it is imported by this name. Raises ModelError with file and line if the file or
    the function is missing, is not Python or raises.
    """
    try:
        callee = find_function(root, file, function, module)
        _check_call(callee, f"{root / file}: {function}", arguments)
        return callee(**arguments)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{place(error, root) or root / file}: {function}() failed: {reason(error)}"
        if isinstance(error, ImportError) and "relative import" in str(error) and not module:
            dotted_name = ".".join(Path(file).with_suffix("").parts)
            problem += f"; name it as a module of its package, {dotted_name}:{function}"
        raise ModelError(problem) from error


def find_function(root: Path, file: str, function: str, module: str = "") -> Callable[..., Any]:
    """Import a file and return its function. Use it inside `importing_from`.

    Raises ModelError if there is none, and errors of the import.
    """
    loaded_module = _import(root / file, module)
    callee = getattr(loaded_module, function, None)
    if not callable(callee):
        function_names = [name for name, value in vars(loaded_module).items() if inspect.isfunction(value)]
        suggestion = suggest(function, function_names, f"its functions: {', '.join(function_names) or 'none'}")
        raise ModelError(f"{loaded_module.__file__} has no function {function!r}; {suggestion}")
    return cast("Callable[..., Any]", callee)


def _check_call(callee: Callable[..., Any], where: str, arguments: Mapping[str, Any]) -> None:
    """Raise ModelError if the entry point is a model instead of a function, and for arguments that do not fit."""
    if hasattr(callee, "forward") and not inspect.isclass(callee):
        raise ModelError(f"{where} is a model, not a function; write a function that returns it, and name that")
    try:
        parameters = inspect.signature(callee)
    except (ValueError, TypeError):  # functions written in C
        return
    try:
        parameters.bind(**arguments)
    except TypeError as error:
        remedy = "correct source.arguments of the spec, or give the parameters defaults"
        raise ModelError(f"{where}{parameters} cannot be called: {error}; {remedy}") from error


@contextmanager
def importing_from(root: Path, file: str, module: str = "") -> Iterator[None]:
    """Make the local modules of an entry point importable, and unload them afterwards. Writes no bytecode there.

    Raises ModelError for unreadable sources, and for a local module with the name of a loaded one: Python would
    silently use that one.
    """
    folders, files = _search_folders(root, root / file, module), source_files(root, root / file, module)
    for source_file in files:
        module_path = source_file.parent if source_file.name == "__init__.py" else source_file
        if module_path.parent in folders and module_path.stem in sys.modules:
            raise ModelError(
                f"{source_file} has the name of {module_path.stem!r}, a module that is loaded already; rename the file"
            )
    search_path = list(sys.path)
    bytecode_setting = sys.dont_write_bytecode
    places = [str(folder) for folder in folders]
    finder = FindIn(places)
    sys.path[:0] = places
    sys.meta_path.insert(0, finder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = search_path, bytecode_setting
        sys.meta_path.remove(finder)
        for name, loaded_module in list(sys.modules.items()):
            source = str(getattr(loaded_module, "__file__", ""))
            if source.startswith((str(root), *places)) and Path(source).resolve() in files:
                del sys.modules[name]


def _import(entry: Path, module: str) -> ModuleType:
    if module:
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(entry.stem, entry)
    if spec is None or spec.loader is None:
        raise ModelError(f"{entry} is not a Python file; its name must end in .py")
    loaded_module = importlib.util.module_from_spec(spec)
    sys.modules[entry.stem] = loaded_module
    spec.loader.exec_module(loaded_module)
    return loaded_module


def place(error: BaseException, root: Path) -> str:
    """'file:line' of the innermost frame in the user's own code below `root`; '' if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(root.resolve()) and "site-packages" not in file.parts:
            return f"{frame.filename}:{frame.lineno}"
    return ""


def reason(error: BaseException) -> str:
    """'Type: text' on one line: the first paragraph of an error's text, shortened."""
    text = " ".join(str(error).strip().split("\n\n")[0].split())
    return f"{type(error).__name__}: {text[:REASON_CHARACTERS]}" if text else type(error).__name__


# Weights of a torch module in files: safetensors, or a state dict that `torch.save` wrote.
#
# The latter is a pickle. It is read with `weights_only`, which only creates tensors and plain containers. Other
# contents of such files (a whole module, a checkpoint of a training loop, a TorchScript program) are refused; the error
# says what to save instead.

_REMEDY = "save the weights alone: torch.save(model.state_dict(), 'weights.pt')"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def read_weights(path: Path) -> dict[str, "torch.Tensor"]:
    """Tensors by name from a .safetensors file, or any other file with a state dict of torch.

    Raises ModelError for an unreadable file, and for one that contains anything but tensors by name.
    """
    if path.suffix.lower() != ".safetensors":
        return _read_state_dict(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read as safetensors ({error}); save it with safetensors.torch.save_file"
        ) from error


def _read_state_dict(path: Path) -> dict[str, "torch.Tensor"]:
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            state_dict: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's errors and torch's share no base class
        if "TorchScript" in str(error):
            raise ModelError(f"{path} is a TorchScript program and not a state dict; {_REMEDY}") from error
        if class_match := _GLOBAL.search(str(error)):
            problem = f"holds objects of {class_match[1]}, whose code would run as they are read"
            raise ModelError(f"{path} is not a plain state dict: it {problem}; {_REMEDY}") from error
        raise ModelError(f"{path} cannot be read as a state dict ({reason(error)[:160]}); {_REMEDY}") from error
    if not isinstance(state_dict, Mapping):
        raise ModelError(f"{path} holds a {type(state_dict).__name__} and not a state dict; {_REMEDY}")
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ModelError(_describe_other(path, state_dict, name, value))
        if value.layout != torch.strided or value.is_quantized:
            tensor_kind = "a quantized" if value.is_quantized else "a sparse"
            raise ModelError(f"{path}: {name} is {tensor_kind} tensor; save it as a dense one of floats")
    return dict(state_dict)


def _describe_other(path: Path, mapping: Mapping[object, object], name: object, value: object) -> str:
    """The reason why a mapping is no state dict; for a training checkpoint, with the name of its state dict."""
    keys_text = join_first([repr(key) for key in mapping], 5)
    import torch

    inner_maps = ((key, entry) for key, entry in mapping.items() if isinstance(entry, Mapping) and entry)
    inner_key = next(
        (key for key, entry in inner_maps if all(isinstance(value, torch.Tensor) for value in entry.values())), None
    )
    if inner_key is not None:
        command = f"torch.save(torch.load(PATH, weights_only=True)[{inner_key!r}], 'weights.pt')"
        return f"{path} is a checkpoint and not a state dict: it holds {keys_text}; save its weights alone: {command}"
    if not isinstance(name, str):
        return f"{path} is not a state dict: its key {name!r} is not a string; {_REMEDY}"
    return f"{path} is not a state dict: {name!r} is of type {type(value).__name__}, not a tensor; {_REMEDY}"


def weights_beside(path: Path) -> Path:
    """The file that the weights of a large ONNX model in `path` are written to."""
    return path.with_name(f"{path.name}.weights")
