"""Models from PyTorch: an entry point in a Python file, or a program saved by `torch.export.save`.

Both become a `Program`: the captured graph, and a way to run the original on numpy arrays. All functions here run the
user's code (a `.pt2` file may contain pickles, which are code as well), so they need their own process.
"""

import inspect
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.arrays import check_finite
from enginesmith.core.errors import ModelError
from enginesmith.core.text import DAMAGED, join_first
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.user_code.entry_point import call_entry_point, place, read_weights, reason, weights_beside

if TYPE_CHECKING:
    import torch

SEED = 0
TRACE_AT_LEAST = 2  # torch.export takes a dim of size 0 or 1 for a constant


@dataclass(frozen=True)
class Program:
    """A captured torch program. inputs: names of its inputs, in the graph's order.  call: runs the original on tensors
    by name.  notes: for people.
    """

    exported: "torch.export.ExportedProgram"
    inputs: tuple[str, ...]
    call: Callable[[Mapping[str, "torch.Tensor"]], Any]
    notes: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs' own names; see `named_outputs`."""
        import torch
        from torch.utils import _pytree as pytree

        user_outputs = self.exported.graph_signature.user_outputs
        placeholders = [torch.empty(0) if isinstance(name, str) else name for name in user_outputs]
        return tuple(named_outputs(pytree.tree_unflatten(placeholders, self.exported.call_spec.out_spec)))

    def run(self, inputs: Tensors) -> dict[str, np.ndarray]:
        """The original model's outputs, by their own names. Raises ModelError if it fails on these inputs."""
        import torch

        tensors = {name: torch.tensor(inputs[name]) for name in self.inputs}
        try:
            with torch.no_grad():
                return {name: value.numpy() for name, value in named_outputs(self.call(tensors)).items()}
        except ModelError:
            raise
        except Exception as error:
            shape_text = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise ModelError(f"the torch model failed on {shape_text}: {reason(error)}") from error


def build_module(root: Path, entry: tuple[str, str, Mapping[str, Any], str], weights: str | None) -> "torch.nn.Module":
    """The module of an entry point, with its weights, in evaluation mode.

    root: the spec's folder, with all the files.  entry: file, function, arguments, and the module's dotted name or ''.
    weights: a file of weights, relative to `root`; None: those that the entry point creates. Raises ModelError with the
    user's file and line, also for an entry point that returns another object.
    """
    import torch

    torch.manual_seed(SEED)
    module = call_entry_point(root, *entry)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{entry[0]}: {entry[1]} returned {type(module).__name__}; return a torch.nn.Module")
    if weights:
        load_weights(module, root / weights)
    _check_finite(module.state_dict(keep_vars=True))
    module.register_forward_hook(lambda _module, _inputs, result: name_fields(result))
    return module.eval().requires_grad_(False)


def name_fields(result: Any) -> Any:
    """The fields of a dataclass, in which torch.export finds no tensors, as a dict without None; else the value."""
    if not is_dataclass(result):
        return result
    field_values = ((field.name, getattr(result, field.name)) for field in fields(result))
    return {name: value for name, value in field_values if value is not None}


def run_once(module: "torch.nn.Module", inputs: Tensors) -> tuple[str, ...]:
    """The names of a module's outputs for these inputs. Raises ModelError if it fails on them."""
    import torch

    try:
        with torch.no_grad():
            return tuple(named_outputs(module(**{name: torch.tensor(array) for name, array in inputs.items()})))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(reason(error)) from error


def from_pt2(path: Path, inputs: Sequence[TensorSpec]) -> Program:
    """Load a saved program. Its inputs are matched with the spec's by name, or else by position, which adds a note.

    Raises ModelError for a file that cannot be loaded, weights that are not finite, and another number of inputs.
    """
    from torch.utils import _pytree as pytree

    exported_program = load_pt2(path)
    _check_finite({**dict(exported_program.named_parameters()), **dict(exported_program.named_buffers())})
    own_names = [str(name) for name in exported_program.graph_signature.user_inputs]
    spec_names = [spec.name for spec in inputs]
    if len(own_names) != len(spec_names):
        raise ModelError(
            f"{path.name} takes {len(own_names)} inputs ({', '.join(own_names)}), but the spec names {len(spec_names)}"
        )
    is_by_name = set(own_names) == set(spec_names)
    input_names = tuple(own_names if is_by_name else spec_names)
    notes = (
        ()
        if is_by_name
        else (f"inputs matched by position: {', '.join(own_names)} are called {', '.join(spec_names)}",)
    )
    module = exported_program.module()

    def call(tensors: Mapping[str, "torch.Tensor"]) -> Any:
        positional_inputs = [tensors[name] for name in input_names]
        args, kwargs = pytree.tree_unflatten(positional_inputs, exported_program.call_spec.in_spec)
        return module(*args, **kwargs)

    return Program(exported_program, input_names, call, notes)


