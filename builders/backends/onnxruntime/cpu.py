"""ONNX Runtime: the engine for `cpu` targets, and the interpreter that reference graphs run on.

The engine is the optimised graph, saved as ONNX. By default only rewrites that are valid on any CPU are saved
("extended": constant folding and fusions). The layout NCHWc, whose block is the vector width of a CPU (16 floats with
AVX-512, 8 with AVX2), is applied by the CPU that opens the engine. On a stack of seven 3x3 convolutions loading then
takes 10 ms instead of 7 ms, and running 34 ms of CPU time instead of 53 ms.
`graph_optimization="all"` saves the layout too: then the kind of CPU is part of the toolchain, hence of the build key,
and an engine opened on another kind is refused instead of giving wrong numbers.

int8: an engine for a kind of CPU without VNNI is right there in any session, and is opened here without options. Its
weights lie within -64..64, or are stored as uint8 (`saturation`), which is slower and loses nothing
(docs/concepts/quantization.md#kinds-of-cpu). One that was built for another kind requires a CPU whose kernels add in
32 bits.

fp16: operators without an fp16 kernel compute in fp32, and values between them are not rounded to fp16, whatever the
optimization level (Sqrt(Mul(x, x)) of 300 gives 300; in fp16 it is infinite). An fp16 graph run here therefore shows
the rounding of its weights, not of its activations; explicit pairs of Cast in an fp32 graph do round.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from builders.backends.discovery import check_compatible
from builders.backends.installed_versions import versions_of
from builders.backends.onnxruntime.session import OrtSession, open_model, session_options
from builders.backends.optional_methods import RunProfile
from builders.backends.request_checks import check_choice, check_not_negative, unbounded
from enginesmith.core.capabilities import Capabilities
from enginesmith.core.errors import ModelError
from enginesmith.core.hardware.cpu_kinds import kind_built_for, kind_named, kind_of, this_kind, why_no_proof
from enginesmith.core.requirements import LIBRARY_ENTRY, Requirement, WideSums, for_target, later_versions
from enginesmith.core.types import (
    IN_BLOCKS,
    NARROW_FLOATS,
    BuildRequest,
    Engine,
    QuantizationScheme,
    Session,
    Target,
    Tensors,
    WeightLevels,
)

# Option -> ONNX Runtime's levels: while building, and while opening the result.
_LEVELS = {
    "none": ("ORT_DISABLE_ALL", "ORT_DISABLE_ALL"),
    "extended": ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"),
    "all": ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"),
}
_IO = {"float16", "float32", "float64", "bool"} | {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class OnnxRuntime:
    """The ONNX Runtime backend.

    graph_optimization: 'extended' (portable file), 'all' (the host CPU's layout saved too) or 'none'.
    intra_op_threads: threads of one operator when the engine is run; 0 is one per core.
    reduced_range: int8 weights within -64..64, which no CPU's kernels saturate with (ONNX Runtime's `reduce_range`):
    'where-needed', for kinds of CPU whose kernels saturate, 'always' or 'never'.
    """

    name: ClassVar[str] = "onnxruntime"
    revision: ClassVar[int] = 7
    install: ClassVar[str] = "pip install onnxruntime"
    runtime: ClassVar[str] = "onnxruntime"
    # Asymmetric uint8 activations, which x86's VNNI kernels take, and int32 biases.
    scheme: ClassVar[QuantizationScheme] = QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32")
    capabilities: ClassVar[Capabilities] = Capabilities(
        determinism="bytes",
        thread_safe=True,
        shards=True,
        library_entries=(LIBRARY_ENTRY,),
        rounds_activations=True,  # in MatMulNBits, see `build`
        opened_by=("Triton", "ONNX Runtime"),
    )

    graph_optimization: str = "extended"
    intra_op_threads: int = 0
    reduced_range: str = "where-needed"

    def __post_init__(self) -> None:
        check_choice(self, "graph_optimization", _LEVELS)
        check_choice(self, "reduced_range", ("where-needed", "always", "never"))
        check_not_negative(self, "intra_op_threads", "means all")

    def serves(self, target: Target) -> bool:
        """CPU only."""
        return target.is_cpu

    def versions(self) -> dict[str, str]:
        """ONNX Runtime's version, and the kind of CPU where the engine depends on it."""
        package_versions = versions_of("onnxruntime")
        if package_versions and self.graph_optimization == "all":
            return {**package_versions, "cpu": this_kind().name}
        return package_versions

    def scheme_for(self, target: Target) -> QuantizationScheme:
        """See `optional_methods.SchemesByTarget`: weights within -64..64 for kinds of CPU whose kernels saturate."""
        kind = kind_named(kind_of(target))
        is_needed = self.reduced_range == "where-needed" and kind is not None and kind.saturates
        level_count: WeightLevels = 64 if is_needed or self.reduced_range == "always" else 127
        return replace(self.scheme, weight_levels=level_count)

    def refuses(self, request: BuildRequest) -> str | None:
        """Why a request cannot be built: a GPU, a saved layout for another kind of CPU, bf16, a narrow float, an input
        or output of a type that numpy lacks, no onnxruntime. None if it can."""
        if not self.serves(request.target):
            return f"onnxruntime compiles for the CPU here, not for {request.target.name}; use tensorrt-rtx or tensorrt"
        if self.graph_optimization == "all" and (reason := why_no_proof(request)):
            return f"graph_optimization='all' saves the layout of this machine's CPU: {reason}"
        if request.precision == "bf16":
            return "onnxruntime has no bfloat16 kernels for the CPU; use fp32, or int8 for speed"
        if request.precision in NARROW_FLOATS:
            return f"CPUs have no {request.precision.upper()} arithmetic; use int8"
        for spec in (*request.inputs, *request.outputs):
            if spec.dtype not in _IO:
                return f"{spec.name!r} is {spec.dtype}; onnxruntime takes no such arrays: cast it inside the model"
        if not self.versions():
            return f"onnxruntime is not installed; {self.install}"
        return None

    def requires(self, request: BuildRequest) -> tuple[Requirement, ...]:
        """A CPU (of the same kind, if the layout is saved), and a remark about other releases of ONNX Runtime: later
        ones read every file. `build` adds the requirement of sums in 32 bits, which depends on the file."""
        toolchain = dict(request.toolchain)
        cpu_kind = toolchain.get("cpu", "") if self.graph_optimization == "all" else ""
        remarks = later_versions(toolchain, "onnxruntime", strict=False, remark="saved by onnxruntime")
        return (for_target(request.target, only=cpu_kind), *remarks)

    def build(self, request: BuildRequest, model: Path, workdir: Path) -> Engine:
        """Optimise `model` into WORKDIR/engine.onnx and open it once. Raises ModelError with ONNX Runtime's reason."""
        from builders.backends.onnxruntime.file import (
            FUSION,
            file_moves_first_axis,
            keep_narrow_weights,
            note_widened,
            rewrite_optimized,
            settle_weights,
        )
        from builders.backends.onnxruntime.saturation import file_may_saturate, rewrite_exact

        path = workdir / "engine.onnx"
        without_fusions = (FUSION,) if self.graph_optimization == "all" and file_moves_first_axis(model) else ()
        options = session_options(_LEVELS[self.graph_optimization][0], self.intra_op_threads, without_fusions, model)
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry("session.disable_prepacking", "1")  # the session that saves never runs
        if request.precision not in IN_BLOCKS:  # MatMuls by weights that came in 8 or 4 bits keep float activations
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # 4, in int8, by default
        try:
            open_model(model, options)
        except ModelError as error:
            raise ModelError(f"{error}{self._opens_as_written(model)}") from error
        notes = settle_weights(path, model.parent)
        notes += rewrite_optimized(path, faster=self.graph_optimization != "none")
        is_saturating = file_may_saturate(path)
        if is_saturating and (kind := kind_built_for(request)) and kind.saturates:
            notes += rewrite_exact(path)
            is_saturating = False
        if self.graph_optimization == "extended":  # an engine of 'all' is not optimized when it is opened
            notes += keep_narrow_weights(path, model)
        elif self.graph_optimization == "all":
            notes += note_widened(model)
        self.open_part(path)
        return Engine.of_file(self, request, path, notes, (WideSums(),) if is_saturating else ())

    def _opens_as_written(self, model: Path) -> str:
        """The remedy for a graph that opens only without ONNX Runtime's optimizer; '' if it does not open.

        A branch of an If that is never taken at the fixed sizes can be invalid for them; the optimizer reads it.
        """
        try:
            open_model(model, session_options("ORT_DISABLE_ALL", self.intra_op_threads, of=model))
        except ModelError:
            return ""
        return (
            "; it opens without optimization: set backends.onnxruntime.graph_optimization to none, declare the sizes "
            "as dims, or give the input that decides an If as source.arguments"
        )

    def runs(self, target: Target) -> str | None:
        """Why engines for a GPU cannot run; None for a CPU."""
        return None if target.is_cpu else f"onnxruntime runs on the CPU here, not on {target.name}"

    @contextmanager
    def open(self, engine: Engine) -> Iterator[Session]:
        """Load the engine. Raises as `check_compatible` does, and ModelError when it cannot be read."""
        check_compatible(self, engine)
        level, shapes = _LEVELS[self.graph_optimization][1], unbounded(engine.request.profiles)
        with OrtSession(engine.path, level=level, threads=self.intra_op_threads, profiles=shapes) as session:
            yield session

    def profile(self, engine: Engine, inputs: Tensors, runs: int, workdir: Path) -> RunProfile:
        """Time each node of the graph as it is executed, this CPU's layout included. The trace is left in `workdir`."""
        from builders.backends.onnxruntime.session import profile_nodes

        level = _LEVELS[self.graph_optimization][1]
        return profile_nodes(engine.path, inputs, runs, workdir, level, self.intra_op_threads)

    def open_part(self, path: Path, *, as_written: bool = False) -> "OrtSession":
        """See `optional_methods.PartOpening`."""
        level = "ORT_DISABLE_ALL" if as_written else _LEVELS[self.graph_optimization][1]
        return OrtSession(path, level=level, threads=self.intra_op_threads)
