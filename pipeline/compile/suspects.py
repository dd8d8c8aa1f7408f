"""What of a run's verdicts a drifted node can explain: the graphs and engines whose drift is then attributed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from builders.backends import discovery
from enginesmith.core.reports.proof import OVERLAP, PADDING, Check
from pipeline.outcome import JudgedUnit
from pipeline.values import Built


@dataclass(frozen=True)
class Suspect:
    """What is taken apart: the graph of `built`, or its engine. units: names of the units whose it is.

    sizes: cases of a failed check of sizes, the golden set having passed.
    """

    joint: Literal["quantization", "engine"]
    built: Built
    units: tuple[str, ...]
    sizes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """'graph int8 (...)', or the unit."""
        unit = self.built.unit
        return f"graph {unit.graph.variant.name}" if self.joint == "quantization" else unit.name


def find_suspects(judged: Sequence[JudgedUnit]) -> list[Suspect]:
    """What broke a limit: each graph once, whatever it was built for, and each engine that can be taken apart."""
    found: dict[tuple[str, str], Suspect] = {}
    for item in judged:
        unit, failed = item.built.unit, item.report.failed if item.report else ()
        drifted, broken = _find_drifted_stages(failed), dict[str, Suspect]()
        if "quantization" in drifted and unit.graph.recipe is not None:
            broken[unit.request.model] = Suspect("quantization", item.built, ())
        if "engine" in drifted and discovery.capabilities_of(unit.request.backend).opens_parts:
            sizes = tuple(check.case for check in failed if check.name == "sizes")
            broken[unit.name] = Suspect("engine", item.built, (), sizes)
        for name, suspect in broken.items():
            known = found.get((suspect.joint, name), suspect)
            found[suspect.joint, name] = replace(known, units=(*known.units, unit.name))
    return list(found.values())


def _find_drifted_stages(failed: Sequence[Check]) -> set[str]:
    """The stages with a failed check that a drifted node can explain.

    Left out are a broken contract and calls that do not repeat, which say how the engine behaves, padding, which is
    about rules of the spec, and an overlap, which says how it was measured. A task metric counts for the first place
    that it fails at, which the later ones inherit: on the exported model it is about labels, data or training, and no
    graph or engine is to blame.
    """
    explained = [
        c for c in failed if not c.name.startswith(("contract ", "calls ")) and c.name not in (OVERLAP, PADDING)
    ]
    places = {check.case.rpartition(", ")[2] for check in explained if check.joint == "task"}
    first = next((place for place in ("exported model", "graph", "engine") if place in places), "")
    stages = {"graph": {"quantization"}, "engine": {"engine"}}.get(first, set())
    return stages | {check.joint for check in explained}
