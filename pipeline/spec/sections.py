"""The sections of a spec, each checked by itself."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union

from pydantic import (
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    Tag,
    WrapValidator,
    field_validator,
    model_validator,
)

from builders.backends import discovery as backends
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware import machine
from enginesmith.core.state import State
from enginesmith.core.text import suggest
from enginesmith.core.types import PRECISIONS, Dim, Precision, Scalar, Target, TensorSpec
from pipeline.spec.quantization import Calibration, Quantization, SequenceArrays
from pipeline.spec.source import (
    Channel,
    DimName,
    DimRange,
    File,
    GraphName,
    Input,
    Loc,
    Mistakes,
    ModelName,
    Source,
    SpecPart,
    StateInput,
    TargetName,
    UnitPattern,
    VersionName,
    format_value,
)
from pipeline.spec.validation import Validation
from validation.metrics.tasks.terms import METRICS, TaskMetric

_DEFAULT = "accuracy"
_SEVERAL, _ONE = "[several]", "[one]"


class _Schema:
    """The JSON schema of a metric: only the default metric needs no name, and `decides` may be true or false."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        keys = definition["properties"]
        if keys["name"].get("default", _DEFAULT) != _DEFAULT:
            del keys["name"]["default"]
            definition["required"] = ["name", *definition["required"]]
        array_schema = {"type": "array", "items": {"enum": list(PRECISIONS), "type": "string"}}
        metadata = {key: keys["decides"][key] for key in ("default", "description", "title")}
        keys["decides"] = {"anyOf": [{"type": "boolean"}, array_schema], **metadata}
        return reference


def _name_of(value: object) -> str:
    """The tag of a metric: its name, or `accuracy` without one."""
    return f"[{value.get('name', _DEFAULT) if isinstance(value, dict) else getattr(value, 'name', _DEFAULT)}]"


def _read(value: object, handler: Any) -> TaskMetric:
    """The metric of a spec. Raises Mistakes for keys that do not fit together."""
    if not isinstance(value, dict):
        metric: TaskMetric = handler(value)
        return metric
    if (name := value.get("name", _DEFAULT)) not in METRICS:
        raise Mistakes([(("name",), f"metric {name!r} is not known; {suggest(str(name), METRICS)}")])
    if isinstance(decides := value.get("decides"), bool):
        value = {**value, "decides": [precision for precision in PRECISIONS if decides and precision != "fp32"]}
    metric = handler(value)
    if not value.keys() & metric.limit_keys():
        keys_text = ", ".join(f"{key}: VALUE" for key in metric.limit_keys())
        raise ValueError(f"has no limit; give {keys_text}, or floor: null to measure the metric without a limit")
    if mistakes := [((key,), text) for key, text in metric.mistakes()]:
        raise Mistakes(mistakes)
    return metric


if TYPE_CHECKING:
    Metrics: TypeAlias = TaskMetric | tuple[TaskMetric, ...]
else:
    _Metric = Annotated[
        Union[tuple(Annotated[kind, _Schema(), Tag(f"[{name}]")] for name, kind in METRICS.items())],  # noqa: UP007
        Discriminator(_name_of),
        WrapValidator(_read),
    ]
    # One metric, or a list of them.
    Metrics = Annotated[
        Annotated[_Metric, Tag(_ONE)] | Annotated[tuple[_Metric, ...], Tag(_SEVERAL)],
        Discriminator(lambda value: _SEVERAL if isinstance(value, list | tuple) else _ONE),
    ]


