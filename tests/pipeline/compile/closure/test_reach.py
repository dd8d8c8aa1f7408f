import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from enginesmith.core.errors import EnginesmithError
from pipeline.compile.closure import definitions
from pipeline.compile.closure.definitions import SourceFiles, _walk, reach

FILES = {
    "toy/__init__.py": "",
    "toy/start.py": """
        import json
        from typing import TYPE_CHECKING
        import numpy as np
        from toy import names, tables
        from toy.kept import Kept
        if TYPE_CHECKING:
            from toy.typed import Typed
        LIMIT = 3
        OTHER = 4
        def run(x: "Typed") -> int:
            '''Words.'''
            from toy.local import inner
            return inner(LIMIT) + names.one() + len(tables.TABLE) + Kept().first()
        def unused():
            from toy.never import never
            return never() + OTHER
        def plain():
            return LIMIT
    """,
    "toy/local.py": "from toy.deep import deep\ndef inner(x):\n    return deep(x)\ndef outer():\n    return 2\n",
    "toy/deep.py": "def deep(x):\n    return x\n",
    "toy/names.py": "def one():\n    return 1\ndef two():\n    return 2\n",
    "toy/tables.py": """
        from toy.register import operator
        TABLE = {}
        @operator('Add')
        def add():
            return helper()
        def helper():
            return 0
        def unused():
            return 1
    """,
    "toy/register.py": "def operator(name):\n    return lambda function: function\n",
    "toy/kept.py": "class Kept:\n    def first(self):\n        return 1\n    def second(self):\n        return 2\n",
    "toy/typed.py": "class Typed: pass\n",
    "toy/never.py": "def never():\n    return 0\n",
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    import textwrap

    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def digest(root: str = "toy.start:run") -> str:
    return reach([root], SourceFiles({"toy"})).digest


def edited(folder: Path, name: str, before: str, after: str) -> str:
    """The digest with one file changed, which is then put back."""
    path = folder / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    result = digest()
    path.write_text(text)
    return result


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("toy/start.py", "return inner(LIMIT)", "return inner(2 * LIMIT)"),
        ("toy/start.py", "LIMIT = 3", "LIMIT = 5"),
        ("toy/start.py", "import numpy as np", "np = 1\nLIMIT += 1"),
        ("toy/local.py", "return deep(x)", "return deep(-x)"),
        ("toy/deep.py", "return x", "return x + 1"),
        ("toy/names.py", "return 1", "return 11"),
        ("toy/tables.py", "return 0", "return 7"),  # reached through the table alone
        ("toy/register.py", "lambda function: function", "lambda function: None"),
        ("toy/kept.py", "return 2", "return 22"),  # a class counts whole
    ],
)
def test_reached_code_changes_the_digest(toy: Path, name: str, before: str, after: str) -> None:
    assert edited(toy, name, before, after) != digest()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("toy/start.py", "'''Words.'''", "'''Other words,\n    and more of them.'''"),
        ("toy/start.py", "return inner(LIMIT) +", "# a comment\n\n    return  inner( LIMIT ) +"),
        ("toy/start.py", "OTHER = 4", "OTHER = 5"),
        ("toy/start.py", "from toy.typed import Typed", "from toy.never import never as Typed"),
        ("toy/start.py", "return never() + OTHER", "return 1"),
        ("toy/start.py", "import json", "import os"),  # nothing that is reached reads it
        ("toy/local.py", "return 2", "return 3"),
        ("toy/names.py", "return 2", "return 3"),
        ("toy/tables.py", "return 1", "return 2"),
        ("toy/typed.py", "pass", "x = 1"),
        ("toy/never.py", "return 0", "return 1"),
    ],
)
def test_unreached_code_does_not_change_the_digest(toy: Path, name: str, before: str, after: str) -> None:
    assert edited(toy, name, before, after) == digest()


def test_all_bindings_of_a_name_count(toy: Path) -> None:
    write(toy, {"toy/start.py": "from numpy import sin as f\ndef run():\n    return f(1)\n"})
    digest_before = digest()
    assert edited(toy, "toy/start.py", "import sin", "import cos") != digest_before
    assert reach(["toy.start:run"], SourceFiles({"toy"})).packages == ("numpy",)
    write(
        toy,
        {
            "toy/a.py": "def f():\n    return 1\n",
            "toy/b.py": "def f():\n    return 2\n",
            "toy/re.py": "from toy.a import f\nfrom toy.b import f as g\n",
            "toy/start.py": "from toy.re import f, g\ndef run():\n    return f() - g()\n",
        },
    )
    assert edited(toy, "toy/start.py", "f, g", "g as f, f as g") != digest()
    swapped_text = "from toy.b import f\nfrom toy.a import f as g\n"
    assert edited(toy, "toy/re.py", "from toy.a import f\nfrom toy.b import f as g\n", swapped_text) != digest()


