"""Which node drifted in what a version holds: its graphs against the float model, its engines against their graphs."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builders.backends import discovery
from enginery.core.codec import encode, encode_document
from enginery.core.errors import UnknownNameError
from enginery.registry.evidence.build_details import RECIPE
from enginery.registry.manifest import EngineEntry, Manifest
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.attributions import Suspect, attribute
from pipeline.compile.steps.engines import recall_engine
from pipeline.operations.revalidate import as_built, spec_of
from pipeline.values import Attributed, Built, GraphVariant, Recipe
from validation.attribution.result import read_attribution

if TYPE_CHECKING:
    from validation.attribution.result import Attribution


@dataclass(frozen=True)
class AttributionAnswer:
    """One graph or engine that was asked about. found: None where there is no attribution; `headline` says why.

    failed: whether it was tried and did not end; what cannot be taken apart at all has not failed.
    """

    told: Attributed
    found: "Attribution | None" = None
    failed: bool = False


def attribute_version(
    manifest: Manifest, targets: Collection[str], precision: str | None, context: RunContext
) -> Iterator[AttributionAnswer]:
    """Take apart every graph and every engine of these targets, failed or not; each graph once.

    Raises UnknownNameError when the version has none, IntegrityError when its spec or a blob does not fit.
    """
    spec = spec_of(manifest)
    for item in _suspects(manifest, _choose(manifest, targets, precision), context):
        if isinstance(item, Attributed):
            yield AttributionAnswer(item)
            continue
        told = attribute(item, spec, manifest.onnx, manifest.golden, context)
        found = read_attribution(context.store, told.digest) if told.digest else None
        yield AttributionAnswer(told, found, failed=found is None)


def _choose(manifest: Manifest, targets: Collection[str], precision: str | None) -> list[EngineEntry]:
    have = [entry for entry in manifest.engines if entry.status != "refused"]
    fits = [entry for entry in have if entry.target in targets and precision in (None, entry.precision)]
    if not fits:
        asked = f"{', '.join(sorted(targets))}{f' in {precision}' if precision else ''}"
        units = ", ".join(entry.unit for entry in have) or "none"
        raise UnknownNameError(f"{manifest.model}@{manifest.version} has no engine for {asked}; it has: {units}")
    return fits


def _suspects(
    manifest: Manifest, entries: Sequence[EngineEntry], context: RunContext
) -> Iterator[Suspect | Attributed]:
    graphs: dict[str, Suspect] = {}
    for entry in entries:
        built = _find_built(manifest, entry, context)
        if entry.graph != manifest.onnx:
            known = graphs.setdefault(built.unit.request.model, Suspect("quantization", built, ()))
            graphs[built.unit.request.model] = replace(known, units=(*known.units, entry.unit))
    yield from graphs.values()
    for entry in entries:
        built = _find_built(manifest, entry, context)
        if reason := _cannot(built, entry):
            yield Attributed("engine", entry.unit, (entry.unit,), None, reason)
        else:
            yield Suspect("engine", built, (entry.unit,))


def _cannot(built: Built, entry: EngineEntry) -> str | None:
    if not discovery.capabilities_of(entry.backend).opens_parts:
        return f"engines of {entry.backend} cannot be tapped yet; only their graph was taken apart"
    if built.digest is None:
        return f"its build failed ({entry.reason}), so there is no engine"
    return discovery.configure(entry.backend, dict(entry.options)).runs(entry.hardware)


def _find_built(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Built:
    """The unit as it was built; the engine of a unit that failed its checks is known by its build key."""
    built = as_built(entry)
    if built.digest is None and (found := recall_engine(built.unit.request, context)):
        built = Built.from_record(built.unit, found)
    flavours = [name for name, digest in manifest.sources.items() if digest == entry.graph and name != "onnx"]
    name = next((name.removeprefix("graph ") for name in flavours if name.startswith("graph ")), entry.precision)
    recipe = manifest.sources.get(f"{RECIPE} {name}")
    flavour = _NamedVariant(built.unit.request.precision, said=name)
    graph = replace(built.unit.graph, flavour=flavour, recipe=Recipe(recipe) if recipe else None)
    return replace(built, unit=replace(built.unit, graph=graph))


@dataclass(frozen=True)
class _NamedVariant(GraphVariant):
    """A graph variant of which the manifest keeps no more than the name."""

    said: str = ""

    @property
    def name(self) -> str:
        """As it was written."""
        return self.said


def encode_answer(answer: AttributionAnswer) -> dict[str, object]:
    """What `enginery attribute --json` prints of one."""
    found = encode_document(answer.found) if answer.found else None
    return {**encode(answer.told), "attribution": found, "failed": answer.failed}
