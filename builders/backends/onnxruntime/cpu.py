"""ONNX Runtime: the engine for `cpu` targets, and the interpreter that reference graphs run on.

The engine is the optimised graph, saved as ONNX. By default only rewrites that hold on any CPU are saved ("extended":
constant folding and fusions). The host-specific layout is applied when the engine is opened, for the CPU that opens it:
it is NCHWc, whose block is the vector width of that CPU (16 floats with AVX-512, 8 with AVX2). On a stack of seven 3x3
convolutions that makes loading take 10 ms instead of 7 ms, and running 34 ms of CPU instead of 53 ms without it.
`graph_optimization="all"` saves the layout too: then the kind of CPU is part of the toolchain, hence of the build key,
and an engine opened on another kind is refused instead of giving wrong numbers.

int8: every session here computes exactly, on CPUs without VNNI too (`saturation`). That has a price there, which
`reduced_range` avoids at the price of precision (docs/concepts/cpu-kinds.md); a serving node that opens an engine by
itself must ask for the same where the engine's notes say so.

fp16: operators without an fp16 kernel compute in fp32, and values between them are not rounded to fp16, whatever the
optimization level (Sqrt(Mul(x, x)) of 300 gives 300; in fp16 it is infinite). An fp16 graph run here therefore shows
the rounding of its weights, not of its activations; explicit pairs of Cast in an fp32 graph do round.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from builders.backends.compatibility import check_compatible
from builders.backends.discovery import PackageNotFoundError, version
from builders.backends.onnxruntime.reasons import failures, why_unreadable, words_of
from builders.backends.optional_methods import RunProfile
from enginery.core.capabilities import Capabilities
from enginery.core.errors import EngineryError, InputError, ModelError
from enginery.core.hardware.targets import EXACT_SESSION, this_kind, why_no_proof
from enginery.core.requirements import Requirement, SessionOption, for_target, later_versions
from enginery.core.types import (
    BuildRequest,
    Engine,
    QuantizationScheme,
    Session,
    ShapeProfile,
    Target,
    Tensors,
    TensorSpec,
    Untyped,
    WeightLevels,
)

if TYPE_CHECKING:
    import numpy as np

# What to apply while building, and what to apply while opening the result.
_LEVELS = {
    "none": ("ORT_DISABLE_ALL", "ORT_DISABLE_ALL"),
    "extended": ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"),
    "all": ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"),
}
# Fusions whose kernel is slower than its parts. Measured with 1.31 on MiniLM (batch 8, 64 tokens, one thread): 145 ms
# with both, 131 ms without the first, 128 ms without either; of its int8 engine 80, 73 and 69 ms.
_SLOWER_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion")
# Threads that wait for the next operator stay awake so long. Asleep at once, they cost a small net 15 to 50 µs a run to
# wake; ONNX Runtime's default keeps them busy for some 20 ms after each run, on cores that builds share.
_SPIN_US = "200"
# The note of an engine whose file holds int8 weights that saturate there (`saturation`).
SATURATES = f"its int8 weights saturate on x86-64 without VNNI: open it there with {' = '.join(EXACT_SESSION)}"
_FLOATS = {"float": "float32", "double": "float64"}  # ONNX Runtime's names that differ from numpy's
_IO = {
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "bool",
}


@dataclass(frozen=True)
class OnnxRuntime:
    """The ONNX Runtime backend.

    graph_optimization: 'extended' (portable file), 'all' (the host CPU's layout saved too) or 'none'.
    intra_op_threads: threads of one operator when the engine is run; 0 is one per core.
    reduced_range: int8 weights within -64..64, which no CPU's kernels saturate with (ONNX Runtime's `reduce_range`).
    """

    name: ClassVar[str] = "onnxruntime"
    revision: ClassVar[int] = 4
    install: ClassVar[str] = "pip install onnxruntime"
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="bytes",
        times_nodes=True,
        opens_parts=True,
        thread_safe=True,
        rounds_activations=True,  # in MatMulNBits, by default (session.qdq_matmulnbits_accuracy_level 4)
    )

    graph_optimization: str = "extended"
    intra_op_threads: int = 0
    reduced_range: bool = False

    def __post_init__(self) -> None:
        if self.graph_optimization not in _LEVELS:
            known = ", ".join(map(repr, _LEVELS))
            raise InputError(
                f"backends.onnxruntime.graph_optimization: {self.graph_optimization!r} is not one of {known}"
            )
        if self.intra_op_threads < 0:
            raise InputError(f"backends.onnxruntime.intra_op_threads: {self.intra_op_threads} is negative; 0 means all")

    def serves(self, target: Target) -> bool:
        """CPU only."""
        return target.is_cpu

    def versions(self) -> dict[str, str]:
        """ONNX Runtime's version, and the kind of CPU where the engine depends on it."""
        try:
            found = {"onnxruntime": version("onnxruntime")}
        except PackageNotFoundError:
            return {}
        return {**found, "cpu": this_kind().name} if self.graph_optimization == "all" else found

    def scheme(self) -> QuantizationScheme:
        """Asymmetric uint8 activations, which x86's VNNI kernels take, and int32 biases."""
        levels: WeightLevels = 64 if self.reduced_range else 127
        return QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32", weight_levels=levels)

    def refuses(self, request: BuildRequest) -> str | None:
        """GPU targets, bf16, fp8, arrays of types that numpy lacks, and everything where it is not installed."""
        if not self.serves(request.target):
            return f"onnxruntime compiles for the CPU here, not for {request.target.name}; use tensorrt-rtx or tensorrt"
        if self.graph_optimization == "all" and (reason := why_no_proof(request)):
            return f"graph_optimization='all' saves the layout of this machine's CPU: {reason}"
        if request.precision == "bf16":
            return "onnxruntime has no bfloat16 kernels for the CPU; use fp32, or int8 for speed"
        if request.precision == "fp8":
            return "CPUs have no FP8 arithmetic; use int8"
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype not in _IO:
                return f"{spec.name!r} is {spec.dtype}, of which onnxruntime takes no arrays; cast it inside the model"
        if not self.versions():
            return f"onnxruntime is not installed; {self.install}"
        return None

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """A CPU, the very kind for a saved layout; of other releases a remark: they read an ONNX file, later ones all.
        Whether its sums may saturate, the file alone tells (`build`)."""
        toolchain = dict(request.toolchain)
        only = toolchain.get("cpu", "") if self.graph_optimization == "all" else ""
        saved = later_versions(toolchain, "onnxruntime", strict=False, remark="saved by onnxruntime")
        return (for_target(request.target, only=only), *saved)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Optimise `model` into WORKDIR/engine.onnx and open it once. Raises ModelError with ONNX Runtime's reason."""
        from builders.backends.onnxruntime.file import embed_weights
        from builders.backends.onnxruntime.rewrites import (
            FUSION,
            cast_first,
            file_moves_first_axis,
            fuse_bias,
            split_convolutions,
        )
        from builders.backends.onnxruntime.saturation import file_may_saturate

        path = workdir / "engine.onnx"
        without = (FUSION,) if self.graph_optimization == "all" and file_moves_first_axis(model) else ()
        options = session_options(_LEVELS[self.graph_optimization][0], self.intra_op_threads, without)
        options.optimized_model_filepath = str(path)
        open_model(model, options, exact=False)
        notes = embed_weights(path, model.parent) + cast_first(path)
        if self.graph_optimization != "none":
            fuse_bias(path)
            split_convolutions(path)
        self.open_part(path)
        saturates = file_may_saturate(path)
        also = (SessionOption(*EXACT_SESSION),) if saturates else ()
        notes += (SATURATES,) if saturates else ()
        return Engine.of_file(self, request, path, notes, also)

    def runs(self, target: Target) -> str | None:
        """A CPU is always at hand."""
        return None if target.is_cpu else f"onnxruntime runs on the CPU here, not on {target.name}"

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load the engine. Raises as `check_compatible` does, and ModelError when it cannot be read."""
        check_compatible(self, engine)
        with self.open_part(engine.path) as session:
            yield session

    def load_runtime(self) -> None:
        """Import ONNX Runtime."""
        import onnxruntime  # noqa: F401

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:
        """Time each node of the graph as it is executed, this CPU's layout included. The trace is left in `workdir`."""
        from builders.backends.onnxruntime.profile import profile_nodes

        level = _LEVELS[self.graph_optimization][1]
        return profile_nodes(
            engine.path, inputs, runs, workdir, lambda: session_options(level, self.intra_op_threads), open_model
        )

    def open_part(self, path: Path, *, as_written: bool = False) -> "OrtSession":
        """See `parts.PartOpening`."""
        level = "ORT_DISABLE_ALL" if as_written else _LEVELS[self.graph_optimization][1]
        return OrtSession(path, level=level, threads=self.intra_op_threads)


