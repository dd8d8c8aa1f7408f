"""What a graph of the torture set is, and how one is written."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from enginesmith.core.types import Dim, Precision, TensorSpec

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]
# The sizes of a feed, and a source of numbers.
Fill = Callable[[Mapping[str, int], np.random.Generator], Feed]


@dataclass(frozen=True)
class Graph:
    """One graph.

    make: the model.  dims: of its dynamic axes.  feeds: sizes of each feed; by default every dim at min, opt and max.
    fill: the inputs that are not plain noise.  inputs: how a spec would declare them, where the model does not say.
    core: no backend may refuse it.  words: what a refusal must name, as a regular expression.
    external: its weights lie in a file of their own.
    """

    name: str
    make: Callable[[], onnx.ModelProto]
    dims: tuple[Dim, ...] = ()
    feeds: tuple[Mapping[str, int], ...] = ()
    fill: Fill | None = None
    inputs: tuple[TensorSpec, ...] = ()
    precision: Precision = "fp32"
    core: bool = False
    words: str = ""
    external: bool = False

    def sizes(self) -> Sequence[Mapping[str, int]]:
        if self.feeds:
            return self.feeds
        items = [{dim.name: getattr(dim, end) for dim in self.dims} for end in ("min", "opt", "max")]
        return [sizes for index, sizes in enumerate(items) if sizes not in items[:index]]


BATCH = (Dim("n", 1, 4, 8),)


def model(text: str, weights: Mapping[str, Array] | None = None, opset: int = 20, ir: int = 10) -> onnx.ModelProto:
    """A model from ONNX's text format ('name (inputs) => (outputs) {...}'), with these initializers."""
    onnx_model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}')
    onnx_model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    return onnx_model


GRAPHS: dict[str, Graph] = {}


def add(
    name: str,
    made_of: str | Callable[[], onnx.ModelProto],
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 20,
    dims: tuple[Dim, ...] | None = None,
    **rest: Any,
) -> None:
    """Add a graph, by a text as `model` reads it or a function. dims: BATCH by default if an input in a text has n."""
    assert name not in GRAPHS, name
    if isinstance(made_of, str):
        dims = BATCH if dims is None and re.search(r"\[[^]]*\bn\b", made_of.partition("=>")[0]) else dims
        make = partial(model, made_of, weights, opset)
    else:
        make = made_of
    GRAPHS[name] = Graph(name, make, dims or (), **rest)


def noise(seed: int, *shape: int, dtype: Any = "float32") -> Array:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def feed_of(graph: Graph, specs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int) -> Feed:
    """Inputs at these sizes: noise of the right kind, and what the graph itself fills in."""
    rng = np.random.default_rng(seed)
    fill = graph.fill(sizes, rng) if graph.fill else {}
    return {spec.name: fill[spec.name] if spec.name in fill else _drawn(spec, spec.at(sizes), rng) for spec in specs}


def _drawn(spec: TensorSpec, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if spec.dtype == "bool":
        return rng.random(shape) < 0.5
    if "int" in spec.dtype:
        return np.asarray(rng.integers(0 if spec.dtype.startswith("u") else -5, 6, shape)).astype(spec.dtype)
    kind = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype
    return np.asarray(rng.standard_normal(shape)).astype(kind)
