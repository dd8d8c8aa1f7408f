import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from enginesmith.core.errors import ModelError
from enginesmith.user_code.entry_point import imported_packages, source_files


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path, entry: str = "model.py") -> set[str]:
    return {path.relative_to(root.resolve()).as_posix() for path in source_files(root, root / entry)}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import blocks", {"blocks.py"}),
        ("import nets.head", {"nets/__init__.py", "nets/head.py"}),
        ("import nets.head as h", {"nets/__init__.py", "nets/head.py"}),
        ("from nets import head", {"nets/__init__.py", "nets/head.py"}),
        ("from nets.head import Head", {"nets/__init__.py", "nets/head.py"}),
        ("from nets import *", {"nets/__init__.py"}),
        ("from blocks import Block, other", {"blocks.py"}),
        ("def late():\n    import blocks", {"blocks.py"}),
        ("import torch, numpy, os.path", set()),
        ("from torch import nn", set()),
    ],
)
def test_an_import_adds_only_the_local_files_it_runs(tmp_path, statement, expected):
    write(tmp_path, {"blocks.py": "", "unused.py": "", "nets/__init__.py": "", "nets/head.py": ""})
    write(tmp_path, {"model.py": statement})
    assert found(tmp_path) == {"model.py"} | expected


def test_imports_are_followed_through_other_files_and_in_circles(tmp_path):
    write(tmp_path, {"model.py": "import a", "a.py": "import b", "b.py": "import c\nimport a", "c.py": ""})
    assert found(tmp_path) == {"model.py", "a.py", "b.py", "c.py"}


def test_relative_imports_are_followed(tmp_path):
    write(tmp_path, {"model.py": "import nets.head", "nets/__init__.py": "", "base.py": ""})
    write(tmp_path, {"nets/head.py": "from . import body\nfrom .tail import x\nfrom .. import base"})
    write(tmp_path, {"nets/body.py": "", "nets/tail.py": ""})
    assert found(tmp_path) == {
        "model.py", "nets/__init__.py", "nets/head.py", "nets/body.py", "nets/tail.py", "base.py",
    }  # fmt: skip


def test_an_entry_in_a_subfolder_sees_its_own_folder_and_the_root(tmp_path):
    write(tmp_path, {"nets/model.py": "import near\nimport far", "nets/near.py": "", "far.py": ""})
    assert found(tmp_path, "nets/model.py") == {"nets/model.py", "nets/near.py", "far.py"}


def test_a_missing_entry_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"model\.py' does not exist"):
        source_files(tmp_path, tmp_path / "model.py")


def test_an_entry_outside_the_root_is_refused(tmp_path):
    write(tmp_path, {"outside.py": "", "root/keep.py": ""})
    with pytest.raises(ModelError, match="outside the spec's folder"):
        source_files(tmp_path / "root", tmp_path / "root" / ".." / "outside.py")


def test_a_module_linked_from_outside_is_refused_because_its_changes_would_go_unseen(tmp_path):
    write(tmp_path, {"outside.py": "", "root/model.py": "import blocks"})
    (tmp_path / "root" / "blocks.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(ModelError, match=r"blocks\.py.*outside the spec's folder"):
        source_files(tmp_path / "root", tmp_path / "root" / "model.py")


@pytest.mark.parametrize("code", ["def build(:\n  pass", "x = 1\n\0", "# coding: nonsense\n"])
def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path, code):
    write(tmp_path, {"model.py": "import blocks", "blocks.py": code})
    with pytest.raises(ModelError, match=r"blocks\.py:\d+: not Python"):
        source_files(tmp_path, tmp_path / "model.py")


def test_reading_the_sources_runs_nothing_and_imports_nothing_heavy(tmp_path):
    write(tmp_path, {"model.py": "raise SystemExit('ran')"})
    code = (
        "import sys; from pathlib import Path; from enginesmith.user_code.entry_point import source_files; "
        "source_files(Path('.'), Path('model.py')); print(sorted({'torch', 'numpy', 'onnx'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_packages_from_elsewhere_are_named_and_local_ones_and_the_standard_library_are_not(tmp_path):
    write(tmp_path, {"model.py": "import os.path, torch.nn\nimport blocks", "nets/__init__.py": "from . import head"})
    write(tmp_path, {"blocks.py": "from timm.layers import drop\nfrom nets import head", "nets/head.py": "import yaml"})
    assert imported_packages(tmp_path, tmp_path / "model.py") == ("timm", "torch", "yaml")


@pytest.mark.parametrize(
    "text", ["from " + "." * 300 + " import x", "x = " + "-" * 100_000 + "1"], ids=["dots", "depth"]
)
def test_hostile_sources_do_not_break_the_reader(tmp_path, text):
    write(tmp_path, {"model.py": text})
    with contextlib.suppress(ModelError):
        assert found(tmp_path) == {"model.py"}


def test_a_dotted_module_adds_its_packages_and_sees_only_the_specs_folder(tmp_path):
    write(
        tmp_path, {"nets/__init__.py": "import base", "nets/deep/__init__.py": "", "nets/deep/model.py": "import near"}
    )
    write(tmp_path, {"nets/deep/near.py": "", "near.py": "import timm", "base.py": ""})
    entry = tmp_path / "nets/deep/model.py"
    source_paths = {path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path, entry, "nets.deep.model")}
    assert source_paths == {"nets/__init__.py", "nets/deep/__init__.py", "nets/deep/model.py", "near.py", "base.py"}
    assert imported_packages(tmp_path, entry, "nets.deep.model") == ("timm",)