class MeasuredData(SpecPart):
    """Right answers for real inputs, and the task metrics that are measured with them."""

    labels: GraphName | None = Field(None, description="name of the array of right answers in the data file")
    metric: Metrics | None = Field(None, description="a task metric or a list of them (docs/guides/bring-a-model.md)")

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """The task metrics, in order."""
        return self.metric if isinstance(self.metric, tuple) else (self.metric,) if self.metric else ()

    def named_metrics(self) -> list[tuple[Loc, TaskMetric]]:
        """The task metrics, each with its path below `golden`."""
        is_list = isinstance(self.metric, tuple)
        return [(("metric", index) if is_list else ("metric",), metric) for index, metric in enumerate(self.metrics)]

    def outputs(self) -> list[tuple[Loc, str]]:
        """(path of the key below `golden`, output) for each output that a task metric names."""
        return [((*loc, key), name) for loc, metric in self.named_metrics() for key, name in metric.outputs.items()]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        mistakes: list[tuple[Loc, str]] = []
        metric_keys: set[tuple[str, str]] = set()
        for loc, metric in self.named_metrics():
            if not self.labels and (metric.against == "labels" or metric.name == "accuracy"):
                text = f"metric {metric.name} needs labels; name the array that holds them"
                mistakes.append((loc, f"{text}, or take top_k" if metric.name == "accuracy" else text))
            if (metric.name, metric.output) in metric_keys:
                mistakes.append((loc, f"there is a metric {metric.name} of {metric.output!r} before it; leave one out"))
            metric_keys.add((metric.name, metric.output))
        if mistakes:
            raise Mistakes(mistakes)
        return self


class Golden(MeasuredData, SequenceArrays):
    """Real inputs with which every engine is proven. Expected outputs come from the source model itself."""

    data: File = Field(description="an .npz, .npy or .safetensors, or a folder of .npy files")
    frozen: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="digest of the golden set: a build that would make another one fails; `enginesmith debug golden "
        "accept`",
    )


# `serve` of a spec -> the server's name in `Capabilities.opened_by` ('' for sessions of enginesmith, which open all
# engines), and the default compilers.
Server = Literal["triton", "onnxruntime", "rtx", "python"]
_SERVERS: dict[Server | None, tuple[str, tuple[str, ...]]] = {
    None: ("", ("onnxruntime", "tensorrt", "tensorrt-rtx", "onnxruntime-cuda")),
    "triton": ("Triton", ("onnxruntime", "tensorrt", "onnxruntime-cuda")),
    "onnxruntime": ("ONNX Runtime", ("onnxruntime", "onnxruntime-cuda")),
    "rtx": ("TensorRT for RTX", ("onnxruntime", "tensorrt-rtx")),
    "python": ("", ("onnxruntime", "tensorrt", "tensorrt-rtx")),
}


def server_backends(serve: Server | None) -> dict[str, dict[str, Scalar]]:
    """The default compilers, without options."""
    return {name: {} for name in _SERVERS[serve][1]}


class Build(SpecPart):
    """Limits of each unit's process, and the units that must not be refused."""

    timeout_s: float = Field(1800, gt=0, le=86400, description="wall clock, per unit")
    memory_mib: int = Field(8192, ge=64, description="memory without mapped files, per unit")
    required: tuple[UnitPattern, ...] = Field(
        (), description="units such as 'sm_89 int8' or 'cpu': a refusal fails the run"
    )


class Timeouts(SpecPart):
    """Wall-clock limit of each step's process, except the build's (build.timeout_s). A step beyond it is ended."""

    export_s: float = Field(1800, gt=0, le=86400, description="reading or exporting the model, and its golden set")
    calibration_s: float = Field(3600, gt=0, le=86400, description="observing the calibration samples, per part")
    quantization_s: float = Field(3600, gt=0, le=86400, description="searching and writing the graph of a precision")
    proof_s: float = Field(1800, gt=0, le=86400, description="checking a quantized graph, or proving an engine")
    latency_s: float = Field(1800, gt=0, le=86400, description="timing an engine")
    attribution_s: float = Field(300, gt=0, le=86400, description="finding which node drifted, per failed check")


