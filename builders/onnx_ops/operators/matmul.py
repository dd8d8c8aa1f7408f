"""Operators that multiply and add: MatMul and Gemm, convolutions and pooling, recurrent layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from builders.onnx_ops.table import Array, ArrayLibrary, must, operator


@operator("MatMul")
def matmul(xp: ArrayLibrary, a: Array, b: Array) -> Array:
    """a @ b."""
    return xp.matmul(a, b)


@operator("Gemm")
def gemm(
    xp: ArrayLibrary, a: Array, b: Array, c: Array | None = None,
    *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,  # noqa: N803 - ONNX's names
) -> Array:  # fmt: skip
    """alpha * a @ b + beta * c; without factors as a linear layer, for which compilers have the best kernels."""
    a = a.T if transA else a
    if alpha == 1 and beta == 1 and (c is None or c.ndim == 1) and xp.is_floating(a):
        return xp.linear(a, b if transB else b.T, c)
    product = xp.matmul(a, b.T if transB else b)
    product = product if alpha == 1 else xp.astype(alpha * product, a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else xp.astype(beta * c, a.dtype))


@operator("Einsum")
def einsum(xp: ArrayLibrary, *xs: Array, equation: str) -> Array:
    """The library's einsum."""
    return xp.einsum(equation.replace(" ", ""), *xs)


@operator("MatMulInteger")
def matmul_integer(
    xp: ArrayLibrary, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None
) -> Array:
    """The product of 8-bit integers less their zero points, in int32."""
    return integer_product(xp, subtract_zero_point(xp, a, a_zero, -2), subtract_zero_point(xp, b, b_zero, -1))


def subtract_zero_point(xp: ArrayLibrary, x: Array, zero: Array | None, axis: int) -> Array:
    """x - zero in int32; a zero point per row (axis -2) or per column (-1) is laid along that axis."""
    integers = xp.astype(x, xp.int32)
    if zero is None:
        return integers
    zero = xp.astype(zero, xp.int32)
    return integers - (xp.unsqueeze(zero, -1) if zero.ndim == 1 and axis == -2 and zero.shape[0] != 1 else zero)


def integer_product(xp: ArrayLibrary, a: Array, b: Array) -> Array:
    """a @ b of differences of 8-bit integers, in int32; computed in a type in which these sums are exact."""
    wide_dtype = xp.exact_dtype(a.shape[-1])
    return xp.astype(xp.matmul(xp.astype(a, wide_dtype), xp.astype(b, wide_dtype)), xp.int32)


# Recurrent layers: LSTM, GRU and RNN, whose steps are a loop of the library (`xp.scan`).
#
# What the attributes and inputs mean where onnxruntime and ONNX's text leave room: a sequence that has ended keeps its
# last state and gives zeros. Refused: peepholes, clip, coupled gates, activations with parameters.

State = tuple[Array, ...]
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu", "Softplus": "softplus", "Softsign": "softsign"}


@dataclass(frozen=True)
class Recurrence:
    """Of one direction: weight [gates * hidden, hidden], bias [gates * hidden], and its activations."""

    xp: ArrayLibrary
    weight: Array
    bias: Array | None
    activations: Sequence[Callable[[Array], Array]]

    def add(self, gate_inputs: Array, state: Array, first_gate: int = 0, last_gate: int | None = None) -> list[Array]:
        """gate_inputs [batch, gates..] + state @ weight^T + bias of the gates first..last, each [batch, hidden]."""
        hidden_size = int(self.weight.shape[1])
        rows = slice(first_gate * hidden_size, None if last_gate is None else last_gate * hidden_size)
        gate_sums = gate_inputs[:, rows] + self.xp.matmul(state, self.weight[rows].T)
        gate_sums = gate_sums if self.bias is None else gate_sums + self.bias[rows]
        return [gate_sums[:, start : start + hidden_size] for start in range(0, int(gate_sums.shape[1]), hidden_size)]


