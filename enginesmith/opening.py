"""Opens an engine of ONNX Runtime with the JSON beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.arrays import InputCheck
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors, Untyped
from enginesmith.descriptions import (
    DescribedGraph,
    decode_description,
    find_engine,
    find_libraries,
    read_description,
    read_engine,
)

if TYPE_CHECKING:
    from enginesmith.client.pull import Pulled

# The option with the folder of weight files, for a model that the session gets as bytes.
_SHARDS_FOLDER = "session.model_external_initializers_file_folder_path"


def open_onnx(engine: "Pulled | Path | str") -> Callable[[Tensors], Tensors]:
    """Open an engine of ONNX Runtime; return a function that runs it once on all of its inputs, by name, on the CPU.
    engine: a pulled engine, its file, or the JSON beside it.

    The function raises DataError for inputs of sizes that the engine was not built and proven for.

    Raises DataError if it is no engine, for several graphs (`Ensemble`) and for an engine of another compiler, which
    its own runtime opens; IntegrityError for other bytes than were published; and errors of onnxruntime.
    """
    path = Path(engine if isinstance(engine, Path | str) else engine.description).with_suffix(".json")
    description = read_description(path)
    if "graphs" in description:
        raise DataError(f"{path.name} describes several graphs; use enginesmith.Ensemble, which opens each of them")
    file = find_engine(path, description)
    if Path(str(description["file"])).suffix != ".onnx":
        raise DataError(
            f"{file.name} is not an engine of onnxruntime; its own runtime opens it: give `opens` to a router or an "
            "ensemble, and `run` to streams and generators"
        )
    graph = decode_description(description, DescribedGraph, path)
    import onnxruntime

    options, engine_bytes = onnxruntime.SessionOptions(), read_engine(path, description)
    for library in find_libraries(path, description):
        options.register_custom_ops_library(str(library))
    session = open_session(engine_bytes, file.parent, options)
    output_names, check = [output.name for output in session.get_outputs()], InputCheck(graph.inputs, graph.profiles)

    def run(inputs: Tensors) -> Tensors:
        if graph.profiles:
            check(inputs)
        return dict(zip(output_names, session.run(output_names, dict(inputs)), strict=True))

    return run


def open_session(model: bytes, folder: Path, options: Untyped) -> Untyped:
    """A session of ONNX Runtime on the CPU. folder: of the model's shards.  options: `SessionOptions`, which this
    function changes. Raises errors of onnxruntime."""
    import onnxruntime

    options.add_session_config_entry(_SHARDS_FOLDER, str(folder))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session._model_bytes = None  # otherwise the bytes stay in memory, to be opened for other providers
    return session