class TritonServing(SpecPart):
    """Settings of Triton's configuration beside the engines (`pull --layout triton`)."""

    instances: int = Field(1, ge=1, le=256, description="of the model on the CPU, or on each GPU: instance_group.count")
    preferred_batch_sizes: tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...] = Field(
        (), description="sizes that dynamic batching waits for"
    )
    max_queue_delay_us: int | None = Field(
        None, ge=0, le=3_600_000_000, description="microseconds that a request waits for others; turns on batching"
    )
    labels: dict[GraphName, File] = Field({}, description="file of class names, one a line, of an output")


class Publication(SpecPart):
    """The registry and the channel of a finished version."""

    registry: str | None = Field(None, description="path or URI; the command line and ENGINESMITH_REGISTRY come first")
    channel: Channel = Field("candidate", description="channel that points to the new version")


class SpecFile(SpecPart):
    """A spec that is a file of its own."""

    _path: Path = PrivateAttr(default=Path())
    _address: str = PrivateAttr(default="")

    @property
    def path(self) -> Path:
        """The spec file, as it was given."""
        return self._path

    @property
    def address(self) -> str:
        """The spec's address for a user: its path, or the source of a copy (`registered:MODEL@DIGEST`)."""
        return self._address or str(self._path)

    @cached_property
    def folder(self) -> Path:
        """The spec's real folder; every file it names lies inside."""
        return self._path.resolve().parent

    def file(self, relative: str) -> Path:
        """Path of a file that the spec names, relative to its folder."""
        return self.folder / relative


