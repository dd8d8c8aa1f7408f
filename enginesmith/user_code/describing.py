"""Facts that a PyTorch model states about its inputs, for a first spec: a `.pt2` program states all, a module some.

For a module, an example in its file is the best source (`example_inputs`, `samples`); else its first layer. Facts
without a source stay unknown.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.core.errors import ModelError
from enginesmith.user_code.entry_point import call_entry_point, reason

if TYPE_CHECKING:
    import torch

# Functions beside an entry point that return or yield inputs: a dict by name, the arguments in order, one tensor.
EXAMPLES = ("example_inputs", "samples")
# Parts of the names of ATen's operators with weights, which float16 makes smaller.
_HEAVY = ("conv", "linear", "addmm", "matmul", "mm.", "bmm", "attention", "lstm", "gru")


@dataclass(frozen=True)
class SeenInput:
    """An input. dtype: '' if unknown.  shape: a dynamic axis is '?', or has a name that equal axes share; None if
    unknown.  why: the source.  any_rank: whether the layer that is the source accepts more axes too."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None
    why: str
    any_rank: bool = False


@dataclass(frozen=True)
class SeenModel:
    """The known facts about a model. outputs: () if they are unknown without a run.  ranges: smallest and largest size
    of named axes, None for no end.  is_heavy: whether it multiplies with weights.  notes: for people."""

    inputs: tuple[SeenInput, ...]
    outputs: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    is_heavy: bool = True
    notes: tuple[str, ...] = ()


def describe_program(exported: "torch.export.ExportedProgram", outputs: Sequence[str]) -> SeenModel:
    """Inputs of a captured program. Raises ModelError for inputs that are not tensors."""
    input_names, ranges = set(exported.graph_signature.user_inputs), dict[str, tuple[int, int | None]]()
    inputs = []
    for node in exported.graph.nodes:
        if node.op != "placeholder" or node.name not in input_names:
            continue
        value = node.meta.get("val")
        if not hasattr(value, "dtype"):
            raise ModelError(f"input {node.name!r} is {value!r} and not a tensor; export the program with tensors only")
        shape = tuple(size if isinstance(size, int) else _axis(size, exported, ranges) for size in value.shape)
        inputs.append(SeenInput(node.name, str(value.dtype).removeprefix("torch."), shape, "the program"))
    operator_names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    is_heavy = any(keyword in name for name in operator_names for keyword in _HEAVY)
    return SeenModel(tuple(inputs), tuple(outputs), ranges, is_heavy)


def _axis(size: Any, exported: "torch.export.ExportedProgram", ranges: dict[str, tuple[int, int | None]]) -> str:
    """The name of a dynamic axis, whose range is added to `ranges`; '?' for one whose size is computed from others."""
    symbol = size.node.expr
    if not symbol.is_symbol:
        return "?"
    name = str(symbol)
    if (value_range := exported.range_constraints.get(symbol)) is not None:
        # The largest size may be infinity, or a number that represents it.
        is_bounded = value_range.upper.is_finite and value_range.upper < sys.maxsize - 1
        ranges[name] = int(value_range.lower), int(value_range.upper) if is_bounded else None
    return name


def describe_module(
    module: "torch.nn.Module", root: Path, entry: tuple[str, str], requests: Collection[str] = ()
) -> SeenModel:
    """Facts that a module and its file state. entry: the file below `root`, and its dotted name or ''.

    requests: names of the inputs in recorded requests.

    Raises ModelError if the function with an example fails.
    """
    import torch

    heavy_classes = (torch.nn.Linear, torch.nn.Embedding, torch.nn.RNNBase, torch.nn.MultiheadAttention)
    is_heavy = any(isinstance(layer, heavy_classes) or "Conv" in type(layer).__name__ for layer in module.modules())
    parameters = inspect.signature(module.forward).parameters.values()
    parameter_names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required_names = [p.name for p in parameters if p.name in parameter_names and p.default is p.empty]
    if not parameter_names:
        raise ModelError(f"{entry[0]}: the model is called as forward() without named inputs; give its inputs names")
    example = _find_example(root, entry, parameter_names)
    if example is not None:
        name, tensors = example
        # If all have one leading size, it is the batch; several sizes are constants.
        is_batched = len({value.shape[0] for value in tensors.values() if value.ndim}) == 1
        inputs = tuple(
            SeenInput(
                key,
                str(value.dtype).removeprefix("torch."),
                ("batch", *value.shape[1:]) if is_batched and value.ndim else tuple(value.shape),
                f"{name}()",
            )
            for key, value in tensors.items()
        )
        return SeenModel(inputs, is_heavy=is_heavy)
    required_names = [name for name in parameter_names if name in required_names or name in requests]
    optional_names = (
        [name for name in parameter_names if name not in required_names] if required_names else parameter_names[1:]
    )
    notes = (
        (f"inputs that forward() has defaults for are left out: {', '.join(optional_names)}",) if optional_names else ()
    )
    dtype, shape, origin = _first_layer(module)
    # One layer describes one input. Only token ids, their mask and their types are alike.
    if len(required_names) > 1 and dtype != "int64":
        dtype, shape, origin = "", None, "there are several inputs, and no layer says which of them it takes"
    is_any_rank = origin.endswith((": Linear", ": LayerNorm"))
    inputs = tuple(SeenInput(name, dtype, shape, origin, is_any_rank) for name in required_names or parameter_names[:1])
    return SeenModel(inputs, is_heavy=is_heavy, notes=notes)


