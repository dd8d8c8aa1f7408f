"""Which model a cache is for: classes, tensors and threads, each named where it differs."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from enginesmith.compile_caches.recipe import CacheRecipe, CompileOptions
from enginesmith.compile_caches.warm_start import StaleCacheError, WarmStart

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = torch.nn.Linear(8, width)
    def forward(self, x):
        {comment}
        return self.fc(x){more}
"""


def model(tmp_path: Path, name: str, comment: str = "", more: str = "", **arguments: Any) -> torch.nn.Module:
    (tmp_path / f"{name}.py").write_text(NET.format(comment=comment, more=more))
    sys.path.insert(0, str(tmp_path))
    try:
        built: torch.nn.Module = import_module(name).Net(**arguments)
    finally:
        sys.path.remove(str(tmp_path))
    return built.eval()


@pytest.fixture
def warm(tmp_path: Path) -> WarmStart:
    recipe = CacheRecipe.of_model(model(tmp_path, "recipe_net_first"), CompileOptions(), "cpu")
    return WarmStart(recipe, tmp_path, 0)


@pytest.mark.filterwarnings("ignore")  # of torch about its own modules, as torch.compile imports them
def test_the_same_model_from_another_file_with_another_comment_is_taken(tmp_path: Path, warm: WarmStart) -> None:
    assert callable(warm.compile(model(tmp_path, "recipe_net_same", comment="# said otherwise")))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("source", {"more": " + 1"}, "class Net has other source"),
        ("width", {"width": 5}, r"tensor fc.bias was float32 \[4\] and is float32 \[5\] \(and 1 more\)"),
    ],
)
def test_another_model_is_refused_with_what_differs(
    tmp_path: Path, warm: WarmStart, name: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(StaleCacheError, match=f"stale: the cache was made from another model: {words}"):
        warm.compile(model(tmp_path, f"recipe_net_{name}", **change))


def test_training_mode_and_another_number_of_threads_are_refused(tmp_path: Path, warm: WarmStart) -> None:
    with pytest.raises(StaleCacheError, match=r"training mode: call model\.eval"):
        warm.compile(model(tmp_path, "recipe_net_train").train())
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(StaleCacheError, match=rf"torch has {before + 1}: torch.set_num_threads\({before}\)"):
            warm.compile(model(tmp_path, "recipe_net_threads"))
    finally:
        torch.set_num_threads(before)
