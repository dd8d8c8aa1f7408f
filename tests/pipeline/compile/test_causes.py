"""What a file of a model is called where it is told as the cause of a build."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.compile.causes import _name_file


@pytest.mark.parametrize(("place", "weights", "name"), [
    ("model.py", "w.safetensors", "entry point model.py"),
    ("w.safetensors", "w.safetensors", "weights w.safetensors"),
    ("layers.py", "w.safetensors", "module layers.py"),
    ("layers.py", None, "module layers.py"),
    ("libcube.so", None, "library libcube.so"),
])  # fmt: skip
def test_each_file_has_the_name_of_what_it_is(tmp_path: Path, place: str, weights: str | None, name: str) -> None:
    source = SimpleNamespace(kind="torch", weights=weights, libraries=[SimpleNamespace(file="libcube.so")])
    spec: Any = SimpleNamespace(source=source, source_file="model.py", folder=tmp_path, file=tmp_path.joinpath)
    assert _name_file(place, spec) == name
