"""What the sections of a spec demand of each other: each mistake with the key that it is about."""

import itertools
from collections.abc import Collection, Iterator

from enginesmith.compile_caches.recipe import BACKEND, PRECISION
from enginesmith.core.hardware import targets
from enginesmith.core.types import CALIBRATED, PLUS, QUANTIZED, TensorSpec
from pipeline.spec.pads import is_value_of, wrong_pads
from pipeline.spec.sections import SpecSections
from pipeline.spec.source import FILL_IN
from pipeline.spec.value_types import Loc


def find_mistakes(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Mistakes between sections: (key that it is about, message)."""
    yield from _wrong_dims(spec)
    yield from _wrong_states(spec)
    yield from _wrong_int8_states(spec)
    yield from _wrong_sequences(spec)
    yield from _wrong_cache(spec)
    yield from wrong_pads(spec)
    needy = [precision for precision in CALIBRATED if precision in spec.precisions]
    if needy and spec.calibration is None and spec.source.kind != "onnx":
        place: Loc = ("precisions", spec.precisions.index(needy[0]))
        yield place, f"precisions has {needy[0]}, which needs real samples; add calibration.data"
    if spec.quantization.searches and spec.calibration is None:
        place = ("quantization", spec.quantization.searches[0])
        yield place, "quantization.smoothing, floor and latency are searched on real samples; add calibration.data"
    floor = spec.quantization.floor
    if floor and floor.accuracy is not None and spec.calibration and not spec.calibration.labels:
        place = ("quantization", "floor", "accuracy")
        yield place, "quantization.floor.accuracy needs the right answers; name their array in calibration.labels"
    built = list(itertools.product(spec.precision_list(), spec.backends))
    built += [(PRECISION, BACKEND)] if spec.compile_cache else []
    units = [f"{target.name} {precision} {name}" for target in spec.target_list() for precision, name in built]
    for index, pattern in enumerate(spec.build.required):
        if not any(matches_unit(pattern, unit) for unit in units):
            yield (
                ("build", "required", index),
                f"build.required has {pattern!r}, which covers no unit of this spec; correct it, or add what it names",
            )
    for below, output in spec.golden.outputs() if spec.golden and spec.outputs else ():
        if output not in (spec.outputs or ()):
            loc = "golden", *below
            yield loc, f"{'.'.join(map(str, loc))} {output!r} is not one of the outputs {list(spec.outputs or ())}"
    yield from _broken_contract(spec)


def _wrong_dims(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Dims that inputs name and `dims` does not define, and the other way round: (key, message)."""
    used: dict[str, Loc] = {}
    for name, item in spec.inputs.items():
        for axis, dim in enumerate(item.shape):
            place = ("inputs", name, "shape", axis)
            if dim == FILL_IN:
                yield place, f"{FILL_IN} stands where the model does not say it; write dtype and shape, axis by axis"
            elif isinstance(dim, str) and PLUS not in dim:
                used.setdefault(dim, place)
    yield from _wrong_sums(spec, used)
    for dim in sorted(set(used) - set(spec.dims)):
        yield used[dim], f"inputs name dim {dim!r}, which dims does not define; add dims.{dim}.max"
    for dim in sorted(set(spec.dims) - set(used)):
        yield ("dims", dim), f"dims.{dim} is used by no input; remove it or name it in a shape"


def _wrong_sums(spec: SpecSections, axes: Collection[str]) -> Iterator[tuple[Loc, str]]:
    """Sums of dims that no input has as an axis, and sums in states: (key, message)."""
    for name, item in spec.inputs.items():
        for axis, total in TensorSpec(name, item.dtype, item.shape).sums:
            place: Loc = ("inputs", name, "shape", axis)
            if name in spec.state:
                yield place, f"state {name!r} has {total!r}; sizes of states are numbers and dims of their own"
            for dim in (term for term in total.split(PLUS) if not term.isdecimal() and term not in axes):
                yield place, f"{total!r} has dim {dim!r}, which is no axis of any input; name one that is"


def _wrong_states(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """States that are no input, that no output gives, or that leave nothing for a caller to give, and dims that are
    empty in something else than a state: (key, message)."""
    outputs, taken = list(spec.outputs or ()), {name: item.output for name, item in spec.state.items()}
    for name, item in spec.state.items():
        if name not in spec.inputs:
            yield ("state", name), f"state {name!r} is not one of the inputs {list(spec.inputs)}; add it there"
        if outputs and item.output not in outputs:
            text = f"state {name!r} takes {item.output!r}, which is not one of the outputs {outputs}; add it"
            yield ("state", name, "output"), text
        twin = next(other for other, output in taken.items() if output == item.output)
        if twin != name:
            text = f"state {name!r} takes {item.output!r}, as state {twin!r} does; name the output that is its own"
            yield ("state", name, "output"), text
        if name in spec.inputs and not is_value_of(dtype := spec.inputs[name].dtype, item.initial):
            text = f"state {name!r} is {dtype}, which does not hold {item.initial:g}; give a value that it holds, as 0"
            yield ("state", name, "initial"), text
    yield from _wrong_places(spec)
    if spec.state and not spec.inputs.keys() - spec.state.keys():
        yield ("state",), "every input is a state, so that no step is given anything; leave one input out of state"
    steps = {dim for name, item in spec.inputs.items() if name not in spec.state for dim in item.shape}
    for dim, size in spec.dims.items():
        if size.min == 0 and dim in steps:
            yield ("dims", dim, "min"), f"dims.{dim}.min is 0, which only sizes of states can be; the least is 1"


def _wrong_int8_states(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """States of int8 that no engine would have, or whose values are not known: (key, message)."""
    for state in spec.int8_states():
        place: Loc = ("state", state.input, "dtype")
        where = ".".join(map(str, place))
        if state.input in spec.inputs and (found := spec.inputs[state.input].dtype) != "float32":
            yield place, f"{where} is int8, which stands for float32, and the input is {found}; remove it"
        if state.initial:
            yield place, f"{where} is int8, and its initial value {state.initial:g}, not 0; remove dtype"
        if not set(QUANTIZED).intersection(spec.precisions):
            yield place, f"{where} changes nothing: no precision is quantized ({', '.join(QUANTIZED)}); remove it"
        elif spec.calibration is None:
            yield place, f"{where} is int8, whose scale comes from real sequences; add calibration.data"


def _wrong_places(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Places along an axis that has no fixed size, or at an input of no integers: (key, message)."""
    given = {dim for name, item in spec.inputs.items() if name not in spec.state for dim in item.shape}
    for name, item in spec.state.items():
        if name not in spec.inputs or (places := item.places) is None:
            continue
        shape, at, place = spec.inputs[name].shape, spec.inputs.get(places.at), ("state", name, "places")
        if places.axis >= len(shape) or isinstance(shape[places.axis], str):
            text = f"state {name!r} {list(shape)} has no fixed size on axis {places.axis}; name the axis of its places"
            yield (*place, "axis"), text
        if at is None or not at.dtype.startswith(("int", "uint")):
            yield (*place, "at"), f"places.at {places.at!r} is no input of integers; name the one that says where"
        if places.count and places.count not in given:
            yield (*place, "count"), f"places.count {places.count!r} is no dim that a caller gives; name one"


def _wrong_cache(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """A compile cache of what torch.compile does not compile, or whose calls are not proven: (key, message)."""
    if spec.compile_cache and spec.source.kind != "torch":
        text = (
            f"compile_cache is of a module that torch.compile compiles, and the source is {spec.source.kind}; remove it"
        )
        yield ("compile_cache",), text
    if spec.compile_cache and spec.state:
        yield ("compile_cache",), "compile_cache of a model with state is not proven over its steps; remove it"


def _wrong_sequences(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Sequences of data for a model without state, and what data of a model with state cannot have: (key, message)."""
    for section, part in (("golden", spec.golden), ("calibration", spec.calibration)):
        if part and part.sequence and not spec.state:
            yield (section, "sequence"), f"{section}.sequence is for models with state; add state, or remove it"
        if part and part.joined:
            yield from _wrong_steps(spec, (section, "steps"), part.joined[0])
    if spec.state and spec.calibration and spec.calibration.parts > 1:
        yield ("calibration", "parts"), "steps follow each other, so that samples of a model with state are one part"
    if spec.state and spec.calibration and spec.calibration.labels:
        yield ("calibration", "labels"), "a floor of accuracy is not measured over steps; remove labels"


def _wrong_steps(spec: SpecSections, place: Loc, dim: str) -> Iterator[tuple[Loc, str]]:
    """A dim that samples of a step cannot be joined along: (key, message)."""
    where = ".".join(map(str, place))
    held = any(dim in item.shape for name, item in spec.inputs.items() if name in spec.state)
    given = any(dim in item.shape for name, item in spec.inputs.items() if name not in spec.state)
    if not spec.state:
        yield place, f"{where} is for models with state; add state, or remove it"
    elif not given:
        yield place, f"{where} joins samples along {dim!r}, which no input has that a caller gives; name one of theirs"
    elif held:
        yield place, f"{where} joins samples along {dim!r}, which states have too; name a dim of a step alone"


def _broken_contract(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Outputs and inputs that the contract names and the spec does not have: (key, message)."""
    contract, place = spec.validation.contract, ("validation", "contract")
    for below, output in contract.outputs():
        if spec.outputs and output not in spec.outputs:
            where = ".".join((*place, *below))
            yield (*place, *below), f"{where} names {output!r}, which is not one of the outputs {list(spec.outputs)}"
    seeds = contract.distributional.seeds if contract.distributional else None
    if seeds and seeds.vary is not None and seeds.vary not in spec.inputs:
        below = ("distributional", "seeds", "vary")
        yield (*place, *below), f"{'.'.join((*place, *below))} {seeds.vary!r} is not one of {list(spec.inputs)}"


def matches_unit(pattern: str, unit: str) -> bool:
    """Whether 'sm_89 int8' covers the unit 'sm_89 int8 tensorrt-rtx'."""
    wanted, have = pattern.split(), unit.split()
    names = {target.name for target in targets.parse_targets(wanted[0])}
    return have[0] in names and wanted[1:] == have[1 : len(wanted)]