def load_pt2(path: Path) -> "torch.export.ExportedProgram":
    """A saved program. Raises ModelError for a file that cannot be loaded, and for arguments that are no tensors."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            member_names = archive.namelist()
    except DAMAGED as error:
        raise ModelError(
            f"{path} is missing, truncated or not a .pt2 archive ({error}); save it again with torch.export.save"
        ) from error
    if not any("models/" in name or name.endswith("serialized_exported_program.json") for name in member_names):
        hint = (
            "but a package of AOTInductor" if any(name.endswith(".so") for name in member_names) else "but other files"
        )
        raise ModelError(f"{path} holds no exported program, {hint}; save the program with torch.export.save")
    try:
        # Here and below: torch warns about its own internals, which under `-W error` would end the export.
        with warnings.catch_warnings(action="ignore"):
            exported_program = torch.export.load(path)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be loaded by torch {torch.__version__} ({reason(error)}); save it again with this version"
        ) from error
    if non_tensors := [
        user_input for user_input in exported_program.graph_signature.user_inputs if not isinstance(user_input, str)
    ]:
        raise ModelError(
            f"{path.name} has arguments that are not tensors ({', '.join(map(repr, non_tensors))}), which no engine "
            "takes; leave them to their defaults in the call of torch.export.export, or fix them in the module"
        )
    return exported_program


def load_weights(module: "torch.nn.Module", path: Path) -> None:
    """Load weights into a module: every name and shape must match. Raises ModelError with the names of mismatches."""
    state_dict = read_weights(path)
    if mismatches := join_first([*_mismatches(module.state_dict(keep_vars=True), state_dict)], 5, "; "):
        raise ModelError(f"{path} does not fit the module: {mismatches}; save the weights of this model")
    module.load_state_dict(state_dict, strict=False)


def _check_finite(tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Raise ModelError for a weight with NaN, or a trained one with infinities, with its name.

    An infinity that was not trained may be a mask: the ONNX model shows whether a product uses it. But the ONNX model
    may lack the weight's name, because normalizations are folded into the layer before.
    """
    import torch

    check_finite(
        (name, (tensor if tensor.requires_grad else torch.where(tensor.isinf(), 0.0, tensor)).detach().float().numpy())
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    )


def _mismatches(slots: Mapping[str, "torch.Tensor"], tensors: Mapping[str, "torch.Tensor"]) -> Iterator[str]:
    """Weights that the file lacks, that have another shape, or that the module lacks. For tensors that share memory one
    name is enough, since they are saved once."""
    filled_ids = {id(tensor) for name, tensor in slots.items() if name in tensors}
    for name, tensor in slots.items():
        if name not in tensors and id(tensor) not in filled_ids:
            yield f"{name} {list(tensor.shape)} is missing"
        elif name in tensors and tensors[name].shape != tensor.shape:
            yield f"{name} is {list(tensors[name].shape)} and must be {list(tensor.shape)}"
    yield from (f"{name} is not in the module" for name in tensors if name not in slots)


