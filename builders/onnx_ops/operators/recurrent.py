"""Recurrent layers: LSTM, GRU and RNN, whose steps are a loop of the library (`xp.scan`).

What the attributes and inputs mean where onnxruntime and ONNX's text leave room: a sequence that has ended keeps its
last state and gives zeros. Refused: peepholes, clip, coupled gates, activations with parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from builders.onnx_ops.library import Array, ArrayLibrary
from builders.onnx_ops.table import must, operator

State = tuple[Array, ...]
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu", "Softplus": "softplus", "Softsign": "softsign"}


@dataclass(frozen=True)
class Recurrence:
    """Of one direction: weight [gates * hidden, hidden], bias [gates * hidden], and its activations."""

    xp: ArrayLibrary
    weight: Array
    bias: Array | None
    activations: Sequence[Callable[[Array], Array]]

    def add(self, given: Array, state: Array, first: int = 0, last: int | None = None) -> list[Array]:
        """given + state @ weight^T + bias of the gates first..last, each [batch, hidden]; given: [batch, gates..]."""
        hidden = int(self.weight.shape[1])
        rows = slice(first * hidden, None if last is None else last * hidden)
        made = given[:, rows] + self.xp.matmul(state, self.weight[rows].T)
        made = made if self.bias is None else made + self.bias[rows]
        return [made[:, start : start + hidden] for start in range(0, int(made.shape[1]), hidden)]


# What the input adds to the gates [batch, gates * hidden], the state before -> the state after, the output first.
Cell = Callable[[Recurrence, Array, State], State]


def _lstm(layer: Recurrence, given: Array, state: State) -> State:
    gate, candidate, shown = layer.activations
    enter, leave, keep, new = layer.add(given, state[0])
    cell = gate(keep) * state[1] + gate(enter) * candidate(new)
    return gate(leave) * shown(cell), cell


def _gru(layer: Recurrence, given: Array, state: State, reset_after: bool) -> State:
    gate, candidate = layer.activations
    update, reset = map(gate, layer.add(given, state[0], 0, 2))
    if reset_after:
        (recurrent,) = layer.add(layer.xp.zeros_like(given), state[0], 2)
        new = candidate(given[:, -recurrent.shape[1] :] + reset * recurrent)
    else:
        new = candidate(layer.add(given, reset * state[0], 2)[0])
    return ((1 - update) * new + update * state[0],)


def _rnn(layer: Recurrence, given: Array, state: State) -> State:
    return (layer.activations[0](layer.add(given, state[0])[0]),)


def _run(
    xp: ArrayLibrary, cell: Cell, usual: Sequence[str], activations: list[str] | None,
    x: Array, weight: Array, recurrence: Array, bias: Array | None, lengths: Array | None,
    starts: Sequence[Array | None], direction: str, layout: int,
) -> tuple[Array, ...]:  # fmt: skip
    """ONNX's outputs: of all steps, and the last of each state."""
    must(direction in ("forward", "reverse", "bidirectional"), f"direction {direction!r} is none of ONNX's")
    if layout:
        x, starts = (
            xp.permute(x, (1, 0, 2)),
            [start if start is None else xp.permute(start, (1, 0, 2)) for start in starts],
        )
    functions = _functions(xp, activations or [*usual] * int(weight.shape[0]))
    outputs, ends = [], []
    for at in range(int(weight.shape[0])):
        half = 0 if bias is None else int(bias.shape[1]) // 2
        given = xp.matmul(x, weight[at].T)
        given = given if bias is None else given + bias[at][:half]
        chosen = functions[at * len(usual) : (at + 1) * len(usual)]
        layer = Recurrence(xp, recurrence[at], None if bias is None else bias[at][half:], chosen)
        zeros = xp.zeros((x.shape[1], recurrence.shape[2]), dtype=x.dtype)
        start = tuple(zeros if state is None else state[at] for state in starts)
        backwards = direction == "reverse" or at == 1
        made, end = _one_way(xp, partial(cell, layer), given, start, lengths, backwards)
        outputs.append(made)
        ends.append(end)
    every = xp.stack(outputs, 1), *(xp.stack(states, 0) for states in zip(*ends, strict=True))
    if not layout:
        return every
    return xp.permute(every[0], (2, 0, 1, 3)), *(xp.permute(state, (1, 0, 2)) for state in every[1:])


def _one_way(
    xp: ArrayLibrary, cell: Callable[[Array, State], State], given: Array, start: State, lengths: Array | None,
    backwards: bool,
) -> tuple[Array, State]:  # fmt: skip
    """Outputs [time, batch, hidden] and last states [batch, hidden] of one direction."""
    steps = [given]
    if lengths is not None:
        steps.append(xp.unsqueeze(xp.unsqueeze(xp.arange(given.shape[0]), 1) < xp.unsqueeze(lengths, 0), 2))

    def step(state: State, now: Sequence[Array]) -> tuple[State, Array]:
        new = cell(now[0], state)
        if len(now) == 1:
            return new, new[0]
        kept = tuple(xp.where(now[1], after, before) for after, before in zip(new, state, strict=True))
        return kept, xp.where(now[1], new[0], xp.zeros_like(new[0]))

    end, outputs = xp.scan(step, start, tuple(xp.flip(each, (0,)) for each in steps) if backwards else tuple(steps))
    return (xp.flip(outputs, (0,)) if backwards else outputs), end


def _functions(xp: ArrayLibrary, names: Sequence[str]) -> list[Callable[[Array], Array]]:
    for name in names:
        must(name in _ACTIVATIONS, f"activation {name!r} is not one of {', '.join(_ACTIVATIONS)}; use onnxruntime")
    return [getattr(xp, _ACTIVATIONS[name]) for name in names]


def _refuse(**given: object) -> None:
    for name, value in given.items():
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
    starts, usual = (initial_h, initial_c), ("Sigmoid", "Tanh", "Tanh")
    return _run(xp, _lstm, usual, activations, x, weight, recurrence, bias, sequence_lens, starts, direction, layout)


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
    cell, usual = partial(_gru, reset_after=bool(linear_before_reset)), ("Sigmoid", "Tanh")
    starts = (initial_h,)
    return _run(xp, cell, usual, activations, x, weight, recurrence, bias, sequence_lens, starts, direction, layout)


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
    starts = (initial_h,)
    return _run(xp, _rnn, ("Tanh",), activations, x, weight, recurrence, bias, sequence_lens, starts, direction, layout)
