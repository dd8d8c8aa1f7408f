"""Inputs of a batch size from groups of golden samples; each sample is used once before any is repeated.

A batch tiled from one group would hold each sample several times, and an engine that swaps the outputs of two equal
samples would pass.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from enginesmith.core.types import Tensors, TensorSpec


def leading_dim(specs: Sequence[TensorSpec]) -> str | None:
    """The named dim that all inputs have as their first axis, the batch; None without one."""
    leading_dims = {spec.shape[0] if spec.shape else None for spec in specs}
    dim = leading_dims.pop() if len(leading_dims) == 1 else None
    return dim if isinstance(dim, str) else None


def enough_samples(
    groups: Sequence[Tensors], start: int, specs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> Tensors:
    """The inputs of group `start` and of the groups after it, up to the batch size in `sizes`.

    The first group follows the last. All groups together may have fewer samples. Only one group is used if `sizes`
    lacks the batch dim, or if that dim is another axis too. Groups whose samples have another shape are left out. If an
    input of group `start` is empty (a state of a first step can be), the next group without an empty input replaces it.
    """
    order = ((start + step) % len(groups) for step in range(len(groups)))
    start = next((index for index in order if all(array.size for array in groups[index].values())), start)
    first_group, batch = groups[start], leading_dim(specs)
    if batch is None or batch not in sizes or any(batch in spec.shape[1:] for spec in specs):
        return first_group
    name = specs[0].name
    batch_groups, count, batch_size = [first_group], len(first_group[name]), sizes[batch]
    for step in range(1, len(groups)):
        if count >= batch_size:
            break
        group = groups[(start + step) % len(groups)]
        if all(group[spec.name].shape[1:] == first_group[spec.name].shape[1:] for spec in specs):
            batch_groups.append(group)
            count += len(group[name])
    if len(batch_groups) == 1:
        return first_group
    return {spec.name: np.concatenate([group[spec.name] for group in batch_groups]) for spec in specs}
