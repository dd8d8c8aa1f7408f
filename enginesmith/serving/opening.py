"""Opens pulled engines for a router, as the JSON beside each describes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from enginesmith.core.codec import decode
from enginesmith.core.digest import Digest
from enginesmith.core.errors import DataError, IntegrityError
from enginesmith.core.reports.latency import LatencyReport, Timed
from enginesmith.core.types import Tensors
from enginesmith.descriptions import DescribedGraph, check_engine, find_engine, read_description
from enginesmith.opening import DescribedFile, open_onnx
from enginesmith.serving.buckets import RoutedEngine, measured_seconds
from enginesmith.serving.padding import Padding

# Gives for an engine's file a function that runs it.
Opens = Callable[[Path], Callable[[Tensors], Tensors]]


class PulledEngine(DescribedFile, Protocol):
    """What a router needs of a pulled engine (`client.pull.Pulled`)."""

    @property
    def latency(self) -> LatencyReport | None:
        """How fast it was on machines of this kind; None where it was not timed."""
        ...


@dataclass(frozen=True)
class DescribedEngine:
    """An engine as its description has it, opened. file, digest: of the engine.  bounded: whether it takes certain
    sizes only; the version's graph takes any."""

    engine: RoutedEngine
    padding: Padding
    file: Path
    digest: str
    bounded: bool


@dataclass(frozen=True)
class _RoutedDescription(DescribedGraph):
    target: str
    precision: str
    backend: str
    digest: Digest
    padding: Padding = field(default_factory=Padding)


def open_described(
    description: Path | str, opens: Opens | None, latency: LatencyReport | None, timed: Timed = "session"
) -> DescribedEngine:
    """The engine beside a description. opens: None for `open_onnx`.  latency: None where it was not timed.  timed: what
    of it counts (`timed_alike`).

    Raises DataError for a file that describes no engine and for a model with state, IntegrityError for other bytes than
    were published, and what `opens` raises.
    """
    path = Path(description)
    found = read_description(path)
    try:
        if "state" in found or "graphs" in found:
            kind, other = (
                ("state", "enginesmith.Streams") if "state" in found else ("several graphs", "enginesmith.Ensemble")
            )
            raise DataError(f"{path.name} describes a model with {kind}, which no router runs; use {other}")
        stated = decode(found, _RoutedDescription, "")
    except IntegrityError as error:
        raise DataError(f"{description} describes no engine: {error}") from error
    file = find_engine(path, found)
    run = opens(check_engine(path, found)) if opens else open_onnx(path)
    seconds = measured_seconds(latency, stated.inputs, timed) if latency else None
    name = f"{stated.target} {stated.precision} {stated.backend}"
    engine = RoutedEngine(name, run, stated.inputs, stated.outputs, stated.profiles, seconds)
    return DescribedEngine(engine, stated.padding, file, stated.digest, bool(stated.profiles))
