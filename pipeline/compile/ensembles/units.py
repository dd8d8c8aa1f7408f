"""Which engines of its graphs an ensemble consists of, for each target and precision."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.core.ensemble import ENSEMBLE
from enginesmith.core.requirements import GpuMemory, Requirement, for_target
from enginesmith.core.types import PRECISIONS, Precision, Target, TensorSpec
from enginesmith.registry.manifest import EngineEntry, Status
from pipeline.spec.model import ModelSpec


@dataclass(frozen=True)
class EnsembleUnit:
    """An ensemble for a target in a precision. engines: of its graphs, by name; of one that has none it is left out.

    lacking: why not, by graph.
    """

    target: Target
    precision: Precision
    engines: Mapping[str, EngineEntry]
    lacking: Mapping[str, str]

    @property
    def name(self) -> str:
        """As the names of other units: 'cpu int8 ensemble'."""
        return f"{self.target.name} {self.precision} {ENSEMBLE}"

    @property
    def status(self) -> tuple[Status, str]:
        """That of the worst of its engines with the reason; 'refused' where one is lacking."""
        for graph, reason in self.lacking.items():
            return "refused", f"graph {graph!r} has no engine: {reason}"
        for graph, entry in self.engines.items():
            if entry.status != "proven":
                return entry.status, f"graph {graph!r}: {entry.reason}"
        return "proven", ""

    def entry(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> EngineEntry:
        """Its entry in a manifest, without an engine. inputs, outputs: of the whole."""
        status, reason = self.status
        found = [requirement for entry in self.engines.values() for requirement in entry.requires]
        return EngineEntry(
            target=self.target.name,
            precision=self.precision,
            backend=ENSEMBLE,
            status=status,
            reason=reason,
            compute_capability=self.target.compute_capability,
            product=self.target.product,
            toolchain={name: text for entry in self.engines.values() for name, text in entry.toolchain.items()},
            inputs=inputs,
            outputs=outputs,
            requires=_sum_requirements(found) or (for_target(self.target),),
            notes=tuple(f"{graph}: {entry.unit}" for graph, entry in self.engines.items()),
        )


def _sum_requirements(found: Sequence[Requirement]) -> tuple[Requirement, ...]:
    """Each requirement once; the memory of all engines together."""
    memory = sum(item.size_bytes for item in found if isinstance(item, GpuMemory))
    others = tuple(dict.fromkeys(item for item in found if not isinstance(item, GpuMemory)))
    return (*others, GpuMemory(memory)) if memory else others


def list_units(
    graphs: Mapping[str, ModelSpec],
    engines: Mapping[str, Sequence[EngineEntry]],
    wanted: Mapping[str, tuple[Sequence[Target], Sequence[Precision]]],
) -> Iterator[EnsembleUnit]:
    """A unit for each target and precision that a graph was built for. engines: of the graphs' versions.

    wanted: by graph, what of its spec was asked for. A graph whose spec does not have a precision takes part in the
    widest that it has.
    """
    targets = dict.fromkeys(target for found, _ in wanted.values() for target in found)
    asked = {name: [*found] for name, (_, found) in wanted.items()}
    for target in targets:
        for precision in (each for each in PRECISIONS if any(each in found for found in asked.values())):
            chosen = dict[str, EngineEntry]()
            lacking = dict[str, str]()
            for name, spec in graphs.items():
                own = precision if precision in spec.precision_list() else spec.precision_list()[0]
                found = _choose(engines[name], target, own)
                if isinstance(found, str):
                    lacking[name] = found
                else:
                    chosen[name] = found
            if any(entry.precision == precision for entry in chosen.values()) or lacking:
                yield EnsembleUnit(target, precision, chosen, lacking)


def _choose(engines: Sequence[EngineEntry], target: Target, precision: Precision) -> EngineEntry | str:
    """The engine of a target and precision, proven ones first, then in the order of the spec's backends; else why there
    is none."""
    found = [entry for entry in engines if (entry.target, entry.precision) == (target.name, precision)]
    usable = sorted((entry for entry in found if entry.usable), key=lambda entry: entry.status != "proven")
    if usable:
        return usable[0]
    return found[0].reason if found else f"its spec has no {target.name} {precision}"
