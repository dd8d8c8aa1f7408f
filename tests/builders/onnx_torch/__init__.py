from pathlib import Path

import torch


def to_module(path: Path) -> torch.nn.Module:
    """A model as a module, which takes a tensor for each input in their order."""
    from builders.onnx_torch.program import OnnxModule, read

    return OnnxModule(read(path)).eval()