# The input's part of the gates [batch, gates * hidden], the old state -> the new state, with the output first.
Cell = Callable[[Recurrence, Array, State], State]


def _lstm(layer: Recurrence, gate_inputs: Array, state: State) -> State:
    gate, candidate, cell_activation = layer.activations
    input_gate, output_gate, forget_gate, cell_input = layer.add(gate_inputs, state[0])
    cell = gate(forget_gate) * state[1] + gate(input_gate) * candidate(cell_input)
    return gate(output_gate) * cell_activation(cell), cell


def _gru(layer: Recurrence, gate_inputs: Array, state: State, reset_after: bool) -> State:
    gate, candidate = layer.activations
    update_gate, reset_gate = map(gate, layer.add(gate_inputs, state[0], 0, 2))
    if reset_after:
        (recurrent_sum,) = layer.add(layer.xp.zeros_like(gate_inputs), state[0], 2)
        candidate_state = candidate(gate_inputs[:, -recurrent_sum.shape[1] :] + reset_gate * recurrent_sum)
    else:
        candidate_state = candidate(layer.add(gate_inputs, reset_gate * state[0], 2)[0])
    return ((1 - update_gate) * candidate_state + update_gate * state[0],)


def _rnn(layer: Recurrence, gate_inputs: Array, state: State) -> State:
    return (layer.activations[0](layer.add(gate_inputs, state[0])[0]),)


def _run(
    xp: ArrayLibrary, cell: Cell, usual: Sequence[str], activations: list[str] | None,
    x: Array, weight: Array, recurrence: Array, bias: Array | None, lengths: Array | None,
    starts: Sequence[Array | None], direction: str, layout: int,
) -> tuple[Array, ...]:  # fmt: skip
    """ONNX's outputs: of all steps, and the last of each state."""
    must(direction in ("forward", "reverse", "bidirectional"), f"direction {direction!r} is not one of ONNX's")
    if layout:
        x = xp.permute(x, (1, 0, 2))
        starts = [start if start is None else xp.permute(start, (1, 0, 2)) for start in starts]
    functions = _functions(xp, activations or [*usual] * int(weight.shape[0]))
    outputs, final_states = [], []
    for index in range(int(weight.shape[0])):
        half_size = 0 if bias is None else int(bias.shape[1]) // 2
        gate_inputs = xp.matmul(x, weight[index].T)
        gate_inputs = gate_inputs if bias is None else gate_inputs + bias[index][:half_size]
        cell_activations = functions[index * len(usual) : (index + 1) * len(usual)]
        layer = Recurrence(xp, recurrence[index], None if bias is None else bias[index][half_size:], cell_activations)
        zeros = xp.zeros((x.shape[1], recurrence.shape[2]), dtype=x.dtype)
        start = tuple(zeros if state is None else state[index] for state in starts)
        is_backward = direction == "reverse" or index == 1
        hidden_states, end = _one_way(xp, partial(cell, layer), gate_inputs, start, lengths, is_backward)
        outputs.append(hidden_states)
        final_states.append(end)
    results = xp.stack(outputs, 1), *(xp.stack(states, 0) for states in zip(*final_states, strict=True))
    if not layout:
        return results
    return xp.permute(results[0], (2, 0, 1, 3)), *(xp.permute(state, (1, 0, 2)) for state in results[1:])


def _one_way(
    xp: ArrayLibrary, cell: Callable[[Array, State], State], gate_inputs: Array, start: State, lengths: Array | None,
    backwards: bool,
) -> tuple[Array, State]:  # fmt: skip
    """Outputs [time, batch, hidden] and last states [batch, hidden] of one direction."""
    steps = [gate_inputs]
    if lengths is not None:
        steps.append(xp.unsqueeze(xp.unsqueeze(xp.arange(gate_inputs.shape[0]), 1) < xp.unsqueeze(lengths, 0), 2))

    def step(state: State, now: Sequence[Array]) -> tuple[State, Array]:
        new_states = cell(now[0], state)
        if len(now) == 1:
            return new_states, new_states[0]
        next_state = tuple(
            xp.where(now[1], new_state, old_state) for new_state, old_state in zip(new_states, state, strict=True)
        )
        return next_state, xp.where(now[1], new_states[0], xp.zeros_like(new_states[0]))

    end, outputs = xp.scan(step, start, tuple(xp.flip(array, (0,)) for array in steps) if backwards else tuple(steps))
    return (xp.flip(outputs, (0,)) if backwards else outputs), end


