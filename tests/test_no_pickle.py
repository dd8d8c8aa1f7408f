"""No pickle, ever: nothing in the product can turn bytes into code by a deserializer.

A state dict is read with `weights_only=True`, which builds tensors and containers alone and refuses all else
(https://docs.pytorch.org/docs/stable/notes/serialization.html), in the process of the user's code.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import builders
import enginesmith
import pipeline
import validation

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile_command"}
METHODS = {
    ("torch", "load"), ("jit", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("yaml", "load_all"),
    ("yaml", "unsafe_load"), ("yaml", "full_load"), ("yaml", "unsafe_load_all"), ("yaml", "full_load_all"),
    ("pd", "read_pickle"), ("hub", "load"), ("npy", "read_array"),
}  # fmt: skip
# Each of them is one of these words in the file, and parsing all files takes 5 s.
WORDS = re.compile(rf"\b({'|'.join(MODULES | CALLS | {name for _, name in METHODS})}|allow_pickle|Loader)\b")
ROOMS = [Path(str(room.__file__)).parent for room in (builders, validation, pipeline, enginesmith)]


def forbidden(source: str) -> Iterator[str]:
    """What a file does that it must not: line and name."""
    for node in ast.walk(ast.parse(source)) if WORDS.search(source) else ():
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            result = _called(node) if isinstance(node, ast.Call) else _imported(node)
            yield from (f"{node.lineno}: {name}" for name in result)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]
    return [name for name in names if name.split(".")[0] in MODULES]


def _called(node: ast.Call) -> Iterator[str]:
    called_function = node.func
    if isinstance(called_function, ast.Name) and called_function.id in CALLS:
        yield called_function.id
    if isinstance(called_function, ast.Attribute):
        inner_value = called_function.value
        owner = inner_value.id if isinstance(inner_value, ast.Name) else getattr(inner_value, "attr", "")
        if (owner, called_function.attr) in METHODS and not _takes_weights_only(node):
            yield f"{owner}.{called_function.attr}"
    for keyword in node.keywords:
        if keyword.arg == "allow_pickle" and not _is_false(keyword.value):
            yield "allow_pickle"
        if keyword.arg == "Loader" and "Safe" not in ast.unparse(keyword.value):
            yield ast.unparse(keyword.value)


def _takes_weights_only(node: ast.Call) -> bool:
    """Whether it is `torch.load` with `weights_only=True`, written out."""
    output = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
    plain_flags = [value.value is True for value in output if isinstance(value, ast.Constant)]
    return ast.unparse(node.func) == "torch.load" and plain_flags == [True]


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_the_product_deserializes_no_code() -> None:
    files = [file for room in ROOMS for file in sorted(room.rglob("*.py"))]
    assert len(files) > 100
    assert [f"{file}:{line}" for file in files for line in forbidden(file.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load(x)", "np.load(x)", "eval(x)", "exec(x)",
        "numpy.load(x, allow_pickle=True)", "f(x, allow_pickle=flag)", "yaml.load(x)",
        "yaml.compose(x, Loader=yaml.Loader)", "import joblib.memory", "torch.jit.load(x)",
        "torch.load(x, weights_only=flag)", "torch.load(x, weights_only=False)", "torch.jit.load(x, weights_only=True)",
    ],
)  # fmt: skip
def test_the_check_finds_each_kind(source: str) -> None:
    assert list(forbidden(source))


def test_a_state_dict_may_be_read() -> None:
    assert not list(forbidden("torch.load(x, map_location='cpu', weights_only=True)"))
