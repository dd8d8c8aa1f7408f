"""Versions for layouts: real ONNX models that add a number, with a golden set; engines of TensorRT of a few bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginesmith.core.requirements import Weights, WideSums
from enginesmith.core.types import ShapeProfile, TensorSpec
from enginesmith.registry.manifest import EngineEntry
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.publish import Published, publish
from tests.enginesmith.registries import approval, draft, engine
from validation.golden.golden_set import freeze

GOLDEN = np.arange(3 * 64, dtype=np.float32).reshape(3, 1, 8, 8)


def adds(number: float, features: int = 10) -> bytes:
    """An ONNX model: image [batch, 1, 8, 8] -> logits [batch, features], each the sum of the image and `number`."""
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["flat"]),
            helper.make_node("MatMul", ["flat", "ones"], ["sums"]),
            helper.make_node("Add", ["sums", "number"], ["logits"]),
        ],
        "adds",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", features])],
        [
            numpy_helper.from_array(np.ones((64, features), np.float32), "ones"),
            numpy_helper.from_array(np.float32(number), "number"),
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def cpu_engine(store: Store, number: float, features: int = 10) -> EngineEntry:
    """A proven engine for CPUs that is such a model."""
    result = engine(store, data=adds(number, features))
    return replace(result, outputs=(TensorSpec("logits", "float32", ("batch", features)),))


def plan(store: Store, target: str, precision: str = "fp16", profiles: int = 1) -> EngineEntry:
    """An engine of TensorRT, of a few bytes, with profiles for batches up to 8, 16, ..."""
    result = engine(store, target, precision, status="unproven", data=f"{target} {precision}".encode())
    ends = [(1 if index == 0 else 8 * index + 1, 8 * (index + 1)) for index in range(profiles)]
    sizes = tuple(ShapeProfile((("image", (low, 1, 8, 8), (high, 1, 8, 8), (high, 1, 8, 8)),)) for low, high in ends)
    return replace(result, backend="tensorrt", profiles=sizes)


def stripped(entry: EngineEntry) -> EngineEntry:
    return replace(entry, requires=(*entry.requires, Weights(entry.digest or "")))


def wide(entry: EngineEntry) -> EngineEntry:
    """The entry as one whose int8 sums saturate on CPUs without VNNI."""
    return replace(entry, requires=(*entry.requires, WideSums()))


def golden_set(store: Store, folder: Path) -> str:
    """The digest of a stored golden set of one case of three images."""
    path = folder / "golden.safetensors"
    freeze([{"image": GOLDEN}], (), (), lambda inputs: {"logits": inputs["image"].sum((1, 2, 3))}).save(path)
    return store.put_bytes(path.read_bytes())


def publish_with_golden(
    store: Store, entries: list[EngineEntry], folder: Path, content: object, version: str | None = None
) -> Published:
    """A version with a golden set, on the channel candidate."""
    drafted = draft(store, content)
    drafted = replace(drafted, sources={**drafted.sources, "golden": golden_set(store, folder)})
    pairs = [(entry, approval(entry)) for entry in entries]
    return publish(store, drafted, pairs, (), channel="candidate", wanted_version=version)
