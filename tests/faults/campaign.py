"""Plants each fault in each family of networks, seed and precision where it has a place, and asks the product."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from onnx import ModelProto

from builders.types import Precision
from pipeline.quantization.schemes.write import write
from tests.faults.bench import Bench
from tests.faults.families import FAMILIES, Family, floats_of
from tests.faults.honest import KERNELS
from tests.faults.plants import PLANTS, Plant
from tests.pipeline.quantization.small_nets import CPU, ranges_of
from validation.report import Check, describe

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int8-dynamic", "int4")
# A GRU in fp16 ends the process that opens it with onnxruntime 1.31's NCHWc layout; what cannot be built is left out.
LEFT_OUT = {("recurrent", "fp16")}


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. by: names of the failed checks.  sqnr_db: least of the engine joint.  right: whether its
    node was blamed; None where there is none, or nothing was caught."""

    fault: str
    family: str
    precision: str
    seed: int
    by: tuple[str, ...]
    sqnr_db: float
    right: bool | None
    told: str = ""


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
        planted = plant.change(graph, self.rng(plant.name))
        if planted is None:
            return None
        engine = self.bench.engine(planted[0], graph, precision)
        checks = engine.checks()
        failed = [check for check in checks if not check.passed]
        right = None
        if failed and planted[1]:
            found = engine.attribution().blamed
            right = any(planted[1] in (row.node, *row.nodes) for row in found)
        by = tuple(dict.fromkeys(check.name for check in failed))
        return Outcome(plant.name, self.family.name, precision, self.seed, by, least_sqnr(checks), right)

    def alarms(self, precision: Precision) -> dict[str, list[str]]:
        """Checks that fail where nothing is planted, by kernel: onnxruntime's, and another that is as right."""
        graph = self.graph(precision)
        before = [] if precision == "fp32" else self.bench.graph_checks(graph, precision)
        found = {"graph": [*self.bench.checks, *before]}
        found["onnxruntime"] = self.bench.engine(None, graph, precision).checks()
        found["other"] = self.bench.engine(KERNELS[precision](graph), graph, precision).checks()
        return {name: [describe(item) for item in checks if not item.passed] for name, checks in found.items()}


def least_sqnr(checks: list[Check]) -> float:
    return min((check.value for check in checks if check.name == "sqnr_db" and check.value is not None), default=np.nan)


def precisions_of(family: str) -> Iterator[Precision]:
    yield from (item for item in PRECISIONS if (family, item) not in LEFT_OUT)


def outcomes(folder: Path, family: str, seed: int) -> Iterator[Outcome]:
    """Every fault in one model."""
    subject = Subject(folder, FAMILIES[family], seed)
    for precision in precisions_of(family):
        for plant in PLANTS:
            if precision in plant.precisions and (found := subject.plant(plant, precision)):
                yield found