@pytest.mark.parametrize(
    "start",
    [
        "import toy.names\ndef run():\n    return toy.names.two()\n",
        "from . import names\ndef run():\n    return names.two()\n",
        "from .names import two as other\ndef run():\n    return other()\n",
        "from toy import names\ndef run():\n    return list(map(vars(names).get, ['two']))\n",  # handed on: whole
        "try:\n    from toy.names import two\nexcept ImportError:\n    two = None\ndef run():\n    return two()\n",
        "try:\n    from toy.names import two\nexcept ImportError:\n    from toy.never import never as two\ndef run():\n"
        "    return two()\n",
        "def run():\n    return start_process('toy.names:two')\n",
        "def run():\n    return ['python', '-m', 'toy.names']\n",
        "def run(two=1):\n    from toy.names import two\n    return two()\n",
        "from toy.names import two\nTABLE = {'two': two}\ndef run():\n    return TABLE['two']()\n",
        "from toy.names import two\nclass Base:\n    f = two\nclass Run(Base): pass\ndef run():\n    return Run\n",
        "from toy.lazy import two\ndef run():\n    return two()\n",
    ],
)
def test_every_way_to_refer_to_a_function_is_seen(toy: Path, start: str) -> None:
    lazy = "def __getattr__(name):\n    from toy import names\n    return getattr(names, name)\n"
    write(toy, {"toy/start.py": start, "toy/lazy.py": lazy})
    assert edited(toy, "toy/names.py", "return 2", "return 3") != digest()


def test_code_that_runs_on_import_counts(toy: Path) -> None:
    write(toy, {"toy/__init__.py": "import os\nos.environ['TOY'] = '1'\n"})
    assert edited(toy, "toy/__init__.py", "'1'", "'2'") != digest()


def test_circles_end(toy: Path) -> None:
    write(
        toy,
        {
            "toy/start.py": "from toy import other\nfrom toy.other import f\ndef run():\n    return f(other)\n",
            "toy/other.py": "from toy import start\nfrom toy.other import f\ndef f(x):\n    return start, f\n",
        },
    )
    assert {"run", "f"} <= {
        name for names in _walk(["toy.start:run"], SourceFiles({"toy"})).found.values() for name in names
    }


def test_a_function_object_and_a_method_are_roots(toy: Path) -> None:
    from pipeline.compile.closure.code import find_code
    from pipeline.compile.steps.calibration import MergeParts

    assert find_code(MergeParts) == find_code("pipeline.compile.steps.calibration:MergeParts")
    assert digest("toy.kept:Kept.first") == digest("toy.kept:Kept")
    with pytest.raises(EnginesmithError, match=r"toy\.start:gone does not exist"):
        digest("toy.start:gone")


def test_carriers_are_left_out(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_before = digest()
    monkeypatch.setattr(definitions, "is_carrier", lambda name: name == "toy.deep")
    assert digest() != digest_before
    assert edited(toy, "toy/deep.py", "return x", "return 2 * x") == digest()


def test_a_zip_file_gives_the_same_digest(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest_before = digest()
    with zipfile.ZipFile(toy / "toy.zip", "w") as archive:
        for name in FILES:
            archive.write(toy / name, name)
    monkeypatch.setattr(sys, "path", [str(toy / "toy.zip"), *(place for place in sys.path if place != str(toy))])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    spec = SourceFiles({"toy"})._spec("toy.start")
    assert spec is not None and "toy.zip" in str(spec.origin)
    assert digest() == digest_before


def test_bytecode_alone_is_refused_with_the_remedy(toy: Path) -> None:
    import py_compile

    py_compile.compile(str(toy / "toy/local.py"), cfile=str(toy / "toy/local.pyc"))
    (toy / "toy/local.py").unlink()
    with pytest.raises(
        EnginesmithError, match=r"toy\.local has no source code .* install the package with its \.py files"
    ):
        digest()


def test_an_extension_module_counts_by_its_bytes(toy: Path) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    native_path = toy / f"toy/local{EXTENSION_SUFFIXES[0]}"
    (toy / "toy/local.py").unlink()
    native_path.write_bytes(b"machine code")
    digest_before = digest()
    native_path.write_bytes(b"other code")
    assert digest() != digest_before


def test_the_error_names_a_module_with_invalid_syntax(toy: Path) -> None:
    (toy / "toy/deep.py").write_text("def (")
    with pytest.raises(EnginesmithError, match=r"toy\.deep cannot be parsed"):
        digest()
