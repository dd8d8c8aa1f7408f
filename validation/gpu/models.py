"""The models of the GPU kit, and the tasks for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builders.backends import discovery
from enginesmith.arrays import Array
from enginesmith.core.errors import digest_of_file
from enginesmith.core.hardware.machine import GENERATIONS
from enginesmith.core.types import Backend, BuildRequest, Dim, Precision, Scalar, ShapeProfile, Target, TensorSpec
from validation.gpu.devices import KitDevice
from validation.gpu.results import Skipped

# The kit's models: an MLP, a convolutional net and a transformer block, generated with the same bytes everywhere.
#
# Weights and inputs are drawn from a fixed seed and rounded to fp16: the fp32 and the fp16 graph have the same numbers,
# and one reference in float64.

Size = Literal["real", "small"]
SIZES: tuple[Size, ...] = ("real", "small")
_DTYPES: Mapping[Precision, str] = {"fp32": "float32", "fp16": "float16"}
PRECISIONS: tuple[Precision, ...] = tuple(_DTYPES)
# ONNX's versions: opset 17 came with IR version 8 (onnx, Versioning.md).
_OPSET, _IR = 17, 8
_SEED = 20


@dataclass(frozen=True)
class KitModel:
    """A model on disk with one dynamic dim, `batch`. precision: of computation, inputs and outputs."""

    name: str
    path: Path
    precision: Precision
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch: Dim

    @property
    def profile(self) -> ShapeProfile:
        """The shapes of all batches, tuned for `batch.opt`."""
        low, opt_sizes, high = ({"batch": size} for size in (self.batch.min, self.batch.opt, self.batch.max))
        return ShapeProfile(tuple((spec.name, spec.at(low), spec.at(opt_sizes), spec.at(high)) for spec in self.inputs))

    def sample(self, batch: int) -> dict[str, Array]:
        """Inputs of `batch` samples, float32 for every precision, with values that fp16 can represent."""
        rng = np.random.default_rng([_SEED, 0])
        return {spec.name: _round_weights(rng.standard_normal(spec.at({"batch": batch}))) for spec in self.inputs}


def write(name: str, precision: Precision, size: Size, folder: Path) -> KitModel:
    """Write `folder`/NAME.PRECISION.onnx. The same arguments result in the same bytes everywhere.

    precision: of its computation.  size: 'real', or a small size for tests.
    """
    network = _Drawn(_DTYPES[precision])
    shape, batch = MODELS[name](network, size)
    spec = TensorSpec("x", network.dtype, ("batch", *shape))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(network.dtype))
    output_spec = TensorSpec("y", network.dtype, ("batch", *network.out))
    input_info, output_info = (
        helper.make_tensor_value_info(tensor.name, kind, list(tensor.shape)) for tensor in (spec, output_spec)
    )
    graph = helper.make_graph(network.nodes, name, [input_info], [output_info], network.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    onnx.checker.check_model(model, full_check=True)
    path = folder / f"{name}.{precision}.onnx"
    path.write_bytes(model.SerializeToString(deterministic=True))
    return KitModel(name, path, precision, (spec,), (output_spec,), batch)


def _round_weights(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


class _Drawn:
    """A graph under construction: nodes, and weights drawn from one seed in the order of their creation."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.out: tuple[int, ...] = ()
        self._rng = np.random.default_rng(_SEED)

    def op(self, kind: str, *inputs: str, last: bool = False, **attributes: object) -> str:
        """Add a node and return the name of its output: 'y' for the last node."""
        name = "y" if last else f"t{len(self.nodes)}"
        node = helper.make_node(kind, list(inputs), [name], name=f"{kind}_{len(self.nodes)}")
        node.attribute.extend(helper.make_attribute(key, value) for key, value in sorted(attributes.items()))
        self.nodes.append(node)
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        """Add a random weight, scaled to keep the variance of inputs in products (He et al., 2015); returns its
        name."""
        return self._hold(_round_weights(self._rng.standard_normal(shape) * np.sqrt(2.0 / fan_in)))

    def bias(self, size: int) -> str:
        """Add a small random bias; returns its name."""
        return self._hold(_round_weights(0.1 * self._rng.standard_normal(size)))

    def constant(self, value: float, *shape: int) -> str:
        """Add a constant of this shape with one value everywhere; returns its name."""
        return self._hold(np.full(shape, value, np.float32))

    def sizes(self, *values: int) -> str:
        """Add a shape for Reshape; returns its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def dense(self, x: str, ins: int, outs: int, last: bool = False) -> str:
        """Add nodes for x W + b; returns the output's name."""
        product = self.op("MatMul", x, self.weight(ins, outs, fan_in=ins))
        return self.op("Add", product, self.bias(outs), last=last)

    def _hold(self, values: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values.astype(self.dtype), name))
        return name