class OrtSession(Session):
    """An ONNX model opened on the CPU.

    optimized: False runs the graph exactly as written, which is what a reference needs.
    threads: threads of one operator; 0 is one per core.  level: ONNX Runtime's own name, instead of `optimized`.
    opens: makes ONNX Runtime's session from a file and its options, instead of one on the CPU.
    name: what errors call the model; default: its file's name.
    profiles: shapes that it answers for; none means every shape of its inputs.
    Raises ModelError, naming the operator where that is the reason, when the model cannot be read or run.
    """

    def __init__(
        self,
        model: Path,
        *,
        optimized: bool = True,
        threads: int = 0,
        level: str | None = None,
        opens: Callable[[Path, Untyped], Untyped] | None = None,
        name: str | None = None,
        profiles: Sequence[ShapeProfile] = (),
    ) -> None:
        from enginery.arrays import InputCheck

        level = level or ("ORT_ENABLE_ALL" if optimized else "ORT_DISABLE_ALL")
        self._name = name or model.name
        self._session = (opens or partial(open_model, name=name))(model, session_options(level, threads))
        self.inputs: Sequence[TensorSpec] = [_spec(model, value) for value in self._session.get_inputs()]
        self.outputs: Sequence[TensorSpec] = [_spec(model, value) for value in self._session.get_outputs()]
        self._output_names = [spec.name for spec in self.outputs]
        self._check = InputCheck(self.inputs, profiles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._session = None  # frees its memory

    def run(self, inputs: Tensors) -> "dict[str, np.ndarray]":
        """Run once. Raises DataError for arrays that do not fit, ModelError when an operator fails on them."""
        if self._session is None:
            raise EngineryError(f"{self._name}: the session is closed; open it again")
        self._check(inputs)
        names = self._output_names
        try:
            return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))
        except failures() as error:
            raise ModelError(f"{self._name}: onnxruntime failed while running: {words_of(error)}") from error

    def prepare_call(self, inputs: Tensors) -> Callable[[], object]:
        """ONNX Runtime's own call on these inputs, checked here. Raises as `run` does."""
        self.run(inputs)
        return partial(self._session.run, self._output_names, dict(inputs))


