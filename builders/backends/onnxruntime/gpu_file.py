"""The file of a GPU engine of ONNX Runtime: the graph in one piece, and what of it a compiler left over."""

from pathlib import Path

from enginery.core.errors import ModelError

_SHOWN = 3
_MOST_BYTES = (1 << 31) - 1  # of a protobuf


def write_whole(model: Path, path: Path) -> None:
    """Write the model with its external data into one file. Raises ModelError when it is invalid or over 2 GB."""
    import onnx

    try:
        onnx.checker.check_model(str(model))
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{model.name} is no valid ONNX model: {error}; export it again") from error
    loaded = onnx.load(model)
    if loaded.ByteSize() > _MOST_BYTES:
        raise ModelError(f"{model.name} has {loaded.ByteSize()} bytes; an engine in one file holds 2 GB; use tensorrt")
    onnx.save(loaded, path)


def left_over(path: Path) -> tuple[str, ...]:
    """A note on the operators of a compiled model that are in no TensorRT engine, if there are any."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    rest = [node.op_type for node in graph.node if node.op_type != "EPContext"]
    if not rest:
        return ()
    kinds = ", ".join(sorted(set(rest))[:_SHOWN])
    return (f"{len(rest)} operators are outside of TensorRT's engines and run on the CUDA provider: {kinds}",)