def _find_example(
    root: Path, entry: tuple[str, str], input_names: Sequence[str]
) -> tuple[str, dict[str, "torch.Tensor"]] | None:
    """The function that returns an example, and its tensors by input; None if there is none."""
    file, module = entry
    loaded_module = sys.modules.get(module or Path(file).stem)
    name = next((name for name in EXAMPLES if callable(getattr(loaded_module, name, None))), None)
    if name is None:
        return None
    example = call_entry_point(root, file, name, {}, module)
    try:
        return name, _by_name(next(example) if isinstance(example, Iterator) else example, input_names)
    except Exception as error:
        remedy = f"give a dict of tensors by name, or a tuple in the order of {', '.join(input_names)}"
        raise ModelError(f"{root / file}: {name}() gives no inputs: {reason(error)}; {remedy}") from error


def _by_name(example: object, input_names: Sequence[str]) -> dict[str, "torch.Tensor"]:
    """The tensors of an example by input. Raises TypeError, ValueError or RuntimeError if it has none."""
    import torch

    if isinstance(example, Mapping):
        tensors = {str(name): torch.as_tensor(value) for name, value in example.items()}
    else:
        values = example if isinstance(example, list | tuple) else [example]
        if len(values) > len(input_names):
            raise ValueError(f"{len(values)} values")
        tensors = {name: torch.as_tensor(value) for name, value in zip(input_names, values, strict=False)}
    if not tensors:
        raise ValueError("no tensors")
    if unknown_names := [name for name in tensors if name not in input_names]:
        raise ValueError(f"unknown names {', '.join(unknown_names)}")
    return tensors


def _first_layer(module: "torch.nn.Module") -> tuple[str, tuple[int | str, ...] | None, str]:
    """The dtype and shape of a module's input, from the first layer that determines them, and this layer's name."""
    import torch

    nn = torch.nn
    layer_shapes: list[tuple[type[nn.Module], Callable[[Any], tuple[int | str, ...]]]] = [
        (nn.Linear, lambda layer: ("batch", layer.in_features)),
        (nn.Conv1d, lambda layer: ("batch", layer.in_channels, "length")),
        (nn.Conv2d, lambda layer: ("batch", layer.in_channels, "height", "width")),
        (nn.Conv3d, lambda layer: ("batch", layer.in_channels, "depth", "height", "width")),
        (nn.RNNBase, lambda layer: (*(("length", "batch")[:: -1 if layer.batch_first else 1]), layer.input_size)),
        (nn.BatchNorm1d, lambda layer: ("batch", layer.num_features)),
        (nn.BatchNorm2d, lambda layer: ("batch", layer.num_features, "height", "width")),
        (nn.LayerNorm, lambda layer: ("batch", *layer.normalized_shape)),
        (nn.Embedding, lambda _: ("batch", "length")),
    ]
    for name, layer in module.named_modules():
        for layer_class, shape in layer_shapes:
            if isinstance(layer, layer_class):
                weight = next(layer.parameters(), torch.empty(0))
                dtype = "int64" if layer_class is nn.Embedding else str(weight.dtype).removeprefix("torch.")
                return dtype, shape(layer), f"its first layer, {name or 'the module'}: {layer_class.__name__}"
    return "", None, "no layer says what it takes"
