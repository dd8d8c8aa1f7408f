"""Calls the function in a Python file that a spec names, and words what goes wrong in it for its author."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from enginery.core.errors import ModelError
from enginery.core.text import suggest
from enginery.rooms import FindIn
from enginery.user_code.source_files import search_folders, source_files

REASON_CHARACTERS = 500


def call_entry_point(root: Path, file: str, function: str, arguments: Mapping[str, Any]) -> Any:
    """Import `file`, in the folder `root`, and call its function with keyword arguments; inside `importing_from`.

    Raises ModelError with file and line when the file or the function is missing, is not Python or raises.
    """
    try:
        return _function(_import(root / file), function)(**arguments)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{place(error, root) or root / file}: {function}() failed: {reason(error)}") from error


@contextmanager
def importing_from(root: Path, file: str) -> Iterator[None]:
    """Let `import` find the local modules of an entry point; afterwards forget them. Writes no bytecode there.

    Raises ModelError for sources that cannot be read, and for a local module that has the name of one already loaded:
    Python would silently take that one.
    """
    folders, files = search_folders(root, root / file), source_files(root, root / file)
    _refuse_hidden(files, folders)
    path, writes, finder = list(sys.path), sys.dont_write_bytecode, FindIn([str(folder) for folder in folders])
    sys.path[:0] = [str(folder) for folder in folders]
    sys.meta_path.insert(0, finder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = path, writes
        sys.meta_path.remove(finder)
        _forget(files)


def _refuse_hidden(files: Sequence[Path], folders: Sequence[Path]) -> None:
    for file in files:
        module = file.parent if file.name == "__init__.py" else file
        if module.parent in folders and module.stem in sys.modules:
            raise ModelError(
                f"{file} has the name of {module.stem!r}, a module that is loaded already; rename the file"
            )


def _forget(files: Sequence[Path]) -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).resolve() in files:
            del sys.modules[name]


def _import(entry: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(entry.stem, entry)
    if spec is None or spec.loader is None:
        raise ModelError(f"{entry} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[entry.stem] = module
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    hint = suggest(name, own, f"its functions: {', '.join(own) or 'none'}")
    raise ModelError(f"{module.__file__} has no function {name!r}; {hint}")


def place(error: BaseException, root: Path) -> str:
    """'file:line' of the innermost frame in the user's own code below `root`; empty when there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(root.resolve()) and "site-packages" not in file.parts:
            return f"{frame.filename}:{frame.lineno}"
    return ""


def reason(error: BaseException) -> str:
    """'Type: text' on one line: the first paragraph of an error's text, and not too much of it."""
    text = " ".join(str(error).strip().split("\n\n")[0].split())
    return f"{type(error).__name__}: {text[:REASON_CHARACTERS]}" if text else type(error).__name__
