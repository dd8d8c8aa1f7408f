"""Inputs of a given batch from golden groups: each real sample once before any comes again.

Tiled from one group, a batch holds the same sample at places that are a group apart, and an engine that answers one of
them with another's answer is not seen.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from enginery.core.types import Tensors, TensorSpec


def leading_dim(specs: Sequence[TensorSpec]) -> str | None:
    """The dim that all inputs have first, when it is a named one: the batch."""
    first = {spec.shape[0] if spec.shape else None for spec in specs}
    only = first.pop() if len(first) == 1 else None
    return only if isinstance(only, str) else None


def enough_samples(
    groups: Sequence[Tensors], start: int, specs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> Tensors:
    """A group of inputs, followed by those after it until it has as many samples as `sizes` asks for, or all there are.

    start: the group's index; after the last comes the first. Where no batch is asked for, or where it is the length of
    another axis too, the group alone; groups whose samples have another shape are left out.
    """
    first, batch = groups[start], leading_dim(specs)
    if batch is None or batch not in sizes or any(batch in spec.shape[1:] for spec in specs):
        return first
    taken, count, wanted = [first], _count(first, specs), sizes[batch]
    for step in range(1, len(groups)):
        if count >= wanted:
            break
        group = groups[(start + step) % len(groups)]
        if all(group[spec.name].shape[1:] == first[spec.name].shape[1:] for spec in specs):
            taken.append(group)
            count += _count(group, specs)
    if len(taken) == 1:
        return first
    return {spec.name: np.concatenate([group[spec.name] for group in taken]) for spec in specs}


def _count(group: Tensors, specs: Sequence[TensorSpec]) -> int:
    return len(group[specs[0].name])
