"""The file and the session of an ONNX Runtime engine on a GPU provider; that it runs on the CPU is an error.

ONNX Runtime gives a session on the CPU, with a warning at most, when a provider is missing in the wheel or its
libraries do not load, whatever `enable_fallback` says (microsoft/onnxruntime#17801; seen with both wheels of 1.31 on a
host without CUDA). So the providers are checked before and after, and operators that were placed on the CPU provider
are refused unless they only compute shapes, which CUDA leaves to the CPU on purpose. Never run on a GPU.
"""

from collections.abc import Sequence
from pathlib import Path

from builders.backends.onnxruntime.session import OrtSession, failures, words_of
from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.text import join_first
from enginesmith.core.types import ShapeProfile, Untyped

_MOST_TYPES = 3
_MOST_BYTES = (1 << 31) - 1  # of a protobuf
CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
# Both wheels are the module `onnxruntime`: the one installed last is the one that runs.
INSTALL = "pip install --no-deps --force-reinstall onnxruntime-gpu, of onnxruntime's version"
ProviderOptions = dict[str, str]
# Operators that the CUDA provider leaves to the CPU where they compute shapes; it has kernels for all others of them.
_OF_SHAPES = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor"}
    | {"Gather", "Greater", "Identity", "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "ReduceProd"}
    | {"Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"}
)
_SHOWN = 3


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
    kinds = ", ".join(sorted(set(rest))[:_MOST_TYPES])
    return (f"{len(rest)} operators are outside of TensorRT's engines and run on the CUDA provider: {kinds}",)


class GpuSession(OrtSession):
    """An engine opened on a GPU provider, which takes shapes within its profiles only.

    providers: with their options, the engine's own first.  cpu_operators: whether more than shapes may be computed on
    the CPU. Raises EnginesmithError when ONNX Runtime falls back to another device, ModelError when it cannot read the
    engine.
    """

    def __init__(
        self,
        model: Path,
        profiles: Sequence[ShapeProfile],
        providers: Sequence[tuple[str, ProviderOptions]],
        *,
        cpu_operators: bool = False,
    ) -> None:
        def opens(model: Path, options: Untyped) -> Untyped:
            import onnxruntime as ort

            check_available(ort.get_available_providers(), providers[0][0])
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            try:
                session = ort.InferenceSession(str(model), options, providers=list(providers), enable_fallback=0)
            except provider_failures() as error:
                words = f"{model.name}: {providers[0][0]} cannot load it: {words_of(error)}"
                raise ModelError(f"{words}; build it again") from error
            _check_placed(model, session, providers[0][0], cpu_operators)
            return session

        super().__init__(model, opens=opens, profiles=profiles)


def provider_failures() -> tuple[type[Exception], ...]:
    """The classes that opening on a provider raises: ONNX Runtime's, and RuntimeError where a library does not load."""
    return (*failures(), RuntimeError)


def check_available(available: Sequence[str], provider: str) -> None:
    """Raise EnginesmithError when the installed ONNX Runtime has no such provider."""
    if provider not in available:
        raise EnginesmithError(f"onnxruntime here has {', '.join(available)}, and no {provider}; {INSTALL}")


def _check_placed(model: Path, session: Untyped, provider: str, cpu_operators: bool) -> None:
    """Raise EnginesmithError when the session is not the provider's, or computes more than shapes on the CPU."""
    found = session.get_providers()
    if found[0] != provider:
        raise EnginesmithError(
            f"{model.name}: {provider} did not load, and onnxruntime would run on {found[0]}; check the driver, CUDA, "
            "cuDNN and TensorRT against the versions that onnxruntime-gpu needs"
        )
    placed = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == CPU]
    nodes = [node for part in placed for node in part.get_nodes() if node.op_type not in _OF_SHAPES]
    if nodes and not cpu_operators:
        shown = join_first([f"{node.op_type} {node.name!r}" for node in nodes], _SHOWN)
        raise EnginesmithError(
            f"{model.name}: {len(nodes)} operators have no kernel in {provider} and would run on the CPU: {shown}; "
            "use another backend, or set cpu_operators: true to accept it"
        )