def session_options(level: str, threads: int, without: Sequence[str] = ()) -> Untyped:
    """Options of a session. level: ONNX Runtime's own name.  threads: of one operator; 0 is one per core.

    without: names of optimizers to leave out, besides those that make a graph slower.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what it logs as an error it also raises
    left_out = ";".join((*_SLOWER_FUSIONS, *without))
    options.add_session_config_entry("optimization.disable_specified_optimizers", left_out)
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    return options


def open_model(model: Path, options: Untyped, exact: bool = True, name: str | None = None) -> Untyped:
    """ONNX Runtime's session on the CPU. Raises ModelError with its reason.

    exact: False where the session only saves a graph, which must be the same on every CPU.
    name: what the error calls the model; default: its file's name.
    """
    import onnxruntime as ort

    source: str | bytes = str(model)
    if exact and this_kind().saturates:
        from builders.backends.onnxruntime.saturation import exact_source

        source = exact_source(model, options)
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except failures() as error:
        raise ModelError(f"{name or model.name}: {why_unreadable(error, model)}") from error


def _spec(model: Path, value: Untyped) -> TensorSpec:
    found = re.fullmatch(r"tensor\((\w+)\)", value.type)
    if not found:
        raise ModelError(f"{model.name}: {value.name!r} is a {value.type}; only tensors can be inputs and outputs")
    shape = tuple(f"{value.name}.{axis}" if dim is None else dim for axis, dim in enumerate(value.shape))
    return TensorSpec(value.name, _FLOATS.get(found[1], found[1]), shape)
