"""Versions for layouts: ONNX models that add a number, with golden sets; tiny TensorRT engines; an ensemble."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginesmith.core.requirements import Weights, WideSums
from enginesmith.core.state import ENSEMBLE
from enginesmith.core.types import ShapeProfile, TensorSpec
from enginesmith.registry.manifest import EngineEntry, Manifest, write_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.publish import Published, publish
from tests.enginesmith.registries import approval, draft, engine
from tests.enginesmith.registry.test_ensembles import pin
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
    numbers = [(1 if index == 0 else 8 * index + 1, 8 * (index + 1)) for index in range(profiles)]
    sizes = tuple(ShapeProfile((("image", (low, 1, 8, 8), (high, 1, 8, 8), (high, 1, 8, 8)),)) for low, high in numbers)
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
    drafted_spec = draft(store, content)
    drafted_spec = replace(drafted_spec, sources={**drafted_spec.sources, "golden": golden_set(store, folder)})
    pairs = [(entry, approval(entry)) for entry in entries]
    return publish(store, drafted_spec, pairs, (), channel="candidate", wanted_version=version)


def publish_pair(
    store: Store,
    first: int,
    second: int,
    least: int = 1,
    *,
    state: bool = False,
    functions: Mapping[str, object] = MappingProxyType({}),
) -> Manifest:
    """An ensemble for CPUs: an encoder adds `first` to an image's sum, and a decoder adds `second`. A graph with
    the numbers of an earlier call is the same version.

    least: batch of the encoder; only 1 gives it a batch axis in Triton.  state: whether the decoder has one.
    functions: of the spec, in crop.py."""
    past_text, present_text = (f", float[batch, 10] {name}" if state else "" for name in ("past", "present"))
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, 10] logits {past_text}) => (float[batch, 10] scores {present_text})
        <float number = {{{second}}}> {{ scores = Add(logits, number) {"present = Neg(past)" if state else ""} }}"""
    logits, past_spec, scores, present_spec = (
        TensorSpec(name, "float32", ("batch", 10)) for name in ("logits", "past", "scores", "present")
    )
    decoder = engine(store, data=onnx.parser.parse_model(text).SerializeToString())
    inputs, outputs = ((logits, past_spec), (scores, present_spec)) if state else ((logits,), (scores,))
    sizes = ShapeProfile(tuple((spec.name, (1, 10), (4, 10), (16, 10)) for spec in inputs))
    decoder = replace(decoder, inputs=inputs, outputs=outputs, profiles=(sizes,))
    images = ((number, 1, 8, 8) for number in (least, 8, 32))
    encoder = replace(cpu_engine(store, first), profiles=(ShapeProfile((("image", *images),)),))
    graphs = dict[str, Manifest]()
    for name, entry, number in (("encoder", encoder, first), ("decoder", decoder, second)):
        states = {"past": {"output": "present", "initial": 0.0}} if state and entry is decoder else {}
        drafted = replace(draft(store, number, f"pair-{name}"), spec={"state": states})
        graphs[name] = publish(store, drafted, [(entry, approval(entry))], channel=None).manifest
    whole_engine = engine(store, data=write_engines({name: manifest.engines[0] for name, manifest in graphs.items()}))
    whole_engine = replace(whole_engine, backend=ENSEMBLE, suffix=".json", profiles=())
    whole_engine = replace(whole_engine, outputs=(replace(scores, name="decoder.scores"),))
    sources = {"encoder": {"image": "image"}, "decoder": {"logits": "encoder.logits"}}
    pins = tuple(replace(pin(name, manifest), sources=sources[name]) for name, manifest in graphs.items())
    code = {f"function {name} crop.py": store.put_bytes(b"") for name in functions}
    drafted = replace(draft(store, (first, second), "pair"), graphs=pins, spec={"functions": functions}, sources=code)
    return publish(store, drafted, [(whole_engine, approval(whole_engine))], channel="candidate").manifest