def capture(
    module: "torch.nn.Module", inputs: Sequence[TensorSpec], dims: Sequence[Dim], root: Path
) -> "torch.export.ExportedProgram":
    """Trace a module into a graph whose dynamic dims are the spec's. root: the folder of the user's code.

    Raises ModelError if the inputs are not the parameters of the module, and, with the line in the user's code and
    torch's reason, if it cannot be traced.
    """
    import torch

    input_names = [spec.name for spec in inputs]
    parameters = inspect.signature(module.forward).parameters.values()
    parameter_names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required_names = [p.name for p in parameters if p.name in parameter_names and p.default is p.empty]
    if mismatches := [name for name in input_names if name not in parameter_names] + [
        name for name in required_names if name not in input_names
    ]:
        raise ModelError(
            f"the spec's inputs are {', '.join(input_names)}, but the model is called as "
            f"forward({', '.join(parameter_names)}): {', '.join(mismatches)} does not match; use the parameters' names"
        )
    sizes = {dim.name: dim.max if dim.static else max(TRACE_AT_LEAST, dim.opt) for dim in dims}
    example = {spec.name: torch.from_numpy(np.zeros(spec.at(sizes), spec.dtype)) for spec in inputs}
    symbols = {dim.name: _symbol(dim) for dim in dims if not dim.static}
    shapes = {
        spec.name: {axis: symbols[name] for axis, name in enumerate(spec.shape) if name in symbols}
        | {axis: torch.export.Dim.AUTO for axis, _ in spec.sums}
        for spec in inputs
    }
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.export.export(module, (), example, dynamic_shapes=shapes)
    except Exception as error:
        raise ModelError(
            f"{place(error, root) or 'torch.export'}: the model cannot be captured: {reason(_first(error))}; "
            "avoid Python branches on tensor values, or narrow the dims in the spec"
        ) from error


def _symbol(dim: Dim) -> "torch.export.Dim":
    """A dim of torch's exporter; for a dim with steps, `multiple` times the number of steps."""
    import torch

    if dim.multiple == 1:
        return torch.export.Dim(dim.name, min=dim.min, max=dim.max)
    step_count = torch.export.Dim(f"{dim.name}_steps", min=dim.min // dim.multiple, max=dim.max // dim.multiple)
    return dim.multiple * step_count


def named_outputs(result: Any) -> dict[str, "torch.Tensor"]:
    """The tensors in a model's result, in the order of the exported graph.

    The tensors of a dict are named by its keys; others 'output', or 'output_0', 'output_1' and so on. Raises ModelError
    for a result with other values.
    """
    import torch
    from torch.utils import _pytree as pytree

    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if leaf is not None]
    for _, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise ModelError(f"the model returns {type(leaf).__name__} {leaf!r} among its tensors; return tensors only")
    outputs = {}
    for index, (path, leaf) in enumerate(leaves):
        key = getattr(path[0], "key", None) if len(path) == 1 else None
        default_name = f"output_{index}" if len(leaves) > 1 else "output"
        outputs[key if key and isinstance(key, str) else default_name] = leaf
    return outputs


def write_onnx(program: Program, opset: int, path: Path, most_embedded_bytes: int) -> None:
    """Write a captured program as ONNX, translated by torch's dynamo exporter. If its weights take more than
    `most_embedded_bytes`, they go to a file beside it (`weights_beside`), one after the other.

    opset: ONNX's, which torch must support.
    Raises ModelError naming an operator without ONNX form, for another opset than requested, and above 2 GB.
    """
    import onnx_ir as ir
    import torch
    from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
    from onnx_ir.passes.common import NameFixPass

    try:
        with warnings.catch_warnings(action="ignore"):
            onnx_program = torch.onnx.export(program.exported, dynamo=True, opset_version=opset, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(
            f"the model has no ONNX form: {reason(_first(error))}; rewrite that part of the model"
        ) from error
    if onnx_program is None or onnx_program.model.opset_imports.get("") != opset:
        raise ModelError(f"torch {torch.__version__} cannot export this model to opset {opset}; use opset 18 or 20")
    for value, name in zip(onnx_program.model.graph.inputs, program.inputs, strict=True):
        value.name = name
    NameFixPass()(onnx_program.model)
    weights = (value.const_value for value in onnx_program.model.graph.initializers.values())
    if sum(weight.nbytes for weight in weights if weight is not None) > most_embedded_bytes:
        ir.save(onnx_program.model, path, external_data=weights_beside(path).name, size_threshold_bytes=1024)
        return
    try:
        path.write_bytes(ir.to_proto(onnx_program.model).SerializeToString(deterministic=True))
    except (ValueError, EncodeError) as error:
        raise ModelError(f"{path.name}: the model is over 2 GB, which one ONNX file cannot hold") from error


def _first(error: BaseException) -> BaseException:
    """The error that started a chain."""
    return error if error.__cause__ is None else _first(error.__cause__)
