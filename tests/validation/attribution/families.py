"""Networks of five families with seeded weights, and what can be planted in each: the fault and the node it is in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from builders.types import Dim, TensorSpec
from tests.pipeline.quantization.small_nets import attention_net, build, conv_net, images, maker, sentences
from tests.validation.attribution.planted import weight, with_attribute, with_names, with_weight

BATCH = Dim("batch", 1, 4, 8)
Change = Callable[[ModelProto], ModelProto]


@dataclass(frozen=True)
class Family:
    """net: of a seed.  data: samples by input.  faults: by name, the change and the tensor whose maker it is in."""

    net: Callable[[int], ModelProto]
    data: Callable[[], dict[str, np.ndarray]]
    inputs: tuple[TensorSpec, ...]
    faults: Mapping[str, tuple[Change, str]]


def mixed(name: str) -> Change:
    """Two slices of a weight in each other's place, along its largest axis."""

    def change(model: ModelProto) -> ModelProto:
        values = weight(model, name)
        return with_weight(model, name, np.roll(values, 1, int(np.argmax(values.shape))))

    return change


def dropped(name: str) -> Change:
    """A bias that is zero."""
    return lambda model: with_weight(model, name, np.zeros_like(weight(model, name)))


def changed(tensor: str, **attributes: object) -> Change:
    """Another attribute of the node that makes `tensor`."""

    def change(model: ModelProto) -> ModelProto:
        return with_attribute(model, tensor, **attributes)

    return change


def reseeded(model: ModelProto, seed: int) -> ModelProto:
    """The weights of two and more axes with signs drawn for each column: another function with weights of that size."""
    rng = np.random.default_rng(seed)
    for item in list(model.graph.initializer):
        values = weight(model, item.name)
        if values.dtype == np.float32 and values.ndim > 1:
            model = with_weight(model, item.name, values * rng.choice([-1, 1], size=values.shape[-1]))
    return with_names(model)