def _mlp(net: _Drawn, size: Size) -> tuple[tuple[int, ...], Dim]:
    """Add three layers, as in a ranking model: memory-bound at batch 1, compute-bound at the greatest batch."""
    width, hidden_width = (1024, 4096) if size == "real" else (32, 64)
    h = net.op("Relu", net.dense("x", width, hidden_width))
    h = net.op("Relu", net.dense(h, hidden_width, hidden_width))
    net.dense(h, hidden_width, width, last=True)
    net.out = (width,)
    return (width,), Dim("batch", 1, 16, 64) if size == "real" else Dim("batch", 1, 2, 4)


def _conv(net: _Drawn, size: Size) -> tuple[tuple[int, ...], Dim]:
    """Add a residual net of 3x3 convolutions: ResNet-18 without batch normalization (He et al., CVPR 2016)."""
    pixels, widths, depth = (224, (64, 128, 256, 512), 2) if size == "real" else (16, (8, 16), 1)
    h = _convolve(net, "x", 3, widths[0], 7, 2)
    h = net.op("MaxPool", h, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    last_width = widths[0]
    for stage, width in enumerate(widths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            branch = _convolve(
                net, _convolve(net, h, last_width, width, 3, stride), width, width, 3, 1, rectified=False
            )
            shortcut = (
                h
                if (last_width, stride) == (width, 1)
                else _convolve(net, h, last_width, width, 1, stride, rectified=False)
            )
            # Halved: values keep their size through many blocks, far below fp16's largest.
            h, last_width = net.op("Relu", net.op("Mul", net.op("Add", branch, shortcut), net.constant(0.5))), width
    pools = net.op("Flatten", net.op("GlobalAveragePool", h), axis=1)
    class_count = 1000 if size == "real" else 10
    weight = net.weight(widths[-1], class_count, fan_in=widths[-1])
    net.op("Gemm", pools, weight, net.bias(class_count), last=True)
    net.out = (class_count,)
    return (3, pixels, pixels), Dim("batch", 1, 8, 16) if size == "real" else Dim("batch", 1, 2, 4)


def _convolve(net: _Drawn, x: str, ins: int, outs: int, kernel: int, stride: int, rectified: bool = True) -> str:
    weight = net.weight(outs, ins, kernel, kernel, fan_in=ins * kernel * kernel)
    pads = [kernel // 2] * 4
    h = net.op("Conv", x, weight, net.bias(outs), kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
    return net.op("Relu", h) if rectified else h


def _block(net: _Drawn, size: Size) -> tuple[tuple[int, ...], Dim]:
    """Add a transformer's encoder block of BERT-base's sizes, normalized first (Xiong et al., ICML 2020)."""
    length, width, head_count = (128, 768, 12) if size == "real" else (8, 32, 4)
    h = _attention(net, _normalize(net, "x", width), length, width, head_count)
    x = net.op("Add", "x", h)
    h = net.dense(_normalize(net, x, width), width, 4 * width)
    # GELU as PyTorch exports it: x (1 + erf(x / sqrt 2)) / 2.
    erf = net.op("Erf", net.op("Mul", h, net.constant(np.sqrt(0.5))))
    h = net.op("Mul", net.op("Mul", h, net.op("Add", erf, net.constant(1.0))), net.constant(0.5))
    net.op("Add", x, net.dense(h, 4 * width, width), last=True)
    net.out = (length, width)
    return (length, width), Dim("batch", 1, 8, 16) if size == "real" else Dim("batch", 1, 2, 4)


def _attention(net: _Drawn, x: str, length: int, width: int, heads: int) -> str:
    head_width = width // heads
    split_shape = net.sizes(0, length, heads, head_width)
    query, key, value = (net.op("Reshape", net.dense(x, width, width), split_shape) for _ in range(3))
    query, value = (net.op("Transpose", tensor, perm=[0, 2, 1, 3]) for tensor in (query, value))
    scores = net.op("MatMul", query, net.op("Transpose", key, perm=[0, 2, 3, 1]))
    weights = net.op("Softmax", net.op("Mul", scores, net.constant(1.0 / np.sqrt(head_width))), axis=-1)
    context = net.op("Transpose", net.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return net.dense(net.op("Reshape", context, net.sizes(0, length, width)), width, width)


def _normalize(net: _Drawn, x: str, width: int) -> str:
    return net.op("LayerNormalization", x, net.constant(1.0, width), net.bias(width), axis=-1, epsilon=1e-5)


MODELS: Mapping[str, Callable[[_Drawn, Size], tuple[tuple[int, ...], Dim]]] = {
    "mlp": _mlp,
    "conv": _conv,
    "block": _block,
}

# The tasks of the kit: every backend on every model of the kit, and engines that were built for other generations.
#
# Discovery lists the backends. If a backend cannot do a task, the task is `Skipped` with the reason: not installed, not
# for this kind of target, or refused.


@dataclass(frozen=True)
class BuildTask:
    """An engine to build and run. request: its target may differ from this machine's.

    options: of the backend, without those at their defaults.
    """

    name: str
    model: KitModel
    request: BuildRequest
    options: Mapping[str, Scalar] = field(default_factory=dict)


def own_tasks(models: Sequence[KitModel], device: KitDevice, only: Sequence[str] = ()) -> Iterator[BuildTask | Skipped]:
    """The tasks of each backend for this device. only: names of backends; empty for all."""
    for name in choose_backends(only):
        backend = discovery.configure(name, {})
        if reason := explain_absence(backend, device.target):
            yield Skipped(name, "", name, "", device.target.name, reason)
            continue
        # One task with the defaults, and one with CUDA graphs switched if the backend has that option.
        variants: list[dict[str, Scalar]] = [{}]
        if (option := backend.capabilities.options.cuda_graphs) and not device.is_cpu:
            variants.append({option: not dict(discovery.options_of(backend))[option]})
        for model in models:
            for options in variants:
                yield _task(discovery.configure(name, options), model, device.target, options)


def other_tasks(model: KitModel, device: KitDevice, only: Sequence[str] = ()) -> Iterator[BuildTask | Skipped]:
    """Tasks for engines of other generations, to test which run on this GPU; none if the device is the CPU.

    Only for backends that build without their target's GPU.
    """
    if device.is_cpu:
        return
    for name in choose_backends(only):
        backend = discovery.configure(name, {})
        if backend.capabilities.tunes_on_target or explain_absence(backend, device.target):
            continue
        for generation in GENERATIONS:
            if generation.compute_capability != device.target.compute_capability:
                yield _task(backend, model, Target(generation.sm, generation.compute_capability), {})


def choose_backends(only: Sequence[str]) -> list[str]:
    """The names `only`, or of all registered backends if empty. Raises UnknownNameError for an unregistered backend."""
    for name in only:
        discovery.load(name)
    return list(only) or discovery.names()


def explain_absence(backend: Backend, target: Target) -> str:
    """The reason why a backend cannot build for this target on this machine; '' if it can."""
    if not backend.serves(target):
        return f"builds no engines for {target.name}"
    return "" if backend.versions() else f"not installed; {backend.install}"


def request_for(backend: Backend, model: KitModel, target: Target) -> BuildRequest:
    """The request to build a model, with the whole range of the batch in one profile."""
    return BuildRequest(
        model=digest_of_file(model.path),
        precision=model.precision,
        target=target,
        backend=backend.name,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=(model.profile,),
        options=discovery.options_of(backend),
        toolchain=discovery.toolchain_of(backend, target),
    )


def model_key(model: KitModel) -> str:
    """The name of a model in results: 'mlp fp16'."""
    return f"{model.name} {model.precision}"


def _task(backend: Backend, model: KitModel, target: Target, options: Mapping[str, Scalar]) -> BuildTask | Skipped:
    request = request_for(backend, model, target)
    options_text = " ".join(f"{name}={value}" for name, value in options.items())
    name = " ".join(filter(None, (backend.name, model_key(model), target.name, options_text)))
    if reason := backend.refuses(request):
        return Skipped(name, model_key(model), backend.name, model.precision, target.name, reason, refused=True)
    return BuildTask(name, model, request, options)
