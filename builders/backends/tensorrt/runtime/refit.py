"""New weights for an engine that was built to take them, from the ONNX model that has them. Never run on a GPU.

A refittable engine holds its kernels chosen and its weights replaceable; which weights those are, TensorRT knows by the
names of the model's initializers. A stripped one holds none and gets them the same way whenever it is opened. Whether
another model is the same but for its weights is found before, by `builders.onnx_graphs.structure`.
"""

from pathlib import Path

from builders.backends.tensorrt.words import builder_reason, clean
from enginery.core.errors import EngineryError
from enginery.core.text import join_first
from enginery.core.untyped import Untyped

_SHOWN = 5


def refit(trt: Untyped, said: Untyped, loaded: Untyped, model: Path) -> None:
    """Give a loaded engine the weights of an ONNX model. Raises EngineryError naming what lacks or does not fit."""
    refitter = trt.Refitter(loaded, said)
    parser = trt.OnnxParserRefitter(refitter, said)
    if not parser.refit_from_file(str(model)):
        problems = [clean(parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise EngineryError(
            f"the weights of {model.name} do not fit: {_reason(problems, said)}; build the engine again"
        )
    missing = refitter.get_missing_weights()
    if missing or not refitter.refit_cuda_engine():
        lacks = f"{model.name} lacks {join_first(missing, _SHOWN)}" if missing else _reason([], said)
        raise EngineryError(f"the engine did not take the new weights: {lacks}; build it again")


def serialize_engine(trt: Untyped, loaded: Untyped, said: Untyped) -> bytes:
    """A loaded engine as bytes, with its weights, refittable as before."""
    config = loaded.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    config.set_flag(trt.SerializationFlag.INCLUDE_REFIT)
    data = loaded.serialize_with_config(config)
    if data is None:
        raise EngineryError(builder_reason("the refitted engine", "tensorrt", said.messages))
    return bytes(data)


def _reason(problems: list[str], said: Untyped) -> str:
    errors = [clean(text) for level, text in said.messages if "ERROR" in level]
    return "; ".join(dict.fromkeys([*problems, *errors])) or "TensorRT gives no reason"
