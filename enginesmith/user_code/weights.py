"""Weights of a torch module in files: safetensors, or a state dict that `torch.save` wrote.

The latter is a pickle. It is read with `weights_only`, which makes tensors and plain containers and calls nothing else.
What else such files hold (a whole module, a checkpoint of a training loop, a TorchScript program) is refused with what
to save instead.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core.errors import ModelError
from enginesmith.core.text import join_first
from enginesmith.user_code.entry_point import reason

if TYPE_CHECKING:
    import torch

_REMEDY = "save the weights alone: torch.save(model.state_dict(), 'weights.pt')"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def read_weights(path: Path) -> dict[str, "torch.Tensor"]:
    """Tensors by name out of a .safetensors file, or any other that is a state dict of torch.

    Raises ModelError for a file that cannot be read, and for one that holds anything but tensors by name.
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
            found: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's errors and torch's share no base class
        if "TorchScript" in str(error):
            raise ModelError(f"{path} is a TorchScript program and no state dict; {_REMEDY}") from error
        if needed := _GLOBAL.search(str(error)):
            what = f"holds objects of {needed[1]}, whose code would run as they are read"
            raise ModelError(f"{path} is no plain state dict: it {what}; {_REMEDY}") from error
        raise ModelError(f"{path} cannot be read as a state dict ({reason(error)[:160]}); {_REMEDY}") from error
    if not isinstance(found, Mapping):
        raise ModelError(f"{path} holds a {type(found).__name__} and no state dict; {_REMEDY}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ModelError(_describe_other(path, found, name, value))
        if value.layout != torch.strided or value.is_quantized:
            kind = "a quantized" if value.is_quantized else "a sparse"
            raise ModelError(f"{path}: {name} is {kind} tensor; save it as a dense one of floats")
    return dict(found)


def _describe_other(path: Path, found: Mapping[object, object], name: object, value: object) -> str:
    """Why a mapping is no state dict; in a checkpoint of a training loop, which entry holds one."""
    listed = join_first([repr(key) for key in found], 5)
    inner = next((key for key, item in found.items() if isinstance(item, Mapping) and _holds_tensors(item)), None)
    if inner is not None:
        saved = f"torch.save(torch.load(PATH, weights_only=True)[{inner!r}], 'weights.pt')"
        return f"{path} is a checkpoint and no state dict: it holds {listed}; save its weights alone: {saved}"
    if not isinstance(name, str):
        return f"{path} is no state dict: its key {name!r} is no name; {_REMEDY}"
    return f"{path} is no state dict: {name!r} is a {type(value).__name__} and no tensor; {_REMEDY}"


def _holds_tensors(item: Mapping[object, object]) -> bool:
    import torch

    return bool(item) and all(isinstance(value, torch.Tensor) for value in item.values())


def weights_beside(path: Path) -> Path:
    """The file that the weights of a large ONNX model in `path` are written to."""
    return path.with_name(f"{path.name}.weights")