def mlp_net(seed: int) -> ModelProto:
    """Two layers with LayerNorm between, and logits."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(8, 16)), "b1": rng.normal(size=16),
        "gamma": 1 + rng.normal(size=16) / 4, "beta": rng.normal(size=16) / 4,
        "w2": rng.normal(size=(16, 16)) / 3, "b2": rng.normal(size=16) / 2, "w3": rng.normal(size=(16, 10)),
    }  # fmt: skip
    text = """
        h0 = MatMul(x, w1) h1 = Add(h0, b1) h = Relu(h1)
        n = LayerNormalization<axis=-1, epsilon=1e-5>(h, gamma, beta)
        m0 = MatMul(n, w2) m1 = Add(m0, b2) m = Relu(m1) logits = MatMul(m, w3)
    """
    return with_names(build("float[batch,8] x", "float[batch,10] logits", text, weights))


def recurrent_net(seed: int) -> ModelProto:
    """A sequence of 12 steps through an LSTM and a GRU, and logits of the last state."""
    rng, d = np.random.default_rng(seed), 8
    weights = {
        "lw": rng.normal(size=(1, 4 * d, d)) / 2, "lr": rng.normal(size=(1, 4 * d, d)) / 3,
        "lb": rng.normal(size=(1, 8 * d)) / 2,
        "gw": rng.normal(size=(1, 3 * d, d)) / 2, "gr": rng.normal(size=(1, 3 * d, d)) / 3,
        "gb": rng.normal(size=(1, 6 * d)) / 2,
        "wo": rng.normal(size=(d, 6)), "bo": rng.normal(size=6), "axis": np.array([1]), "zero": np.array([0]),
    }  # fmt: skip
    text = """
        t = Transpose<perm=[1,0,2]>(x)
        l4, lh = LSTM<hidden_size=8>(t, lw, lr, lb)
        l = Squeeze(l4, axis)
        g4, gh = GRU<hidden_size=8>(l, gw, gr, gb)
        last = Squeeze(gh, zero)
        o = MatMul(last, wo) logits = Add(o, bo)
    """
    return with_names(build("float[batch,12,8] x", "float[batch,6] logits", text, weights))


def detector_net(seed: int) -> ModelProto:
    """An image to boxes and scores of 64 cells, and which of them are kept: NonMaxSuppression, and the best 8."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(16, 1, 3, 3)) / 2, "b1": rng.normal(size=16) / 2,
        "w2": rng.normal(size=(16, 16, 3, 3)) / 6, "b2": rng.normal(size=16) / 4,
        "wb": rng.normal(size=(4, 16, 1, 1)) / 2, "bb": rng.normal(size=4),
        "ws": rng.normal(size=(3, 16, 1, 1)) / 2, "bs": rng.normal(size=3),
        "rows": np.array([0, 4, 64]), "classes": np.array([0, 3, 64]), "half": np.float32(8),
        "most": np.array([5]), "overlap": np.float32(0.5), "least": np.float32(0.3), "eight": np.array([8]),
    }  # fmt: skip
    text = """
        c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(image, w1, b1) r1 = Relu(c1)
        c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(r1, w2, b2) r2 = Relu(c2)
        b0 = Conv<kernel_shape=[1,1]>(r2, wb, bb) bs0 = Sigmoid(b0) b2d = Mul(bs0, half)
        b3 = Reshape(b2d, rows) boxes = Transpose<perm=[0,2,1]>(b3)
        s0 = Conv<kernel_shape=[1,1]>(r2, ws, bs) s1 = Sigmoid(s0) scores = Reshape(s1, classes)
        kept = NonMaxSuppression(boxes, scores, most, overlap, least)
        best = ReduceMax<axes=[1], keepdims=0>(scores)
        top, places = TopK<axis=-1>(best, eight)
    """
    outputs = "float[batch,64,4] boxes, float[batch,3,64] scores, int64[n,3] kept, float[batch,8] top"
    return with_names(build("float[batch,1,8,8] image", outputs, text, weights, 17))


def steps(seed: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(24, 12, 8)).astype(np.float32)}


def rows(seed: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(size=(24, 8)).astype(np.float32)}


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, ("batch", *shape))


FAMILIES = {
    "conv": Family(lambda seed: reseeded(conv_net(), seed), images, (spec("image", 1, 8, 8),), {
        "swapped weight": (mixed("w2"), "c2"), "dropped bias": (dropped("b1"), "c1"),
        "swapped last weight": (mixed("w3"), "logits"),
    }),
    "mlp": Family(mlp_net, rows, (spec("x", 8),), {
        "swapped weight": (mixed("w2"), "m0"), "dropped bias": (dropped("b1"), "h1"),
        "wrong epsilon": (changed("n", epsilon=2.0), "n"),
    }),
    "encoder": Family(lambda seed: reseeded(attention_net(), seed), sentences,
                      (spec("tokens", 6, dtype="int64"), spec("mask", 6)), {
        "swapped weight": (mixed("wv"), "v"), "dropped bias": (dropped("bq"), "q"),
        "wrong epsilon": (changed("n", epsilon=2.0), "n"),
    }),
    "recurrent": Family(recurrent_net, steps, (spec("x", 12, 8),), {
        "swapped weight": (mixed("gr"), "gh"), "dropped bias": (dropped("lb"), "l4"),
        "swapped last weight": (mixed("wo"), "o"),
    }),
    "detector": Family(detector_net, images, (spec("image", 1, 8, 8),), {
        "swapped weight": (mixed("wb"), "b0"), "dropped bias": (dropped("bs"), "s0"),
        "other overlap": (lambda model: with_weight(model, "overlap", np.float32(0.05)), "kept"),
        "smallest": (changed("top", largest=0), "top"),
    }),
}  # fmt: skip


def node_of(model: ModelProto, tensor: str) -> str:
    """The name of the node that makes a tensor."""
    return maker(model, tensor).name
