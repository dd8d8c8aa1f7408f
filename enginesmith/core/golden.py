"""Tensor names in the file of a golden set, a safetensors file (`validation.golden`). Standard library only."""


def golden_prefix(index: int, side: str) -> str:
    """The prefix of a case's tensor names. index: the case's index.  side: 'in' for inputs, 'out' for outputs."""
    return f"{index:05d}/{side}/"
