"""A small net with what breaks plain int8: one channel of an activation that is a hundred times the others."""

from collections.abc import Iterable

import numpy as np
from onnx import ModelProto

from enginesmith.core.types import QuantizationScheme
from pipeline.quantization.insertion_points import activations, prepare_model
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.search.selection import choose_each
from pipeline.quantization.search.trial import MixedPrecisionChoice, SearchTarget
from pipeline.quantization.settings.runs import Run
from tests.pipeline.quantization.small_nets import build, ranges_of

WIDTH, INNER = 32, 64


def outlier_net(residual: bool = False) -> ModelProto:
    """LayerNormalization with a loud channel, two products behind it; `residual`: an Add reads the loud tensor too."""
    rng = np.random.default_rng(4)
    gamma = rng.uniform(0.5, 1.5, WIDTH)
    gamma[5] = 120
    up = rng.normal(size=(WIDTH, INNER)) / 6
    up[5] /= 100
    weights = {"gamma": gamma, "beta": rng.normal(size=WIDTH) / 10, "up": up, "bias": rng.normal(size=INNER) / 4}
    weights |= {"down": rng.normal(size=(INNER, WIDTH)) / 8, "last": rng.normal(size=(WIDTH, 8)) / 6}
    text = """
        n = LayerNormalization<axis=-1>(x, gamma, beta)
        u = MatMul(n, up)
        b = Add(u, bias)
        r = Relu(b)
        f = MatMul(r, down)
    """
    text += "y = Add(f, n)\n z = MatMul(y, last)" if residual else "z = MatMul(f, last)"
    return build(f"float[batch,{WIDTH}] x", "float[batch,8] z", text, weights)


def noise(count: int, seed: int = 6) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)}


def all_ranges(model: ModelProto, arrays: dict[str, np.ndarray]) -> Ranges:
    graph = prepare_model(model)
    return ranges_of(graph, arrays, activations(graph))


def choose(
    model: ModelProto, ranges: Ranges, scheme: QuantizationScheme, runs: Iterable[Run], *more: object, **named: object
) -> MixedPrecisionChoice:
    """What `choose_each` chooses for one kind of int8; race: as of `SearchTarget`."""
    target = SearchTarget(ranges, scheme, named.pop("race", None))
    return choose_each(model, [target], runs, *more, **named)[0]


def runs(arrays: dict[str, np.ndarray], size: int = 16) -> list[tuple[int, dict[str, np.ndarray]]]:
    count = len(next(iter(arrays.values())))
    return [(size, {name: a[i : i + size] for name, a in arrays.items()}) for i in range(0, count, size)]
