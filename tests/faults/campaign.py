"""Plants each fault in each family of networks, seed and precision where it has a place, and asks the product."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from onnx import ModelProto

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from enginesmith.core.reports.proof import Check, describe
from enginesmith.core.types import Precision
from pipeline.compile.steps.blobs import runnable
from pipeline.quantization.schemes.write import write
from tests.faults.bench import Bench, BuiltEngine
from tests.faults.families import FAMILIES, Family, floats_of
from tests.faults.honest import KERNELS
from tests.faults.plants import PLANTS, Plant
from tests.faults.sessions import ONLY, SESSIONS, faulty_sessions
from tests.pipeline.quantization.small_nets import CPU, ranges_of

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4")
# The family that bf16 is too coarse for: its graph is a fault.
OFFSET = "far"


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. by: names of the failed checks.  right: whether its node was blamed; None where it has
    none, or nothing was caught.  noise: as `noise_of` gives it; empty for what no error of numbers is."""

    fault: str
    family: str
    precision: str
    seed: int
    by: tuple[str, ...]
    right: bool | None = None
    noise: tuple[float, ...] = ()


@dataclass(frozen=True)
class Alarms:
    """Checks that failed where nothing is planted. kernel: 'graph', 'onnxruntime', or 'other' that is as right.

    noise: as `noise_of` gives it, of a kernel.
    """

    family: str
    precision: str
    seed: int
    kernel: str
    failed: tuple[str, ...]
    noise: tuple[float, ...] = ()


class Subject:
    """One model with its golden set, and its graph in each precision."""

    def __init__(self, folder: Path, family: Family, seed: int) -> None:
        self.family, self.seed = family, seed
        self.bench = Bench(folder, family.model(seed), family.samples(1000 + seed, 48), family.inputs, family.dims)
        self.model = self.bench.canonical()
        self.ranges = ranges_of(self.model, family.samples(2000 + seed, 64), floats_of(self.model))

    def graph(self, precision: Precision) -> ModelProto:
        """What engines of a precision are built from."""
        return self.model if precision == "fp32" else write(self.model, precision, CPU, self.ranges)[0]

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, crc32(name.encode())])

    def plant(self, plant: Plant, precision: Precision) -> Outcome | None:
        """What the proof of the engine says; None where the graph has no place for the fault."""
        graph = self.graph(precision)
        planted_change = plant.change(graph, self.rng(plant.name))
        if planted_change is None:
            return None
        engine = self.bench.engine(planted_change[0], graph, precision)
        checks = engine.checks()
        failed_checks = [check for check in checks if not check.passed]
        flag = None
        if failed_checks and planted_change[1]:
            result = engine.attribution().blamed
            names = {name for row in result for name in (row.node, *row.nodes)}
            flag = any(place in {*names, *(name.partition("/")[0] for name in names)} for place in planted_change[1])
        check_names = tuple(dict.fromkeys(check.name for check in failed_checks))
        return Outcome(
            plant.name, self.family.name, precision, self.seed, check_names, flag, self.noise(engine, graph, precision)
        )

    def noise(self, engine: BuiltEngine, graph: ModelProto, precision: Precision) -> tuple[float, ...]:
        """How far an engine is from the graph that it is to compute, on the golden samples."""
        path = self.bench.room() / "graph.onnx"
        path.write_bytes(graph.SerializeToString())
        built = self.bench.room() / "engine.onnx"
        built.write_bytes(self.bench.store.read_blob(engine.blob.digest))
        inputs = self.family.samples(1000 + self.seed, 48)
        batches = [{name: array[index : index + 8] for name, array in inputs.items()} for index in range(0, 48, 8)]
        with OrtSession(runnable(path, precision), optimized=False) as session, OnnxRuntime().open_part(built) as part:
            pairs = [[next(iter(side.run(batch).values())) for side in (session, part)] for batch in batches]
        return noise_of(*(np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True)))

    def misbehave(self, name: str, seconds: float | None = None) -> Outcome:
        """What the proof says of an fp32 engine whose session answers wrongly from call to call.

        seconds: for sizes and calls; None: as by default.
        """
        with faulty_sessions(SESSIONS[name]), np.errstate(all="ignore"):
            try:
                failed_names = [check.name for check in self.bench.engine().checks(seconds=seconds) if not check.passed]
            except Exception:  # whatever comes through instead of a failed check is a miss
                failed_names = []
        return Outcome(name, self.family.name, "fp32", self.seed, tuple(dict.fromkeys(failed_names)))

    def alarms(self, precision: Precision) -> Iterator[Alarms]:
        """Checks that fail where nothing is planted, by kernel: onnxruntime's, and another that is as right."""
        graph = self.graph(precision)
        checks_before = [] if precision == "fp32" else self.bench.graph_checks(graph, precision)
        items = [*self.bench.checks, *checks_before]
        if precision == "bf16":  # of which no engine runs on a CPU
            yield self._alarms(precision, "graph", items)
            return
        yield self._alarms(precision, "graph", items)
        for kernel, model in (("onnxruntime", None), ("other", KERNELS[precision](graph))):
            engine = self.bench.engine(model, graph, precision)
            message = self._alarms(precision, kernel, engine.checks())
            yield replace(message, noise=self.noise(engine, graph, precision))

    def _alarms(self, precision: Precision, kernel: str, checks: list[Check]) -> Alarms:
        failed_texts = tuple(describe(item) for item in checks if not item.passed)
        return Alarms(self.family.name, precision, self.seed, kernel, failed_texts)

    def coarse(self) -> Outcome:
        """A bf16 graph, whose outputs of 288 and more are two apart: what the quantization stage says of it."""
        checks = self.bench.graph_checks(self.graph("bf16"), "bf16")
        failed_name = tuple(dict.fromkeys(check.name for check in checks if not check.passed))
        return Outcome("a bf16 graph with an offset of 288", self.family.name, "bf16", self.seed, failed_name)


def noise_of(expected: np.ndarray, actual: np.ndarray) -> tuple[float, ...]:
    """Mean energy of the error over that of the output: of all elements, and of each slice of each axis."""
    error = np.square(actual - expected) / np.square(expected).mean()
    rest = [tuple(other for other in range(error.ndim) if other != axis) for axis in range(1, error.ndim)]
    return (float(error.mean()), *(float(value) for rest_item in rest for value in error.mean(axis=rest_item)))


def outcomes(folder: Path, family: str, seed: int) -> Iterator[Outcome]:
    """Every fault in one model."""
    subject = Subject(folder, FAMILIES[family], seed)
    for precision in PRECISIONS:
        for plant in PLANTS:
            if precision in plant.precisions and (result := subject.plant(plant, precision)):
                yield result
    if family == OFFSET:
        yield subject.coarse()
    for name in SESSIONS:
        if ONLY.get(name, family) == family:
            yield subject.misbehave(name)


def alarms(folder: Path, family: str, seed: int) -> Iterator[Alarms]:
    """Nothing is planted."""
    subject = Subject(folder, FAMILIES[family], seed)
    for precision in PRECISIONS:
        if (family, precision) != (OFFSET, "bf16"):
            yield from subject.alarms(precision)
