"""From a request to the serialized engine: the calls of TensorRT's builder that both flavours share."""

from collections.abc import Iterable
from pathlib import Path

from builders.backends.tensorrt.words import parser_reason
from enginery.core.errors import ModelError
from enginery.core.types import ShapeProfile
from enginery.core.untyped import Untyped


def check_model(model: Path) -> None:
    """Raise ModelError when the ONNX checker refuses the model. TensorRT's parser accepts empty and garbage files."""
    import onnx

    try:
        onnx.checker.check_model(str(model))
    except Exception as error:  # the checker raises protobuf's, its own and the standard library's classes alike
        raise ModelError(f"{model.name} is no valid ONNX model: {error}; export it again") from error


def parse_network(trt: Untyped, said: Untyped, builder: Untyped, model: Path, edition: tuple[str, str]) -> Untyped:
    """A strongly typed network of the model. flavour: title and name, for words.

    Raises ModelError naming node, operator and reason. The parser reads from the path, so that external data is found;
    and says True to some input it could not use.
    """
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, said)
    if not parser.parse_from_file(str(model)) or parser.num_errors:
        problems = [parser.get_error(index) for index in range(parser.num_errors)]
        raise ModelError(parser_reason(*edition, problems))
    if network.num_layers == 0:
        raise ModelError(f"{edition[0]} found no operators in {model.name}; export it again")
    return network


def _network_flags(trt: Untyped) -> int:
    """Strong typing is a choice in TensorRT 10. Later releases and RTX have nothing else and deprecate the flag."""
    if not trt.__version__.startswith("10."):
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def add_profiles(builder: Untyped, config: Untyped, profiles: Iterable[ShapeProfile]) -> None:
    """One optimization profile each. What is wrong with one stands in the log, and the build then fails."""
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, low, best, high in shapes.inputs:
            profile.set_shape(name, low, best, high)
        config.add_optimization_profile(profile)


def has_profile(name: str, profiles: Iterable[ShapeProfile]) -> bool:
    """Whether every profile says the shapes of this input, and there is one."""
    found = [any(entry[0] == name for entry in shapes.inputs) for shapes in profiles]
    return bool(found) and all(found)