def _functions(xp: ArrayLibrary, names: Sequence[str]) -> list[Callable[[Array], Array]]:
    for name in names:
        must(name in _ACTIVATIONS, f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}; use onnxruntime")
    return [getattr(xp, _ACTIVATIONS[name]) for name in names]


def _refuse(**options: object) -> None:
    for name, value in options.items():
        must(
            value is None or value == 0,
            f"{name} is not supported here; use onnxruntime, or export the layer without it",
        )


@operator("LSTM")
def lstm(
    xp: ArrayLibrary, x: Array, weight: Array, recurrence: Array, bias: Array | None = None,
    sequence_lens: Array | None = None, initial_h: Array | None = None, initial_c: Array | None = None,
    peepholes: Array | None = None,
    *, activations: list[str] | None = None, clip: float | None = None, direction: str = "forward",
    hidden_size: int = 0, input_forget: int = 0, layout: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    """Long short-term memory, gates in the order input, output, forget, cell."""
    del hidden_size
    must(peepholes is None, "peepholes are not supported here; use onnxruntime, or export the layer without them")
    _refuse(clip=clip, input_forget=input_forget)
    states, defaults = (initial_h, initial_c), ("Sigmoid", "Tanh", "Tanh")
    return _run(xp, _lstm, defaults, activations, x, weight, recurrence, bias, sequence_lens, states, direction, layout)


@operator("GRU")
def gru(
    xp: ArrayLibrary, x: Array, weight: Array, recurrence: Array, bias: Array | None = None,
    sequence_lens: Array | None = None, initial_h: Array | None = None,
    *, activations: list[str] | None = None, clip: float | None = None, direction: str = "forward",
    hidden_size: int = 0, layout: int = 0, linear_before_reset: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    """Gated recurrent unit, gates in the order update, reset, hidden."""
    del hidden_size
    _refuse(clip=clip)
    cell, defaults = partial(_gru, reset_after=bool(linear_before_reset)), ("Sigmoid", "Tanh")
    states = (initial_h,)
    return _run(xp, cell, defaults, activations, x, weight, recurrence, bias, sequence_lens, states, direction, layout)


@operator("RNN")
def rnn(
    xp: ArrayLibrary, x: Array, weight: Array, recurrence: Array, bias: Array | None = None,
    sequence_lens: Array | None = None, initial_h: Array | None = None,
    *, activations: list[str] | None = None, clip: float | None = None, direction: str = "forward",
    hidden_size: int = 0, layout: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    """A plain recurrent layer."""
    del hidden_size
    _refuse(clip=clip)
    states = (initial_h,)
    return _run(xp, _rnn, ("Tanh",), activations, x, weight, recurrence, bias, sequence_lens, states, direction, layout)


Sizes = list[Any]


def _pads(
    xp: ArrayLibrary, x: Array, kernel: Sizes, strides: Sizes, dilations: Sizes, pads: Sizes | None, auto_pad: str
) -> tuple[Sizes, Sizes]:
    """How much is added before and after each spatial axis, in elements."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        pad_sizes = pads or [0] * 2 * rank
        return pad_sizes[:rank], pad_sizes[rank:]
    if auto_pad == "VALID":
        return [0] * rank, [0] * rank
    must(auto_pad in ("SAME_UPPER", "SAME_LOWER"), f"auto_pad {auto_pad!r} is not one of ONNX's; write the pads out")
    small_pads, large_pads = [], []
    for size, width, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        needed_size = (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1
        total = xp.sym_max(needed_size - size, 0)
        small_pads.append(total // 2)
        large_pads.append(total - total // 2)
    return (small_pads, large_pads) if auto_pad == "SAME_UPPER" else (large_pads, small_pads)


@operator("Conv")
def conv(
    xp: ArrayLibrary, x: Array, weight: Array, bias: Array | None = None,
    *, auto_pad: str = "NOTSET", dilations: Sizes | None = None, group: int = 1, kernel_shape: Sizes | None = None,
    pads: Sizes | None = None, strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The library's convolution, with pads that may differ before and after."""
    ones = [1] * (x.ndim - 2)
    dilations, strides = dilations or ones, strides or ones
    low, high = _pads(xp, x, kernel_shape or list(weight.shape[2:]), strides, dilations, pads, auto_pad)
    return xp.conv(x, weight, bias, strides, low, high, dilations, group)


@operator("ConvTranspose")
def conv_transpose(
    xp: ArrayLibrary, x: Array, weight: Array, bias: Array | None = None,
    *, auto_pad: str = "NOTSET", dilations: Sizes | None = None, group: int = 1, kernel_shape: Sizes | None = None,
    output_padding: Sizes | None = None, output_shape: Sizes | None = None, pads: Sizes | None = None,
    strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The library's transposed convolution with the pads cut off; zeros are added where `output_shape` is larger."""
    ones = [1] * (x.ndim - 2)
    dilations, strides, extra_sizes = dilations or ones, strides or ones, output_padding or [0] * len(ones)
    full_sizes = [
        stride * (size - 1) + extra_size + (width - 1) * dilation + 1
        for size, stride, extra_size, width, dilation in zip(
            x.shape[2:], strides, extra_sizes, kernel_shape or weight.shape[2:], dilations, strict=True
        )
    ]
    low, high = _cuts(full_sizes, x, strides, pads, auto_pad, output_shape)
    return xp.conv_transpose(x, weight, bias, strides, low, high, extra_sizes, dilations, group)


def _cuts(
    full: Sizes, x: Array, strides: Sizes, pads: Sizes | None, auto_pad: str, shape: Sizes | None
) -> tuple[Sizes, Sizes]:
    rank = len(full)
    if auto_pad in ("NOTSET", "") and not shape:
        pad_sizes = pads or [0] * 2 * rank
        return pad_sizes[:rank], pad_sizes[rank:]
    if auto_pad == "VALID" and not shape:
        return [0] * rank, [0] * rank
    target_sizes = (
        shape[-rank:] if shape else [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    )
    low_pads, high_pads = [], []
    for full_size, target_size in zip(full, target_sizes, strict=True):
        total = full_size - target_size
        low_cut = max(total, 0) // 2
        low, high = (low_cut, total - low_cut) if auto_pad == "SAME_UPPER" or total < 0 else (total - low_cut, low_cut)
        low_pads.append(low)
        high_pads.append(high)
    return low_pads, high_pads


def _geometry(
    xp: ArrayLibrary, x: Array, kernel: Sizes, strides: Sizes | None, dilations: Sizes | None, pads: Sizes | None,
    auto_pad: str, ceil_mode: int,
) -> tuple[Sizes, Sizes, Sizes, Sizes]:  # fmt: skip
    """Strides, dilations, and the pads before and after; those after grow so that the last window of `ceil_mode` fits.

    A window that would begin in the padding after the input is left out.
    """
    ones = [1] * len(kernel)
    strides, dilations = strides or ones, dilations or ones
    low, high = _pads(xp, x, kernel, strides, dilations, pads, auto_pad)
    if ceil_mode:
        high = [
            _pad_to_window(size + low_pad, high_pad, (width - 1) * dilation + 1, stride)
            for size, width, stride, dilation, low_pad, high_pad in zip(
                x.shape[2:], kernel, strides, dilations, low, high, strict=True
            )
        ]
    return strides, dilations, low, high


def _pad_to_window(size: Any, after: Any, reach: int, stride: int) -> Any:
    """The pad after an axis with which the last window ends at the end of the padding.  size: of the axis with the pad
    before."""
    count = -(-(size + after - reach) // stride) + 1
    if (count - 1) * stride >= size:
        count -= 1
    return (count - 1) * stride + reach - size


@operator("MaxPool")
def max_pool(
    xp: ArrayLibrary, x: Array,
    *, kernel_shape: Sizes, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Sizes | None = None,
    pads: Sizes | None = None, storage_order: int = 0, strides: Sizes | None = None, outputs: int,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """The greatest of each window, and for `outputs` 2 also the indices in the flat array."""
    strides, dilations, low, high = _geometry(xp, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if outputs == 1:
        return xp.max_pool(x, kernel_shape, strides, low, _drop_negative(high), dilations)
    must(not storage_order, "it counts its indices by columns (storage_order 1); count them by rows")
    must(low == high and not ceil_mode, "it gives indices with uneven pads or ceil_mode; pad evenly")
    return xp.max_pool_indices(x, kernel_shape, strides, low, dilations)


def _drop_negative(after: Sizes) -> Sizes:
    """The pads, 0 for negative ones: those of `ceil_mode` are elements that no window reaches."""
    return [max(width, 0) if isinstance(width, int) else width for width in after]


@operator("AveragePool")
def average_pool(
    xp: ArrayLibrary, x: Array,
    *, kernel_shape: Sizes, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Sizes | None = None, pads: Sizes | None = None, strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The mean of each window over elements of x, with `count_include_pad` over pads too (not `ceil_mode`'s)."""
    ones = [1] * len(kernel_shape)
    plain_pads = _pads(xp, x, kernel_shape, strides or ones, dilations or ones, pads, auto_pad)
    strides, dilations, low, high = _geometry(xp, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    if low == high and not ceil_mode and dilations == ones:
        return xp.avg_pool(x, kernel_shape, strides, low, bool(count_include_pad))
    ones_mask = xp.ones_like(x)
    if count_include_pad:
        counted_pads = [
            min(high_pad, width) if ceil_mode else width for high_pad, width in zip(high, plain_pads[1], strict=True)
        ]
        ones_mask = xp.pad_axes(ones_mask, _widths(plain_pads[0], counted_pads), 1)
        rest_pads = [high_pad - width for high_pad, width in zip(high, counted_pads, strict=True)]
        ones_mask = xp.pad_axes(ones_mask, _widths([0] * len(rest_pads), rest_pads), 0)
    else:
        ones_mask = xp.pad_axes(ones_mask, _widths(low, _drop_negative(high)), 0)
    zeros = [0] * len(ones)
    x = xp.pad_axes(x, _widths(low, _drop_negative(high)), 0)
    sums, counts = (xp.window_sums(array, kernel_shape, strides, zeros, zeros, dilations) for array in (x, ones_mask))
    return sums / counts


def _widths(before: Sizes, after: Sizes) -> list[tuple[Any, Any]]:
    """(before, after) of all axes: none of samples and channels."""
    return [(0, 0), (0, 0), *zip(before, after, strict=True)]


@operator("LpPool")
def lp_pool(
    xp: ArrayLibrary, x: Array,
    *, kernel_shape: Sizes, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Sizes | None = None, p: int = 2,
    pads: Sizes | None = None, strides: Sizes | None = None,
) -> Array:  # fmt: skip
    """The p-norm of each window."""
    strides, dilations, low, high = _geometry(xp, x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return xp.window_sums(xp.abs(x) ** p, kernel_shape, strides, low, _drop_negative(high), dilations) ** (1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(xp: ArrayLibrary, x: Array) -> Array:
    """The mean of each channel."""
    return xp.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalMaxPool")
def global_max_pool(xp: ArrayLibrary, x: Array) -> Array:
    """The greatest of each channel."""
    return xp.amax(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalLpPool")
def global_lp_pool(xp: ArrayLibrary, x: Array, *, p: int = 2) -> Array:
    """The norm of each channel."""
    return xp.sum(xp.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1.0 / p)
