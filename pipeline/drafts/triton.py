"""A look at Triton's `config.pbtxt`: the model that it serves, and what the configuration says of it.

The fields are those of Triton's ModelConfig (https://github.com/triton-inference-server/common,
protobuf/model_config.proto).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from enginesmith.client.layouts.protobuf_text import ProtoMessage, parse
from enginesmith.core.errors import InputError
from enginesmith.core.text import pluralize
from pipeline.drafts.found import FoundDim, FoundModel, model_name
from pipeline.drafts.onnx_model import look_at_onnx

LARGEST_BYTES = 1 << 20


def look_at_triton(config: Path, folder: Path) -> FoundModel:
    """The ONNX model beside a configuration, with its name and batch sizes. folder: where the spec goes.

    Raises InputError for a configuration of another platform, and where the model's file is not found.
    """
    if config.stat().st_size > LARGEST_BYTES:
        raise InputError(f"{config} is over {LARGEST_BYTES} bytes; a configuration is a short text")
    try:
        told = parse(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{config} is no protobuf text: {error}") from error
    platform = told.text("backend") or told.text("platform") or "onnxruntime"
    if not platform.startswith("onnxruntime"):
        raise InputError(
            f"{config} is of the platform {platform!r}; configurations of onnxruntime are read: name the model"
        )
    name = told.text("default_model_filename") or "model.onnx"
    served = told.message("version_policy").message("specific").numbers("versions")
    versions = sorted(config.parent.glob(f"[0-9]*/{name}"), key=lambda path: (_version(path) in served, _version(path)))
    places = [config.parent / name, *versions]
    model = next((place for place in reversed(places) if place.is_file()), None)
    if model is None:
        raise InputError(f"{config}: no {name} beside it, nor in a folder of a version; put it there")
    found = look_at_onnx(model, str(model.resolve().relative_to(folder.resolve())))
    notes = (
        *found.notes,
        f"{config.name}: max_batch_size {told.text('max_batch_size') or '0'}",
        *(f"{config.name}: {wrong}" for wrong in _find_unfit(found, told)),
    )
    found = replace(found, name=model_name(told.text("name") or config.resolve().parent.name), notes=notes)
    return _take_kinds(_take_batch(_take_sizes(found, told), told), told)


def _version(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdigit() else -1


def _is_batched(told: ProtoMessage) -> bool:
    return told.text("max_batch_size").isdigit() and int(told.text("max_batch_size")) > 0


def _find_unfit(found: FoundModel, told: ProtoMessage) -> Iterator[str]:
    """What the configuration says of inputs that the model does not have so, and that is not taken."""
    known = {spec.name: len(spec.shape) - _is_batched(told) for spec in found.inputs}
    for item in told.messages("input"):
        name, served = item.text("name"), len(_served_shape(item))
        if name not in known:
            yield f"input {name!r}, which the model does not have; it has {', '.join(known)}"
        elif served != known[name]:
            yield f"input {name!r} has {pluralize(served, 'size')}, and the model takes {known[name]}: not taken"


def _take_sizes(found: FoundModel, told: ProtoMessage) -> FoundModel:
    """A dim that is served at one size, or at several of them by other inputs, has these in the spec."""
    batched = _is_batched(told)
    shapes = {item.text("name"): _served_shape(item) for item in told.messages("input")}
    sizes: dict[str, set[int]] = {}
    for spec in found.inputs:
        axes = spec.shape[1:] if batched else spec.shape
        served = shapes.get(spec.name, ())
        if len(served) != len(axes):
            continue
        for axis, size in zip(axes, served, strict=True):
            if isinstance(axis, str) and axis in found.dims:
                sizes.setdefault(axis, set()).add(size)
    held = {
        name: FoundDim(min(all_of), max(all_of), max(all_of), f"served at {' and '.join(map(str, sorted(all_of)))}")
        for name, all_of in sizes.items()
        if min(all_of) > 0
    }
    return replace(found, dims={**found.dims, **held})


def _served_shape(item: ProtoMessage) -> tuple[int, ...]:
    """What the model gets of an input, without the batch; -1 is any size, and so is what is no number."""
    reshape = item.message("reshape")
    texts = reshape.fields.get("shape", []) if "reshape" in item.fields else item.fields.get("dims", [])
    return tuple(int(text) if isinstance(text, str) and text.isdigit() else -1 for text in texts)


def _take_kinds(found: FoundModel, told: ProtoMessage) -> FoundModel:
    """What runs the instances that are served becomes the targets of the spec."""
    kinds = {group.text("kind") for group in told.messages("instance_group")}
    targets = tuple(name for kind, name in (("KIND_CPU", "cpu"), ("KIND_GPU", "gpu")) if kind in kinds)
    return replace(found, targets=targets) if targets else found


def _take_batch(found: FoundModel, told: ProtoMessage) -> FoundModel:
    """The largest batch that is served becomes the largest of the spec, the preferred one the size to tune for."""
    most = told.text("max_batch_size")
    batch = found.inputs[0].shape[0] if found.inputs and found.inputs[0].shape else None
    if not most.isdigit() or int(most) < 1 or not isinstance(batch, str):
        return found
    preferred = told.message("dynamic_batching").numbers("preferred_batch_size")
    top = int(most)
    dim = FoundDim(1, min(max(preferred, default=1), top), top, f"max_batch_size is {top}")
    return replace(found, dims={**found.dims, batch: dim})
