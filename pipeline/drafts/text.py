"""The YAML of a spec that was written by looking at a model, with what was found as comments."""

from collections.abc import Iterable, Iterator

import yaml

from pipeline.drafts.found import FoundModel
from pipeline.spec.source import FILL_IN

_HEAD = """\
# Written by `enginesmith init`; what was found stands in the comments. Every path is relative to this file.
# `enginesmith plan THIS_FILE` shows what would be built and why; `enginesmith debug schema` prints all keys.
"""


def write_spec(found: FoundModel, calibration: str | None = None, golden: str | None = None) -> str:
    """The text of the spec. calibration, golden: files of samples; without the first, int8 is left to a comment."""
    return _HEAD + "\n" + "\n".join(_sections(found, calibration, golden)) + "\n"


def quote(value: object) -> str:
    """A value as YAML has it in one line, quoted where it would be read as something else."""
    quoting = '"' if isinstance(value, str) and not value.isprintable() else None  # else a line end ends the key
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=quoting, width=1 << 30, allow_unicode=False, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("...").rstrip("\n")


def _sections(found: FoundModel, calibration: str | None, golden: str | None) -> Iterator[str]:
    yield from (f"# {note}" for note in found.notes)
    yield f"model: {quote(found.name)}"
    yield f"source: {quote(dict(found.source))}"
    yield ""
    yield "inputs:                       # numbers are fixed sizes, names are dims"
    for spec in found.inputs:
        if why := found.unknown.get(spec.name):
            yield f"  # {FILL_IN}: dtype, and sizes or names of dims: {why}"
        yield f"  {quote(spec.name)}: {{dtype: {spec.dtype}, shape: [{', '.join(map(quote, spec.shape))}]}}"
    if found.left_out:
        yield from (f"# left out: {why}" for why in found.left_out.values())
        yield f"outputs: [{', '.join(map(quote, found.outputs))}]"
    elif found.outputs:
        yield f"# outputs: [{', '.join(map(quote, found.outputs))}]   # the model's own; or other names, in this order"
    if found.states:
        yield ""
        yield "state:                        # taken from the call before, and not from data: remove what is no state"
        for state in found.states:
            yield f"  {quote(state.input)}: {{output: {quote(state.output)}, initial: 0}}"
    if found.dims:
        yield ""
        yield "dims:                         # sizes that engines must take; the smaller the range, the faster they are"
        for name, dim in found.dims.items():
            name = quote(name)
            multiple = f", multiple: {dim.multiple}" if dim.multiple > 1 else ""
            yield f"  {name}: {{min: {dim.min}, opt: {dim.opt}, max: {dim.max}{multiple}}}   # {dim.why}"
    yield ""
    yield from _precisions(found, calibration)
    targets = f"targets: [{', '.join(found.targets)}]"
    yield f"{targets:<29} # or a generation (ampere), a product (l4), sm_89, gpu (each generation), all"
    yield ""
    yield from _data(
        "calibration", calibration, "real inputs that int8 is measured and, if need be, searched on: add int8"
    )
    yield from _data("golden", golden, "real inputs, others than those, that engines are proven with; random ones else")
    if found.metric:
        why = "in golden: what the model is for (docs/guides/task-metrics.md)"
        yield f"# metric: {quote(dict(found.metric))}   # {why}"


def _precisions(found: FoundModel, calibration: str | None) -> Iterable[str]:
    names = [name for name, _ in found.precisions]
    if calibration and "fp16" in names:
        names.append("int8")
    why = "; ".join(f"{name}: {why}" for name, why in found.precisions if why)
    return (f"precisions: [{', '.join(names)}]   # {why}" if why else f"precisions: [{', '.join(names)}]",)


def _data(key: str, path: str | None, why: str) -> Iterable[str]:
    return (f"{key}: {{data: {quote(path)}}}" if path else f"# {key}: {{data: {key}.npz}}   # {why}",)
