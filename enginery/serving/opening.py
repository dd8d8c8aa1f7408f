"""Opens pulled engines, as the JSON beside each describes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from enginery.core.codec import decode
from enginery.core.errors import DataError, IntegrityError
from enginery.core.hardware.cpu_kinds import this_kind
from enginery.core.parsing import field, many, mapping, mapping_of, parse_json, scalar, text
from enginery.core.reports.latency import LatencyReport
from enginery.core.types import ShapeProfile, Tensors, TensorSpec
from enginery.serving.buckets import RoutedEngine, measured_seconds
from enginery.serving.padding import Padding

T = TypeVar("T")
# Of a description.
MOST_BYTES = 16 << 20
# Gives for an engine's file a function that runs it.
Opens = Callable[[Path], Callable[[Tensors], Tensors]]


class PulledEngine(Protocol):
    """What a router needs of a pulled engine (`client.pull.Pulled`)."""

    @property
    def description(self) -> Path:
        """The JSON beside the engine."""
        ...

    @property
    def latency(self) -> LatencyReport | None:
        """How fast it was on machines of this kind; None where it was not timed."""
        ...


@dataclass(frozen=True)
class DescribedEngine:
    """An engine as its description has it, opened. file: of the engine.  bounded: whether it takes certain sizes only;
    the version's graph takes any."""

    engine: RoutedEngine
    padding: Padding
    file: Path
    bounded: bool


def open_described(description: Path | str, opens: Opens | None, latency: LatencyReport | None) -> DescribedEngine:
    """The engine beside a description. opens: None for `open_onnx`.  latency: None where it was not timed.

    Raises DataError for a file that describes no engine, for a model with state, and what `opens` raises.
    """
    path = Path(description)
    try:
        found = parse_json(path.read_bytes(), MOST_BYTES)
        if "state" in found or "graphs" in found:
            kind, other = ("state", "enginery.Streams") if "state" in found else ("several graphs", "enginery.Ensemble")
            raise DataError(f"{path.name} describes a model with {kind}, which no router runs; use {other}")
        inputs, outputs = (_read_many(found, name, TensorSpec) for name in ("inputs", "outputs"))
        profiles = _read_many(found, "profiles", ShapeProfile)
        padding = decode(found["padding"], Padding) if "padding" in found else Padding()
        name = " ".join(field(found, key, text) for key in ("target", "precision", "backend"))
        file = path.parent / field(found, "file", text)
    except (OSError, IntegrityError) as error:
        raise DataError(f"{description} describes no engine: {error}") from error
    run = opens(file) if opens else open_onnx(path)
    seconds = measured_seconds(latency, inputs) if latency else None
    return DescribedEngine(RoutedEngine(name, run, inputs, outputs, profiles, seconds), padding, file, bool(profiles))


def open_onnx(engine: PulledEngine | Path | str) -> Callable[[Tensors], Tensors]:
    """A function that runs an engine of ONNX Runtime once on all of its inputs, by name, on the CPU. engine: a pulled
    one, the file of one, or the JSON beside it.

    The session has the options that the JSON names for CPUs like this one: without them int8 engines give other numbers
    on CPUs without VNNI than they were proven with (docs/concepts/cpu-kinds.md).
    Raises DataError for what is no engine, for several graphs (`Ensemble`) and for an engine of another compiler, which
    its own runtime opens; and what onnxruntime raises.
    """
    path = Path(engine if isinstance(engine, Path | str) else engine.description).with_suffix(".json")
    try:
        found = parse_json(path.read_bytes(), MOST_BYTES)
        file = path.parent / field(found, "file", text)
        options = mapping_of(scalar)(found.get("session_options_without_vnni", {}), "session_options_without_vnni")
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

    settings = onnxruntime.SessionOptions()
    for name, value in options.items() if this_kind().saturates else ():
        settings.add_session_config_entry(name, str(value))
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _read_many(found: Mapping[str, object], name: str, kind: type[T]) -> list[T]:
    return [decode(item, kind) for item in field(found, name, many(mapping))]
