"""Operators that fold axes: sums, extremes, norms, running sums."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from builders.onnx_torch.table import Numbers, must, operator

# Of a tensor along some axes: the axes stay, with size 1, when the flag says so.
Fold = Callable[[Tensor, list[int], bool], Tensor]


def _summed(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keep)
    return torch.mean(x.to(torch.float64), axes, keepdim=keep).to(x.dtype)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _greatest(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return _extreme(torch.amax, x, axes, keep)


def _least(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return _extreme(torch.amin, x, axes, keep)


def _extreme(run: Callable[..., Tensor], x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Of nothing it is the type's other end, as ONNX says."""
    if not any(isinstance(x.shape[axis], int) and x.shape[axis] == 0 for axis in axes):
        return run(x, axes, keepdim=keep)
    sizes = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes]
    lowest = run is torch.amax
    if x.is_floating_point():
        return torch.full(sizes, -math.inf if lowest else math.inf, dtype=x.dtype, device=x.device)
    if x.dtype == torch.bool:
        return torch.full(sizes, not lowest, dtype=x.dtype, device=x.device)
    ends = torch.iinfo(x.dtype)
    return torch.full(sizes, ends.min if lowest else ends.max, dtype=x.dtype, device=x.device)


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.logsumexp(x, axes, keepdim=keep)


_FOLDS: dict[str, Fold] = {
    "ReduceSum": _summed,
    "ReduceMean": _mean,
    "ReduceProd": _product,
    "ReduceMax": _greatest,
    "ReduceMin": _least,
    "ReduceL1": lambda x, axes, keep: _summed(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: _root(_summed(x * x, axes, keep)),
    "ReduceSumSquare": lambda x, axes, keep: _summed(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_summed(x, axes, keep)),
    "ReduceLogSumExp": _log_sum_exp,
}


def _root(x: Tensor) -> Tensor:
    return torch.sqrt(x) if x.is_floating_point() else torch.sqrt(x.to(torch.float64)).to(x.dtype)


def _reduction(fold: Fold) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        given: Numbers | None = None,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        chosen = given if given is not None else axes
        if not chosen:
            if noop_with_empty_axes:
                return fold(x.unsqueeze(0), [0], False)  # of each element by itself
            chosen = list(range(x.dim()))
        if not chosen:  # a tensor without axes
            return fold(x.reshape(1), [0], False)
        return fold(x, [axis % x.dim() for axis in chosen], bool(keepdims))

    return run


for _name, _fold in _FOLDS.items():
    operator(_name)(_reduction(_fold))


@operator("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """The first of equals, or the last."""
    return _index_of(torch.argmax, x, axis, keepdims, select_last_index)


@operator("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """The first of equals, or the last."""
    return _index_of(torch.argmin, x, axis, keepdims, select_last_index)


def _index_of(find: Callable[..., Tensor], x: Tensor, axis: int, keepdims: int, last: int) -> Tensor:
    if not last:
        return find(x, axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - find(torch.flip(x, [axis]), axis, keepdim=bool(keepdims))


@operator("CumSum")
def cum_sum(x: Tensor, axis: Numbers, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running sums; `exclusive` leaves an element out of its own."""
    (along,) = axis
    x = torch.flip(x, [along]) if reverse else x
    sums = torch.cumsum(x, along, dtype=x.dtype)
    sums = sums - x if exclusive and not x.is_floating_point() else sums
    if exclusive and x.is_floating_point():  # a difference would round
        sums = torch.cat([torch.zeros_like(sums.narrow(along, 0, 1)), sums.narrow(along, 0, x.shape[along] - 1)], along)
    return torch.flip(sums, [along]) if reverse else sums


@operator("CumProd")
def cum_prod(x: Tensor, axis: Numbers, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Running products; `exclusive` leaves an element out of its own."""
    (along,) = axis
    x = torch.flip(x, [along]) if reverse else x
    made = torch.cumprod(x, along, dtype=x.dtype)
    if exclusive:
        made = torch.cat([torch.ones_like(made.narrow(along, 0, 1)), made.narrow(along, 0, x.shape[along] - 1)], along)
    return torch.flip(made, [along]) if reverse else made


@operator("Hardmax")
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """One at the first greatest element, zero elsewhere."""
    best = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, 1.0)


@operator("TopK")
def top_k(x: Tensor, k: Numbers, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, ...]:  # noqa: A002
    """Values and indices; of equals the lower index first, which torch.topk does not promise."""
    del sorted
    must(len(k) == 1, f"k has {len(k)} numbers; it takes one")
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k[0]), indices.narrow(axis, 0, k[0])
