"""The spec of one model, and the checks between its sections."""

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import model_validator

from enginesmith.core.errors import InputError, SpecError
from enginesmith.core.hardware import machine
from enginesmith.core.types import CALIBRATED, PLUS, QUANTIZED, TensorSpec, list_sums
from enginesmith.registry.store.files import reachable
from pipeline.sources.hub import fetch
from pipeline.spec.document import Kind, is_ensemble, load_document, locate
from pipeline.spec.quantization import Calibration
from pipeline.spec.sections import Golden, SpecSections, wrong_server
from pipeline.spec.source import FILL_IN, WEIGHTS, Loc, Mistakes

# The largest finite numbers (IEEE 754).
_GREATEST = {"float16": 65504.0, "float32": 3.4028235e38}


def wrong_pads(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Pad rules of a model with state, for dims that the input lacks, that another input does not pad or that are in a
    sum, and with values that the dtype does not hold: (key, message)."""
    rules = {name: tensor.pad for name, tensor in spec.inputs.items() if tensor.pad is not None}
    if rules and spec.state:
        yield ("inputs", next(iter(rules)), "pad"), "a model with state is not padded; remove pad"
        return
    summed_dims = {dim for _, _, total in list_sums(spec.tensors()) for dim in total.split(" + ")}
    for name, pads in rules.items():
        for dim, value in pads.items():
            loc: Loc = ("inputs", name, "pad", dim)
            text = f"inputs.{name}.pad has dim {dim!r}, which"
            input_names = [
                input_name
                for input_name, tensor in spec.inputs.items()
                if dim in tensor.shape and dim not in (tensor.pad or {})
            ]
            if dim not in spec.inputs[name].shape:
                yield loc, f"{text} is not an axis of {name!r}; name one of {list(spec.inputs[name].shape)}"
            elif input_names:
                yield (
                    loc,
                    f"{text} input {input_names[0]!r} has too and does not pad; add inputs.{input_names[0]}.pad",
                )
            elif dim in summed_dims:
                yield loc, f"{text} is part of a sum of dims, and those are not padded; remove it"
            if value != "repeat" and not is_value_of(dtype := spec.inputs[name].dtype, value):
                yield loc, f"inputs.{name}.pad is {value:g}, which {dtype} does not hold; give a value that it holds"


def is_value_of(dtype: str, value: float) -> bool:
    """Whether a dtype holds a number, apart from the rounding of floats."""
    if dtype == "bool":
        return value in (0, 1)
    if dtype.startswith("float"):
        return abs(value) <= _GREATEST.get(dtype, abs(value))
    value_count = 2 ** int(dtype.lstrip("uint"))
    least_value = 0 if dtype.startswith("u") else -value_count // 2
    return value.is_integer() and least_value <= value < least_value + value_count


def find_mistakes(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Mistakes between sections: (key, message)."""
    yield from _wrong_dims(spec)
    yield from _wrong_states(spec)
    yield from _wrong_int8_states(spec)
    yield from _wrong_sequences(spec)
    yield from wrong_pads(spec)
    yield from wrong_server(spec)
    yield from _wrong_labels(spec)
    first = next((precision for precision in CALIBRATED if precision in spec.precisions), None)
    if first and spec.calibration is None and spec.source.kind != "onnx":
        key_loc: Loc = ("precisions", spec.precisions.index(first))
        yield key_loc, f"precisions has {first}, which needs real samples; add calibration.data"
    if spec.quantization.searches and spec.calibration is None:
        key_loc = ("quantization", spec.quantization.searches[0])
        yield (
            key_loc,
            "quantization.smoothing, floor, latency and budget_ms are searched on real samples; add calibration.data",
        )
    floor = spec.quantization.floor
    if floor and floor.accuracy is not None and spec.calibration and not spec.calibration.labels:
        key_loc = ("quantization", "floor", "accuracy")
        yield key_loc, "quantization.floor.accuracy needs the right answers; name their array in calibration.labels"
    combinations = list(itertools.product(spec.precision_list(), spec.backends))
    units = [f"{target.name} {precision} {name}" for target in spec.target_list() for precision, name in combinations]
    for index, pattern in enumerate(spec.build.required):
        if not any(matches_unit(pattern, unit) for unit in units):
            yield (
                ("build", "required", index),
                f"build.required has {pattern!r}, which covers no unit of this spec; correct it, or add what it names",
            )
    for inner_loc, output in spec.golden.outputs() if spec.golden and spec.outputs else ():
        if output not in (spec.outputs or ()):
            loc = "golden", *inner_loc
            yield loc, f"{'.'.join(map(str, loc))} {output!r} is not one of the outputs {list(spec.outputs or ())}"
    yield from _broken_contract(spec)


def _wrong_labels(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Label files of unknown outputs, and preferred batch sizes above the largest batch: (key, message)."""
    for output in spec.triton.labels:
        if spec.outputs and output not in spec.outputs:
            yield ("triton", "labels", output), f"triton.labels has {output!r}; the outputs are {list(spec.outputs)}"
    largest = spec.dims["batch"].max if "batch" in spec.dims else None
    for index, size in enumerate(spec.triton.preferred_batch_sizes):
        if largest is not None and size > largest:
            loc: Loc = ("triton", "preferred_batch_sizes", index)
            yield loc, f"triton.preferred_batch_sizes has {size}, and dims.batch.max is {largest}; take a smaller one"


def _wrong_dims(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Dims that inputs name and `dims` does not define, and the other way round: (key, message)."""
    used_dims: dict[str, Loc] = {}
    for name, tensor in spec.inputs.items():
        for axis, dim in enumerate(tensor.shape):
            loc = ("inputs", name, "shape", axis)
            if dim == FILL_IN:
                yield loc, f"{FILL_IN} stands where the model does not say it; write dtype and shape, axis by axis"
            elif isinstance(dim, str) and PLUS not in dim:
                used_dims.setdefault(dim, loc)
    yield from _wrong_sums(spec, used_dims)
    for dim in sorted(set(used_dims) - set(spec.dims)):
        yield used_dims[dim], f"inputs name dim {dim!r}, which dims does not define; add dims.{dim}.max"
    for dim in sorted(set(spec.dims) - set(used_dims)):
        yield ("dims", dim), f"dims.{dim} is used by no input; remove it or name it in a shape"


def _wrong_sums(spec: SpecSections, axes: Collection[str]) -> Iterator[tuple[Loc, str]]:
    """Sums of dims that no input has as an axis, and sums in states: (key, message)."""
    for name, tensor in spec.inputs.items():
        for axis, total in TensorSpec(name, tensor.dtype, tensor.shape).sums:
            loc: Loc = ("inputs", name, "shape", axis)
            if name in spec.state:
                yield loc, f"state {name!r} has {total!r}; a size of a state is one number or one dim"
            for dim in (term for term in total.split(PLUS) if not term.isdecimal() and term not in axes):
                yield loc, f"{total!r} has dim {dim!r}, which is not an axis of any input; name one that is"


def _wrong_states(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """States that are no input or share an output, initial values that the dtype does not hold, specs whose inputs are
    all states, and dims with min 0 outside of states: (key, message)."""
    outputs, state_outputs = list(spec.outputs or ()), {name: state.output for name, state in spec.state.items()}
    for name, state in spec.state.items():
        if name not in spec.inputs:
            yield ("state", name), f"state {name!r} is not one of the inputs {list(spec.inputs)}; add it there"
        if outputs and state.output not in outputs:
            text = f"state {name!r} takes {state.output!r}, which is not one of the outputs {outputs}; add it"
            yield ("state", name, "output"), text
        twin = next(input_name for input_name, output in state_outputs.items() if output == state.output)
        if twin != name:
            text = f"state {name!r} takes {state.output!r}, as state {twin!r} does; each state needs its own output"
            yield ("state", name, "output"), text
        if name in spec.inputs and not is_value_of(dtype := spec.inputs[name].dtype, state.initial):
            text = f"state {name!r} is {dtype}, which does not hold {state.initial:g}; give a value that it holds, as 0"
            yield ("state", name, "initial"), text
    yield from _wrong_places(spec)
    if spec.state and not spec.inputs.keys() - spec.state.keys():
        yield ("state",), "every input is a state, so a step has no input of its own; remove one from state"
    state_dims = {dim for name, tensor in spec.inputs.items() if name not in spec.state for dim in tensor.shape}
    for dim, size in spec.dims.items():
        if size.min == 0 and dim in state_dims:
            yield ("dims", dim, "min"), f"dims.{dim}.min is 0, which only sizes of states can be; the least is 1"


def _wrong_int8_states(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """int8 states that cannot be int8, that no precision would use, or without calibration data: (key, message)."""
    for state in spec.int8_states():
        loc: Loc = ("state", state.input, "dtype")
        path = ".".join(map(str, loc))
        if state.input in spec.inputs and (input_dtype := spec.inputs[state.input].dtype) != "float32":
            yield loc, f"{path} is int8, which replaces only float32, but the input is {input_dtype}; remove it"
        if state.initial:
            yield loc, f"{path} is int8, which needs the initial value 0, not {state.initial:g}; remove dtype"
        if not set(QUANTIZED).intersection(spec.precisions):
            yield loc, f"{path} changes nothing: no precision is quantized ({', '.join(QUANTIZED)}); remove it"
        elif spec.calibration is None:
            yield loc, f"{path} is int8, whose scale comes from real sequences; add calibration.data"


def _wrong_places(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Places along an axis without a fixed size, at an input that is not of integers, or with an unknown `count`."""
    input_dims = {dim for name, tensor in spec.inputs.items() if name not in spec.state for dim in tensor.shape}
    for name, state in spec.state.items():
        if name not in spec.inputs or (places := state.places) is None:
            continue
        shape, position_spec, loc = spec.inputs[name].shape, spec.inputs.get(places.at), ("state", name, "places")
        if places.axis >= len(shape) or isinstance(shape[places.axis], str):
            text = f"state {name!r} {list(shape)} has no fixed size on axis {places.axis}; name the axis of its places"
            yield (*loc, "axis"), text
        if position_spec is None or not position_spec.dtype.startswith(("int", "uint")):
            yield (*loc, "at"), f"places.at {places.at!r} is not an input of integers; name the one with the places"
        if places.count and places.count not in input_dims:
            yield (*loc, "count"), f"places.count {places.count!r} is not a dim that a caller gives; name one"


def _wrong_sequences(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Sequences in data of a model without state, and keys that a model with state cannot have: (key, message)."""
    for section, data_spec in (("golden", spec.golden), ("calibration", spec.calibration)):
        if data_spec and data_spec.sequence and not spec.state:
            yield (section, "sequence"), f"{section}.sequence is for models with state; add state, or remove it"
        if data_spec and data_spec.joined:
            yield from _wrong_steps(spec, (section, "steps"), data_spec.joined[0])
    if spec.state and spec.calibration and spec.calibration.parts > 1:
        yield ("calibration", "parts"), "samples of a model with state are in order and not divided; remove parts"
    if spec.state and spec.calibration and spec.calibration.labels:
        yield ("calibration", "labels"), "a floor of accuracy is not measured over steps; remove labels"


def _wrong_steps(spec: SpecSections, place: Loc, dim: str) -> Iterator[tuple[Loc, str]]:
    """A dim along which the samples of a step cannot be joined: (key, message)."""
    path = ".".join(map(str, place))
    is_state_dim = any(dim in tensor.shape for name, tensor in spec.inputs.items() if name in spec.state)
    is_input_dim = any(dim in tensor.shape for name, tensor in spec.inputs.items() if name not in spec.state)
    if not spec.state:
        yield place, f"{path} is for models with state; add state, or remove it"
    elif not is_input_dim:
        yield place, f"{path} joins samples along {dim!r}, but no input from a caller has it; name a dim of one"
    elif is_state_dim:
        yield place, f"{path} joins samples along {dim!r}, which states have too; name a dim of a step alone"


def _broken_contract(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Outputs and inputs that the contract names and the spec does not have: (key, message)."""
    contract, base_loc = spec.validation.contract, ("validation", "contract")
    for loc, output in contract.outputs():
        if spec.outputs and output not in spec.outputs:
            path = ".".join((*base_loc, *loc))
            yield (*base_loc, *loc), f"{path} names {output!r}, which is not one of the outputs {list(spec.outputs)}"
    seeds = contract.distributional.seeds if contract.distributional else None
    if seeds and seeds.vary is not None and seeds.vary not in spec.inputs:
        loc = ("distributional", "seeds", "vary")
        yield (*base_loc, *loc), f"{'.'.join((*base_loc, *loc))} {seeds.vary!r} is not one of {list(spec.inputs)}"


def matches_unit(pattern: str, unit: str) -> bool:
    """Whether a pattern, such as 'sm_89 int8', covers a unit, such as 'sm_89 int8 tensorrt-rtx'."""
    pattern_words, unit_words = pattern.split(), unit.split()
    names = {target.name for target in machine.parse_targets(pattern_words[0])}
    return unit_words[0] in names and pattern_words[1:] == unit_words[1 : len(pattern_words)]


class ModelSpec(SpecSections):
    """One model: source, shapes, precisions, targets, proof and publication."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if mistakes := tuple(find_mistakes(self)):
            raise Mistakes(mistakes)
        return self


@dataclass(frozen=True)
class ComputedData:
    """A file of samples that is named by its content. sequence, steps: as in `SequenceArrays`."""

    path: Path
    sequence: str | None = None
    steps: Mapping[str, str] | None = None

    @property
    def keys(self) -> dict[str, object]:
        """The keys for the file in a section of a spec."""
        return {"data": self.path.name, "sequence": self.sequence, "steps": dict(self.steps) if self.steps else None}


def with_data(spec: ModelSpec, golden: ComputedData, calibration: ComputedData | None) -> ModelSpec:
    """The spec with other golden data and, if given, calibration data; these files may be in any folder. The
    calibration method and the task metrics do not change."""
    changes: dict[str, object] = {"golden": (spec.golden or Golden(data="-")).model_copy(update=golden.keys)}
    if calibration:
        calibration_spec = spec.calibration or Calibration(data="-")
        changes["calibration"] = calibration_spec.model_copy(update={**calibration.keys, "labels": None})
    changed_spec = spec.model_copy(update=changes)
    changed_spec._computed = {data_spec.path.name: data_spec.path for data_spec in (golden, calibration) if data_spec}
    return changed_spec


KIND = Kind(ModelSpec, "a spec", "model, source, inputs", "`enginesmith init` writes a commented spec")

# Suffix of a model's file -> the key of a spec that names such a file.
_KEY_OF_SUFFIX = {".onnx": "source.onnx", ".pt2": "source.pt2", ".py": "source.torch"} | dict.fromkeys(
    WEIGHTS, "source.weights"
)


def load_spec(path: Path | str, address: str = "") -> ModelSpec:
    """Read and check a spec. address: the spec's name in messages if its file is a copy.

    A file of the Hugging Face Hub is fetched first, with the errors of `hub.fetch`. Raises SpecError with one line per
    mistake, also for a missing file, and InputError for a path that is neither text nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"spec {path!r}: give the path of its file")
    path = Path(path)
    try:
        if (key := _KEY_OF_SUFFIX.get(path.suffix.lower())) and path.is_file():
            remedy = f"write a spec with `enginesmith init`, and name this file in it as {key}"
            raise SpecError([f"{path}: is a file of a model, and not a spec; {remedy}"])
        if is_ensemble(path):
            raise SpecError(
                [f"{path}: is the spec of an ensemble; give the spec of one of its graphs, or use `enginesmith build`"]
            )
        spec, root = load_document(path, KIND)
        spec._path, spec._address = path, address
        if hub_file := spec.source.hub_file:
            fetch(hub_file, spec.folder)
        if missing_files := list(_missing_files(spec)):
            raise SpecError(locate(path, root, missing_files))
    except SpecError as error:
        raise SpecError(_address_lines(error.lines, path, address)) from None
    return spec


def rewrite_spec(path: Path, text: str, reads_as_meant: Callable[[ModelSpec, ModelSpec], bool]) -> bool:
    """Replace a spec's file (atomic write) if the new text reads as meant; return whether it does.

    reads_as_meant: called with the old and the new spec. Raises UnavailableError if the file cannot be written.
    """
    new_path = path.with_name(f".{path.name}.new")
    with reachable(f"writing {path}"):
        try:
            new_path.write_text(text, encoding="utf-8")
            new_path.chmod(path.stat().st_mode & 0o777)
            if is_as_meant := reads_as_meant(load_spec(path), load_spec(new_path)):
                new_path.replace(path)
            return is_as_meant
        finally:
            new_path.unlink(missing_ok=True)


def _address_lines(lines: Sequence[str], path: Path, address: str) -> list[str]:
    """Messages on a spec. If the spec is a copy, its address replaces its path and folder."""
    if address in ("", str(path)):
        return [*lines]
    return [line.replace(str(path), address).replace(str(path.resolve().parent), address) for line in lines]


def locate_mistakes(spec: ModelSpec, mistakes: Iterable[tuple[Loc, str]]) -> SpecError:
    """Mistakes that the files of a spec show, each (key, message), as one error with their lines."""
    _, root = load_document(spec.path, KIND)
    return SpecError(_address_lines(locate(spec.path, root, mistakes), spec.path, spec.address))


def _missing_files(spec: ModelSpec) -> Iterator[tuple[Loc, str]]:
    """(key, message) for each file that does not exist, is a folder, or is outside of the spec's folder through a
    symbolic link. Samples may be a folder."""
    folder = spec.folder
    for loc, name in spec.named_files():
        real_path, mistake = spec.file(name).resolve(), ""
        if not real_path.is_relative_to(folder):
            mistake = f"leads outside the spec's folder; copy the file into {folder}"
        elif real_path.is_dir():
            if loc[-1] != "data" or (loc[0] == "calibration" and spec.calibration and spec.calibration.function):
                mistake = "is a folder; name the file in it"
        elif not real_path.is_file():
            mistake = f"does not exist in {folder}; paths are relative to the spec"
        if mistake:
            yield loc, f"{name!r} {mistake}"
