"""A clean net, faults planted in copies of it, and the attribution of one against the other."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper

from builders.backends.onnxruntime import OrtSession
from tests.pipeline.quantization.small_nets import constant as weight
from tests.pipeline.quantization.small_nets import maker
from validation.attribution.onnx_graph import OnnxGraph
from validation.attribution.result import Attribution
from validation.attribution.sweep import Size, attribute
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import default_budget
from validation.limits.terms import Budget

DEFAULT = Size()


def graph(model: ModelProto, folder: Path, name: str, optimized: bool = False) -> OnnxGraph:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return OnnxGraph(path, folder / name, lambda file: OrtSession(file, optimized=optimized), fuses=optimized)


def golden_of(arrays: dict[str, np.ndarray], groups: int = 2) -> GoldenSet:
    parts = [
        dict(zip(arrays, split, strict=True))
        for split in zip(*(np.array_split(array, groups) for array in arrays.values()), strict=True)
    ]
    return GoldenSet(tuple(Case(f"golden {index}", "golden", part, {}) for index, part in enumerate(parts)))


def found(
    clean: ModelProto,
    faulty: ModelProto,
    arrays: dict[str, np.ndarray],
    folder: Path,
    budget: Budget | None = None,
    failed: Sequence[str] = ("engine sqnr_db",),
    optimized: bool = False,
    size: Size = DEFAULT,
    tell: Callable[[str], None] = lambda _: None,
) -> Attribution:
    """Attribution of `faulty` against `clean`, with the engine's limits for fp32 unless given."""
    pair = graph(clean, folder, "clean"), graph(faulty, folder, "faulty", optimized)
    limits = budget or default_budget("engine", "fp32")
    return attribute("engine", "fp32", *pair, golden_of(arrays), limits, failed, size, tell)


def copy_of(model: ModelProto) -> ModelProto:
    copied_model = ModelProto()
    copied_model.CopyFrom(model)
    return copied_model


def with_names(model: ModelProto) -> ModelProto:
    """A copy whose nodes carry the names of what they make."""
    copied_model = copy_of(model)
    for node in copied_model.graph.node:
        node.name = node.name or f"{node.op_type}_{node.output[0]}"
    return copied_model


def with_weight(model: ModelProto, name: str, values: np.ndarray) -> ModelProto:
    copied_model = copy_of(model)
    item = next(item for item in copied_model.graph.initializer if item.name == name)
    item.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values, weight(model, name).dtype), name))
    return copied_model


def with_attribute(model: ModelProto, tensor: str, **attributes: object) -> ModelProto:
    """A copy where the node that makes `tensor` has other attributes."""
    copied_model = copy_of(model)
    node = maker(copied_model, tensor)
    other_items = [item for item in node.attribute if item.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*other_items, *(helper.make_attribute(name, value) for name, value in attributes.items())])
    return copied_model
