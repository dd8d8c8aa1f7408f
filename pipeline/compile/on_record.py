"""What is on record of a model, found without running a job or writing anything."""

from collections.abc import Mapping
from dataclasses import dataclass

from enginery.registry.store.base import Store
from pipeline.compile import steps
from pipeline.compile.composition import InProcess, calibrate
from pipeline.compile.only_records import NotOnRecord, OnlyRecords
from pipeline.compile.plan import Selection, candidates
from pipeline.compile.run_context import RunContext
from pipeline.progress.events import Progress
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Graph, Searched, SearchResult


@dataclass(frozen=True)
class OnRecord:
    """The export, whose golden set is '' where that is not on record, and the graphs that are known.

    missing: the steps that are not on record, as far as that shows before they run.
    """

    exported: Exported | None = None
    graphs: tuple[Graph, ...] = ()
    missing: tuple[str, ...] = ()


class _RecordReader(RunContext):
    """Runs nothing and writes nothing."""

    def remember(self, kind: str, key: Mapping[str, object], value: Mapping[str, object], blobs: list[str]) -> None:
        """Leave the record as it is."""


def open_records(store: Store) -> RunContext:
    """A run context that answers from the records of a store and raises NotOnRecord where a job would run."""
    return _RecordReader(store, OnlyRecords(), OnlyRecords(), Progress())


def on_record(spec: ModelSpec, selection: Selection, context: RunContext) -> OnRecord:
    """The export and the graphs of a selection as far as they are on record. context: a `reading` one."""
    try:
        exported = steps.recorded_export(spec, context)
    except NotOnRecord as step:
        return OnRecord(missing=(str(step),))
    if exported is None:
        return OnRecord(missing=("export",))
    missing = [] if exported.golden else ["golden set"]
    flavours = list(dict.fromkeys(item.flavour for item in candidates(spec, selection)))
    ranges, choices = None, dict[Searched, SearchResult]()
    try:
        ranges = calibrate(spec, exported, context, InProcess())
        for kind in steps.find_searched_kinds(flavours, spec, exported):
            choices[kind] = steps.choose(kind, spec, exported, ranges, context)
    except NotOnRecord as step:
        missing.append(str(step))
        flavours = [flavour for flavour in flavours if flavour.precision == "fp32"]
    graphs: list[Graph] = []
    for flavour in flavours:
        try:
            graphs.append(steps.write(flavour, spec, exported, ranges, choices, context))
        except NotOnRecord as step:
            missing.append(str(step))
    return OnRecord(exported, tuple(graphs), tuple(dict.fromkeys(missing)))
