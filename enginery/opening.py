"""Opens an engine of ONNX Runtime as the JSON beside it says."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from enginery.core.errors import DataError, IntegrityError
from enginery.core.parsing import field, parse_json, text
from enginery.core.types import Tensors

# Of a description.
MOST_BYTES = 16 << 20


class DescribedFile(Protocol):
    """A pulled engine (`client.pull.Pulled`), as far as it takes to open it."""

    @property
    def description(self) -> Path:
        """The JSON beside the engine."""
        ...


def open_onnx(engine: DescribedFile | Path | str) -> Callable[[Tensors], Tensors]:
    """A function that runs an engine of ONNX Runtime once on all of its inputs, by name, on the CPU. engine: a pulled
    one, the file of one, or the JSON beside it.

    Raises DataError for what is no engine, for several graphs (`Ensemble`) and for an engine of another compiler, which
    its own runtime opens; and what onnxruntime raises.
    """
    path = Path(engine if isinstance(engine, Path | str) else engine.description).with_suffix(".json")
    try:
        found = parse_json(path.read_bytes(), MOST_BYTES)
        file = path.parent / field(found, "file", text)
    except (OSError, IntegrityError) as error:
        raise DataError(f"{path} describes no engine: {error}") from error
    if "graphs" in found:
        raise DataError(f"{path.name} describes several graphs; use enginery.Ensemble, which opens each of them")
    if file.suffix != ".onnx":
        raise DataError(
            f"{file.name} is no engine of onnxruntime, and its own runtime opens it: give `opens` to a router or an "
            "ensemble, and `run` to streams and generators"
        )
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))
