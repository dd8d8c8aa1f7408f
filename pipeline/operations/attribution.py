"""Which nodes drifted in a published version: in its graphs against the float model, in its engines against graphs."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from builders.backends import discovery
from enginesmith.core.codec import encode, encode_document
from enginesmith.core.errors import UnknownNameError
from enginesmith.registry.evidence.build_details import RECIPE
from enginesmith.registry.manifest import EngineEntry, Manifest
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.attributions import Suspect, attribute
from pipeline.compile.steps.engines import recall_engine
from pipeline.operations.revalidate import as_built, spec_of
from pipeline.values import Attributed, Built, GraphVariant, Recipe
from validation.attribution.result import read_attribution

if TYPE_CHECKING:
    from validation.attribution.result import Attribution


@dataclass(frozen=True)
class AttributionAnswer:
    """What was found of one graph or engine. found: None without an attribution; `attributed.headline` says why.

    failed: whether the attribution was tried and did not end; an engine that cannot be opened by parts has not failed.
    """

    attributed: Attributed
    found: "Attribution | None" = None
    failed: bool = False

    def to_json(self) -> dict[str, object]:
        """An item of `enginesmith debug attribute --json`."""
        found = encode_document(self.found) if self.found else None
        return {**encode(self.attributed), "attribution": found, "failed": self.failed}


def attribute_version(
    manifest: Manifest, targets: Collection[str], precision: str | None, context: RunContext
) -> Iterator[AttributionAnswer]:
    """Attribute the drift of every graph and every engine of these targets, failed or not; each graph once.

    targets: names.  precision: None for all.
    Raises UnknownNameError when the version has none, IntegrityError when its spec or a blob does not fit.
    """
    spec = spec_of(manifest)
    for item in _suspects(manifest, _choose(manifest, targets, precision), context):
        if isinstance(item, Attributed):
            yield AttributionAnswer(item)
            continue
        done = attribute(item, manifest.onnx, manifest.golden, Work(spec, context))
        found = read_attribution(context.store, done.digest) if done.digest else None
        yield AttributionAnswer(done, found, failed=found is None)


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
    """The graphs, each with the units built from it, then the engines; for one that cannot be attributed, why not."""
    units = [(entry, _find_built(manifest, entry, context)) for entry in entries]
    graphs: dict[str, Suspect] = {}
    for entry, built in units:
        if entry.graph != manifest.onnx:
            known = graphs.setdefault(built.unit.request.model, Suspect("quantization", built, ()))
            graphs[built.unit.request.model] = replace(known, units=(*known.units, entry.unit))
    yield from graphs.values()
    for entry, built in units:
        if reason := _why_not(built, entry):
            yield Attributed("engine", entry.unit, (entry.unit,), None, reason)
        else:
            yield Suspect("engine", built, (entry.unit,))


def _why_not(built: Built, entry: EngineEntry) -> str | None:
    """Why an engine cannot be attributed here; None where it can."""
    if not discovery.capabilities_of(entry.backend).opens_parts:
        return f"engines of {entry.backend} cannot be tapped yet; only their graph was taken apart"
    if built.digest is None:
        return f"it was not built or its build failed ({entry.reason}), so there is no engine"
    return discovery.configure(entry.backend, dict(entry.options)).runs(entry.hardware)


def _find_built(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Built:
    """The value that the build step gave; the engine of a unit that failed its checks is recalled by its build key."""
    built = as_built(entry)
    if built.digest is None and (found := recall_engine(built.unit.request, context)):
        built = Built(built.unit, found)
    variants = [name for name, digest in manifest.sources.items() if digest == entry.graph and name != "onnx"]
    name = next((name.removeprefix("graph ") for name in variants if name.startswith("graph ")), entry.precision)
    recipe = manifest.sources.get(f"{RECIPE} {name}")
    variant = _NamedVariant(built.unit.request.precision, said=name)
    graph = replace(built.unit.graph, variant=variant, recipe=Recipe(recipe) if recipe else None)
    return replace(built, unit=replace(built.unit, graph=graph))


@dataclass(frozen=True)
class _NamedVariant(GraphVariant):
    """A graph variant of which the manifest keeps the name alone."""

    said: str = ""

    @property
    def name(self) -> str:
        """The name in the manifest."""
        return self.said