class SpecSections(SpecFile):
    """The sections of a spec, each checked by itself."""

    model: ModelName = Field(description="name in the registry: lower-case letters, digits, '.', '_' and '-'")
    version: VersionName | None = Field(None, description="a version name of your own; default: the next number")
    source: Source
    inputs: dict[GraphName, Input] = Field(min_length=1)
    outputs: tuple[GraphName, ...] | None = Field(
        None, description="names of the outputs, in order; default: the model's own"
    )
    dims: dict[DimName, DimRange] = Field({})
    state: dict[GraphName, StateInput] = Field(
        {}, description="inputs that take what an output gave in the call before; data has none of them"
    )
    precisions: tuple[Precision, ...] = Field(("fp32",), min_length=1)
    targets: tuple[TargetName, ...] = Field(min_length=1, description="cpu, sm_89, l4, ampere, gpu, all, ...")
    serve: Server | None = Field(
        None, description="what opens the engines, which decides the compilers; default: any of these"
    )
    backends: dict[str, dict[str, Scalar]] = Field(
        default_factory=lambda data: server_backends(data.get("serve")),
        description="compilers to use, with their options; default: those whose engines the server opens",
    )
    triton: TritonServing = TritonServing()
    calibration: Calibration | None = None
    quantization: Quantization = Quantization()
    golden: Golden | None = None
    validation: Validation = Validation()
    build: Build = Build()
    timeouts: Timeouts = Timeouts()
    publication: Publication = Publication()

    omitted: ClassVar[frozenset[str]] = frozenset({"state", "serve", "triton"})
    # Files of data that were computed for this run, by their names in the spec.
    _computed: Mapping[str, Path] = PrivateAttr(default_factory=dict)

    @field_validator("outputs")
    @classmethod
    def _named_once(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if duplicate := next((name for name in names or () if names and names.count(name) > 1), None):
            raise ValueError(f"{duplicate!r} is named twice; keep one")
        return names

    @field_validator("backends", mode="before")
    @classmethod
    def _options_of_each(cls, value: object) -> object:
        if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
            raise ValueError(f"give each its options: {{{', '.join(f'{name}: {{}}' for name in value)}}}")
        if isinstance(value, dict) and (
            bare_key := next((k for k, v in value.items() if not isinstance(v, dict)), None)
        ):
            raise ValueError(f"{bare_key} has {format_value(value[bare_key])}; give its options, or {{}} for none")
        return value

    @field_validator("backends")
    @classmethod
    def _known_backends(cls, options: dict[str, dict[str, Scalar]]) -> dict[str, dict[str, Scalar]]:
        mistakes = list[tuple[Loc, str]]()
        for name, backend_options in options.items():
            try:
                backends.configure(name, backend_options)
            except EnginesmithError as error:
                mistakes.append(((name,), str(error).removeprefix("backends.")))
        if mistakes:
            raise Mistakes(mistakes)
        return options

    @property
    def is_copy(self) -> bool:
        """Whether the file is a copy that is deleted after the run."""
        return self.address != str(self._path)

    @property
    def source_file(self) -> str:
        """The source's main file, relative to the folder."""
        return self.source.file_in(self.folder)

    def file(self, relative: str) -> Path:
        """Path of a file that the spec names, relative to its folder; computed data may be in another folder."""
        return self._computed.get(relative) or self.folder / relative

    def root_of(self, data: str) -> Path:
        """The folder that the name of data is relative to."""
        return self._computed[data].parent if data in self._computed else self.folder

    def named_files(self) -> Iterator[tuple[Loc, str]]:
        """(key, path relative to the folder) of each file that the spec names; data may be folders."""
        calibration, golden = self.calibration and self.calibration.file, self.golden and self.golden.data
        source = {self.source.kind: self.source_file, "weights": self.source.weights}
        yield from ((("source", key), name) for key, name in source.items() if name)
        yield from (
            (("source", "libraries", i, "file"), library.file) for i, library in enumerate(self.source.libraries)
        )
        data_paths = {"calibration": calibration, "golden": golden}
        yield from (((section, "data"), name) for section, name in data_paths.items() if name)
        yield from ((("triton", "labels", output), name) for output, name in self.triton.labels.items())

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs, in order."""
        return tuple(TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in self.inputs.items())

    def states(self) -> tuple[State, ...]:
        """The inputs that take outputs of the previous call, in the spec's order."""
        return tuple(
            State(name, state.output, state.initial, state.places.to_places() if state.places else None)
            for name, state in self.state.items()
        )

    def int8_states(self) -> tuple[State, ...]:
        """The states that engines of quantized precisions take and give as int8."""
        return tuple(state for state in self.states() if self.state[state.input].dtype)

    def named_dims(self) -> tuple[Dim, ...]:
        """The dynamic dims, in the spec's order."""
        return tuple(dim.to_dim(name) for name, dim in self.dims.items())

    def target_list(self) -> tuple[Target, ...]:
        """Targets with groups resolved, each once, in the spec's order."""
        targets = [target for name in self.targets for target in machine.parse_targets(name)]
        return tuple(dict.fromkeys(targets))

    def has_unit(self, target: Target, precision: Precision, backend: str, has_worker: bool) -> bool:
        """Whether the spec has a unit. If the spec names no compilers, its server decides on GPUs: TensorRT if a worker
        can tune for the GPU; TensorRT for RTX otherwise and for RTX cards; also ONNX Runtime in the precisions of its
        CUDA provider.

        has_worker: whether some builder of this run has TensorRT and that GPU.
        """
        if self.backends != server_backends(self.serve) or target.is_cpu:
            return True
        if backend == "onnxruntime-cuda":
            return precision in ("fp32", "fp16")
        if backend == "tensorrt":
            return has_worker or self.serve == "triton"
        is_card = (target.product or "").startswith("rtx") or (target.compute_capability or (0, 0))[0] == 12
        return not has_worker or is_card or self.serve == "rtx"

    def precision_list(self) -> tuple[Precision, ...]:
        """Precisions, each once, from wide to narrow."""
        return tuple(p for p in PRECISIONS if p in self.precisions)


def wrong_server(spec: SpecSections) -> Iterator[tuple[Loc, str]]:
    """Backends whose engines the server of the spec does not open: (key, message)."""
    title, native_backends = _SERVERS[spec.serve]
    for name in spec.backends:
        if title and name not in native_backends and title not in backends.capabilities_of(name).opened_by:
            yield ("backends", name), f"{title} opens no engines of {name}; remove it, or change serve: {spec.serve}"
