"""A look at an ONNX file: what it takes and gives, what it is made of, and at which sizes it runs."""

from collections import Counter
from pathlib import Path

import onnx

from pipeline.drafts.found import FoundModel, model_name, name_axes
from pipeline.drafts.probing import find_dims, open_graph
from pipeline.sources.onnx_model import load_onnx, specs_of
from pipeline.sources.walk import all_nodes, all_tensors

# Operators whose weights int8 makes smaller and faster.
_HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "Attention"})
_INTEGER = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "DynamicQuantizeMatMul"})
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})


def look_at_onnx(path: Path, shown: str) -> FoundModel:
    """What an ONNX file holds. shown: the path as the spec will have it. Raises ModelError as `load_onnx`."""
    model = load_onnx(path, path.resolve().parent)
    inputs, outputs = specs_of(model)
    counts = Counter(node.op_type for node in all_nodes(model))
    found = FoundModel(
        name=model_name(path.stem if path.stem != "model" else path.resolve().parent.name),
        source={"onnx": shown},
        inputs=name_axes(inputs),
        outputs=tuple(spec.name for spec in outputs),
        precisions=_precisions(model, counts),
        notes=tuple(_notes(model, counts, path)),
    )
    return find_dims(found, lambda: open_graph(model, found.name))


def _notes(model: onnx.ModelProto, counts: Counter[str], path: Path) -> list[str]:
    """One line on the whole file, and one for each input that decides which branch of an If runs."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    by = f", written by {model.producer_name}" if model.producer_name.isprintable() and model.producer_name else ""
    most = ", ".join(f"{count} {name}" for name, count in counts.most_common(4))
    size = path.stat().st_size / (1 << 20)
    return [
        f"{path.name}: {size:.1f} MiB, opset {opset}{by}; {counts.total()} nodes: {most}",
        *(
            f"{name!r} decides which branch of an If runs: with a value for it in source.arguments, and not in inputs, "
            "that branch alone is built, in every precision"
            for name in sorted(_deciding_inputs(model))
        ),
    ]


def _deciding_inputs(model: onnx.ModelProto) -> set[str]:
    """The scalar inputs that conditions of Ifs are computed from, where nothing else is."""
    makers = {name: node for node in model.graph.node for name in node.output}
    inputs = {spec.name: spec for spec in specs_of(model)[0]}
    found = set[str]()
    for node in (node for node in model.graph.node if node.op_type == "If"):
        reached, todo = set[str](), [node.input[0]]
        while todo:
            name = todo.pop()
            reached |= {name} & inputs.keys()
            todo += makers[name].input if name in makers else ()
        found |= reached if all(not inputs[name].shape for name in reached) else set()
    return found


def _precisions(model: onnx.ModelProto, counts: Counter[str]) -> tuple[tuple[str, str], ...]:
    """Precisions that make sense for what the graph is made of."""
    if "QuantizeLinear" in counts:
        return (("int8", "the graph as it is: it carries Q/DQ nodes, and other precisions would quantize twice"),)
    if quantized := counts.keys() & (_INTEGER | {"DynamicQuantizeLSTM"}):
        names = ", ".join(sorted(quantized))
        return (
            ("fp32", f"the graph as it is: it came quantized ({names}), and other precisions would quantize twice"),
        )
    if "DequantizeLinear" in counts:
        return (("fp32", "the graph as it is: it computes in float with weights that came in 8 or 4 bits"),)
    if counts.keys() & _TREES:
        return (("fp32", "the graph as it is: decision trees have no weights that 16 or 8 bits would make smaller"),)
    bits = {tensor.data_type for tensor in all_tensors(model) if len(tensor.dims) > 1}
    if onnx.TensorProto.FLOAT16 in bits and onnx.TensorProto.FLOAT not in bits:
        return (("fp32", "the graph as it is: its weights are float16"),)
    heavy = sum(counts[name] for name in _HEAVY)
    chosen = [("fp32", "the graph as it is"), ("fp16", "half the size; for GPUs")]
    return tuple(chosen if heavy else chosen[:1])
