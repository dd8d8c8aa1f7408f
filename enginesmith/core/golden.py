"""Names in the file of a golden set, a safetensors file (`validation.golden`). Standard library only."""


def golden_prefix(index: int, side: str) -> str:
    """How the names of a case's tensors begin. index: of the case.  side: 'in' for inputs, 'out' for outputs."""
    return f"{index:05d}/{side}/"
