"""The values that travel between the steps: small, frozen, JSON-able; bytes stay in the artifact store by digest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from builders.types import (
    BuildFailure,
    BuildRequest,
    Precision,
    QuantizationScheme,
    TensorSpec,
    WeightLevels,
    tensor_from_json,
)

Json = dict[str, Any]
# Kinds of int8 activations, as in `QuantizationScheme`.
Activation = Literal["int8", "uint8"]


@dataclass(frozen=True)
class OnnxModel:
    """The exported model. digest: the canonical ONNX file.  carries_qdq: it was quantized by its author (QAT)."""

    digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    carries_qdq: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "OnnxModel":
        """Read the value of an export step."""
        return cls(
            data["onnx"],
            tuple(tensor_from_json(item) for item in data["inputs"]),
            tuple(tensor_from_json(item) for item in data["outputs"]),
            data["opset"],
            data["carries_qdq"],
        )


@dataclass(frozen=True)
class Proof:
    """What was measured at one joint. checks: `validation.report.Check` as JSON.  metrics: task metrics by name.

    spreads: `validation.spread.Spread` as JSON.
    """

    checks: tuple[Json, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    spreads: tuple[Json, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Proof":
        """Read the value of a checking step."""
        return cls(tuple(data["checks"]), tuple(sorted(data["metrics"].items())), tuple(data.get("spreads", ())))

    @property
    def failed(self) -> tuple[Json, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check["passed"])


@dataclass(frozen=True)
class Exported:
    """A model with the golden set it is proven by, and the parity of framework and ONNX. notes: for people.

    blake3: of the model's file, where who uploaded it had the library.  reads: digest of all that it was made from.
    golden_inputs: digest of the digests of the golden samples (`validation.overlap`); None where they are random.
    """

    model: OnnxModel
    golden: str
    proof: Proof
    notes: tuple[str, ...] = ()
    blake3: str | None = None
    golden_inputs: str | None = None
    reads: str = ""


@dataclass(frozen=True)
class Flavour:
    """One way to write the model for a precision.

    scheme: of the quantized precisions only.  native_io: of fp16 only, whether inputs and outputs are fp16 as well.
    """

    precision: Precision
    scheme: QuantizationScheme | None = None
    native_io: bool = False

    @property
    def name(self) -> str:
        """'fp16', or 'int8 (uint8 activations, fp32 elsewhere)'. Flavours of one name are one graph."""
        if self.scheme is None:
            return f"{self.precision} ({self.precision} inputs and outputs)" if self.native_io else self.precision
        words = [*_of_activations(self.scheme)] if self.precision == "int8" else []
        words += _of_weights(self.scheme.weight_levels) if self.precision in ("int8", "int8-dynamic") else []
        return f"{self.precision} ({', '.join([*words, f'{self.scheme.float_precision} elsewhere'])})"

    @property
    def searched(self) -> "Searched | None":
        """The kind of search that this flavour is one of; None for a precision that nothing is searched for."""
        if self.precision != "int8" or self.scheme is None:
            return None
        return Searched(self.scheme.activation, self.scheme.weight_levels)


class Searched(NamedTuple):
    """A kind of int8 that a search is made for; the fields are those of `QuantizationScheme`."""

    activation: Activation
    weight_levels: WeightLevels = 127

    @property
    def name(self) -> str:
        """'int8 (uint8 activations)'."""
        return f"int8 ({', '.join([f'{self.activation} activations', *_of_weights(self.weight_levels)])})"


def _of_activations(scheme: QuantizationScheme) -> Iterator[str]:
    """What a scheme says of int8 graphs alone; of biases only where they are not what goes with the activations."""
    yield f"{scheme.activation} activations"
    if scheme.activation == "uint8" and not scheme.quantize_bias:
        yield "biases in float"


def _of_weights(levels: WeightLevels) -> list[str]:
    return ["7-bit weights"] if levels == 64 else []


@dataclass(frozen=True)
class Recipe:
    """How a graph was written, as blobs. digest: the recipe.  model: the float model behind it, where it is not the
    exported one (a search wrote it)."""

    digest: str
    model: str | None = None


@dataclass(frozen=True)
class Graph:
    """The model in one flavour. model: digest of the ONNX file.  scales: digest of the calibrated ranges behind it.

    inputs, outputs: as this graph declares them.  record: digest of what quantizing did, tensor by tensor, as a blob.
    recipe: of graphs that were written here.
    """

    flavour: Flavour
    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scales: str | None = None
    notes: tuple[str, ...] = ()
    proof: Proof = Proof()
    record: str | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Attributed:
    """Which node drifted in a graph or an engine. joint: 'quantization' or 'engine'.  units: whose it is.

    digest: of the attribution (`validation.attribution.result`) as a blob, None where there is none; headline: its
    finding in one line, or why there is none.
    """

    joint: str
    name: str
    units: tuple[str, ...]
    digest: str | None
    headline: str


@dataclass(frozen=True)
class Unit:
    """One engine of the plan. action: 'build', 'cached' or 'refused'; reason: why, in words for a person."""

    request: BuildRequest
    graph: Graph
    action: str
    reason: str
    required: bool = False

    @property
    def name(self) -> str:
        """'sm_89 int8 tensorrt-rtx'."""
        return self.request.unit


@dataclass(frozen=True)
class BuildPlan:
    """Every unit, in the order of the spec."""

    model: str
    units: tuple[Unit, ...]

    @property
    def wanted(self) -> tuple[Unit, ...]:
        """The units that end in an engine."""
        return tuple(unit for unit in self.units if unit.action != "refused")

    @property
    def refused(self) -> tuple[Unit, ...]:
        """The units that do not."""
        return tuple(unit for unit in self.units if unit.action == "refused")


@dataclass(frozen=True)
class Built:
    """A unit with its engine in the store, or with the failure that took its place.

    blake3: of the engine's file; None of one that was put on record without the library.
    extras: what the build left beside the engine (`Engine.extras`), name -> digest.
    refitted_from: digest of the engine that this one has its kernels from, and other weights.
    """

    unit: Unit
    digest: str | None = None
    size_bytes: int = 0
    suffix: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False
    failure: BuildFailure | None = None
    blake3: str | None = None
    extras: tuple[tuple[str, str], ...] = ()
    refitted_from: str | None = None
