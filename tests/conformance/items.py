"""What is tried, by name: the torture set, and the ONNX project's own node tests."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from enginesmith.core.types import TensorSpec
from tests.conformance.torture import GRAPHS, Graph
from tests.conformance.torture.graph import feed_of
from tests.conformance.trial import Item, Run, saved


def torture_item(name: str) -> Item:
    """A graph of the torture set; right is what ONNX's reference evaluator answers on the graph as it was written."""
    graph = GRAPHS[name]
    return Item(
        name,
        lambda folder: saved(graph.make(), folder, external=graph.external),
        partial(_reference_runs, graph),
        graph.dims,
        graph.inputs,
        graph.precision,
    )


def _reference_runs(graph: Graph, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> list[Run]:
    interpreter = ReferenceEvaluator(graph.make())
    names = interpreter.output_names
    if len(set(names)) < len(names):  # a value that is there twice is given a second name
        names = [spec.name for spec in outputs]
    items = []
    for seed, sizes in enumerate(graph.sizes()):
        feed = feed_of(graph, inputs, sizes, seed)
        with np.errstate(all="ignore"):
            answers = interpreter.run(None, feed)
        items.append(Run(feed, dict(zip(names, map(np.asarray, answers), strict=True))))
    return items


@cache
def node_cases(module: str = "") -> Mapping[str, Any]:
    """ONNX's backend node tests by name: of one module ('conv'), or all. Importing them makes them: 6 s for all."""
    from onnx.backend.test.case.node import _NodeTestCases
    from onnx.backend.test.case.utils import import_recursive

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        package = import_module("onnx.backend.test.case.node")
        if module and f"{package.__name__}.{module}" not in sys.modules:
            known_ids = set(map(id, _NodeTestCases))
            import_module(f"{package.__name__}.{module}")
            return {case.name: case for case in _NodeTestCases if id(case) not in known_ids}
        import_recursive(package)
    return {case.name: case for case in _NodeTestCases}


def node_item(name: str, modules: str = "") -> Item:
    """A node test with the inputs, the outputs and the tolerances that it brings along."""
    case = next(cases[name] for module in modules.split(",") if name in (cases := node_cases(module)))

    def runs(inputs: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> list[Run]:
        outputs = [value.name for value in case.model.graph.output]
        return [
            Run(_named(inputs, arguments), dict(zip(outputs, map(_array, expected), strict=True)))
            for arguments, expected in case.data_sets
        ]

    return Item(name, partial(saved, case.model), runs, compare=partial(_close, case.rtol, case.atol))


def _named(specs: Sequence[TensorSpec], arrays: Sequence[Any]) -> dict[str, Any]:
    return {spec.name: _array(array) for spec, array in zip(specs, arrays, strict=True)}


def _array(value: Any) -> Any:
    """Of types that numpy does not have the tests hold protobufs."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _close(rtol: float, atol: float, name: str, expected: Any, got: Any) -> str | None:
    """By the test's own tolerances, as ONNX's runner compares."""
    try:
        if expected.dtype.kind in "OUS":
            np.testing.assert_array_equal(expected, got)
        else:
            wide_dtype = expected.dtype if expected.dtype.kind in "biufc" else "float32"
            np.testing.assert_allclose(got.astype(wide_dtype), expected.astype(wide_dtype), rtol=rtol, atol=atol)
    except AssertionError as error:
        return f"{name!r}: {error}"
    return None


def maker_of(suite: str) -> Callable[[str], Item]:
    """What makes an item from its name: 'torture', 'nodes', or 'nodes/conv,loop' for those modules' tests alone."""
    kind, _, modules = suite.partition("/")
    return torture_item if kind == "torture" else partial(node_item, modules=modules)
