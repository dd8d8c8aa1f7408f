"""Operations on engines of a version: attribution, fuzzing, comparison of golden sets."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

from builders.backends import discovery
from builders.backends.optional_methods import PartOpening
from builders.execution.jobs import Job, WorkerContext
from enginesmith.core.codec import encode, encode_document
from enginesmith.core.errors import InputError, UnknownNameError, is_digest
from enginesmith.core.names import parse_reference
from enginesmith.registry.evidence.canaries import RECIPE
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of, require_model
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.lookup import load, locate, models, versions
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.attributions import Suspect, attribute
from pipeline.compile.steps.blobs import fetch, fetch_graph, golden_set, open_session, runnable
from pipeline.compile.steps.engines import recall_engine
from pipeline.compile.steps.keys import engine_limits, model_shapes
from pipeline.compile.steps.proofs import CompiledLimits, reads_nan
from pipeline.operations.validate import spec_of
from pipeline.outcome import engine_of
from pipeline.spec.model import ModelSpec, rewrite_spec
from pipeline.values import Attributed, Built, EngineBlob, Graph, GraphVariant, ModelShapes, Recipe, Recorded, Unit
from validation.attribution.result import read_attribution
from validation.comparison.sessions import golden_drifts
from validation.fuzz.cases import Groups, draw, parse_only
from validation.fuzz.run import FuzzReport, FuzzSides, fuzz
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import default_budget
from validation.limits.noise_floor import DoubleSession

if TYPE_CHECKING:
    from validation.attribution.result import Attribution
    from validation.limits.noise_floor import Noise

# Which nodes drifted in a published version: in its graphs against the float model, in its engines against graphs.


@dataclass(frozen=True)
class AttributionAnswer:
    """The result for one graph or engine. attribution: None without an attribution; `attributed.headline` says why.

    failed: whether the attribution was tried and did not end; an engine that cannot be opened by parts has not failed.
    """

    attributed: Attributed
    attribution: "Attribution | None" = None
    failed: bool = False

    def to_json(self) -> dict[str, object]:
        """An item of `enginesmith debug attribute --json`."""
        attribution_json = encode_document(self.attribution) if self.attribution else None
        return {**encode(self.attributed), "attribution": attribution_json, "failed": self.failed}


def attribute_version(
    manifest: Manifest, targets: Collection[str], precision: str | None, context: RunContext
) -> Iterator[AttributionAnswer]:
    """Attribute the drift of every graph and every engine of these targets, failed or not; each graph once.

    targets: names.  precision: None for all.
    Raises UnknownNameError when the version has none, IntegrityError when its spec or a blob does not fit.
    """
    spec = spec_of(manifest)
    entries = [entry for entry in manifest.engines if entry.status != "refused"]
    matching_entries = [entry for entry in entries if entry.target in targets and precision in (None, entry.precision)]
    if not matching_entries:
        request_text = f"{', '.join(sorted(targets))}{f' in {precision}' if precision else ''}"
        unit_text = ", ".join(entry.unit for entry in entries) or "none"
        raise UnknownNameError(f"{manifest.reference} has no engine for {request_text}; it has: {unit_text}")
    for suspect in _suspects(manifest, matching_entries, context):
        if isinstance(suspect, Attributed):
            yield AttributionAnswer(suspect)
            continue
        attempt = attribute(suspect, manifest.onnx, manifest.golden, Work(spec, context))
        attribution = read_attribution(context.store, attempt.digest) if attempt.digest else None
        yield AttributionAnswer(attempt, attribution, failed=attribution is None)


def _suspects(
    manifest: Manifest, entries: Sequence[EngineEntry], context: RunContext
) -> Iterator[Suspect | Attributed]:
    """The graphs, each with the units built from it, then the engines; for one that cannot be attributed, why not."""
    entry_builds = [(entry, _find_built(manifest, entry, context)) for entry in entries]
    graphs: dict[str, Suspect] = {}
    for entry, build in entry_builds:
        if entry.graph != manifest.onnx:
            suspect = graphs.setdefault(build.unit.request.model, Suspect("quantization", build, ()))
            graphs[build.unit.request.model] = replace(suspect, units=(*suspect.units, entry.unit))
    yield from graphs.values()
    for entry, build in entry_builds:
        if reason := _why_not(build, entry):
            yield Attributed("engine", entry.unit, (entry.unit,), None, reason)
        else:
            yield Suspect("engine", build, (entry.unit,))


def _why_not(build: Built, entry: EngineEntry) -> str | None:
    """Why an engine cannot be attributed here; None where it can."""
    if not issubclass(discovery.load(entry.backend), PartOpening):
        return f"engines of {entry.backend} cannot be tapped yet; only their graph was taken apart"
    if build.digest is None:
        return f"it was not built or its build failed ({entry.reason}), so there is no engine"
    return discovery.configure(entry.backend, dict(entry.options)).runs(entry.hardware)


def _find_built(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Built:
    """The result of the build step; the engine of a unit that failed its checks is recalled by its build key."""
    request = request_of(entry)
    variants = [name for name, digest in manifest.sources.items() if digest == entry.graph and name != "onnx"]
    name = next((name.removeprefix("graph ") for name in variants if name.startswith("graph ")), entry.precision)
    recipe_digest = manifest.sources.get(f"{RECIPE} {name}")
    graph = Graph(
        _NamedVariant(request.precision, said=name),
        request.model,
        request.inputs,
        request.outputs,
        recipe=Recipe(recipe_digest) if recipe_digest else None,
    )
    unit = Unit(request, graph, "cached", "published")
    if entry.digest is None:
        return Built(unit, recall_engine(request, context))
    blob_fields = entry.digest, entry.size_bytes or 0, entry.suffix or ""
    return Built(unit, Recorded(request.key, *blob_fields, 0.0, entry.requires, entry.notes))


@dataclass(frozen=True)
class _NamedVariant(GraphVariant):
    """A graph variant of which the manifest keeps the name alone."""

    said: str = ""

    @property
    def name(self) -> str:
        """The name in the manifest."""
        return self.said


# Fuzzes one published engine on this machine, under the limits of the spec that it was built from.
#
# The engine runs in a process of its own, so that one that crashes on a shape ends that process alone.


@dataclass(frozen=True)
class FuzzEngine:
    """Compare an engine with its graph on drawn cases. golden: digest of the golden set.  limits: by metric.  shapes:
    of the model.

    seed, count: of random cases, besides those at the boundaries.  command: the words that fuzz this engine, for
    messages.  only: the one case to try.
    """

    engine: EngineBlob
    golden: str
    shapes: ModelShapes
    limits: Mapping[str, float]
    seed: int
    count: int
    command: tuple[str, ...]
    only: str | None = None

    def run(self, context: WorkerContext) -> FuzzReport:
        """Every case with its outcome. Raises InputError for a case that does not fit the model."""
        from builders.reference import ReferenceSession

        store, workdir, request = open_store(context.store), context.workdir, self.engine.request
        golden, dims = golden_set(store, self.golden, workdir), self.shapes.dims
        cases = [parse_only(self.only, dims)] if self.only else draw(dims, self.seed, self.count)
        source = fetch_graph(store, request.model, workdir / "graph.onnx")
        graph = runnable(source, request.precision)
        base_budget = default_budget("engine", request.precision).override(self.limits)
        with ReferenceSession(graph) as reference, open_session(store, self.engine, workdir) as session:
            # The graph in float64 is opened for a case that fails, and not before.
            exact_run = (lambda inputs: DoubleSession(source).run(inputs)) if request.precision == "fp32" else None
            limits = CompiledLimits(graph, request, self.limits, workdir)
            staged_limits, case_limits = limits(reference, golden), partial(limits.on_case, reference, golden)
            fuzz_sides = FuzzSides(
                reference, session, request.precision, staged_limits, base_budget, exact_run, golden_drifts(golden),
                None, reads_nan(graph), case_limits,
            )  # fmt: skip
            return fuzz(cases, self.shapes.inputs, dims, Groups(golden), fuzz_sides, self.seed, self.command)


def fuzz_published(choice: ChosenEngine, context: RunContext, *, seed: int, cases: int, only: str | None) -> FuzzReport:
    """Fuzz one engine: every case with its outcome, and the smallest failing ones with their command.

    cases: number of random cases, besides those at the boundaries.  only: the one case to try.
    Raises InputError for a case that does not fit the model, StepError for an engine that crashes.
    """
    entry, manifest = choice.entry, choice.manifest
    spec, request = spec_of(manifest), request_of(entry)
    registry = context.store.uri.removeprefix("file://")
    command = ["enginesmith", "debug", "fuzz", manifest.reference, "--registry", registry]
    command += ["--target", entry.target, "--precision", entry.precision, "--seed", str(seed)]
    fuzz_request = FuzzEngine(
        engine=engine_of(entry),
        golden=manifest.golden,
        shapes=model_shapes(spec),
        limits=spec.validation.limits_for(request.precision, "engine"),
        seed=seed,
        count=cases,
        command=tuple(command),
        only=only,
    )
    name = f"fuzz {entry.unit}"
    job = Job(name, fuzz_request, context.store.uri, engine_limits(spec, "proof"))
    return context.run_to_end(context.local, name, job)


# A text of fewer characters is not taken for the beginning of a digest.
SHORTEST = 8


@dataclass(frozen=True)
class MadeGolden:
    """A spec's golden set. digest, before: digests of this set and of the previous one.  change: their difference.

    frozen: the digest that the spec requires, None for any.
    """

    model: str
    digest: str
    before: str | None
    change: str | None
    frozen: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """A golden set: its digest, (name, kind) of each case, and the versions (model@version) that were proven with it.

    labels: whether it has the labels of a task.  noise: the noise floor of each output.  sequences: the steps of each.
    """

    digest: str
    cases: tuple[tuple[str, str], ...]
    labels: bool
    noise: "Noise | None"
    versions: tuple[str, ...]
    sequences: tuple[int, ...] = ()


def golden_of(store: Store, text: str) -> str:
    """The digest of the golden set that is named by its digest, by the beginning of it, or by a version's reference.

    Raises UnknownNameError where there is none, and InputError for an ensemble, whose graphs have one each.
    """
    if is_digest(text):
        if not store.has(text):
            raise UnknownNameError(f"no golden set {text} in {store.uri}")
        return text
    if len(text) >= SHORTEST and set(text) <= set("0123456789abcdef"):
        matches = sorted(digest for digest in _uses(store) if digest.startswith(text))
        if len(matches) == 1:
            return matches[0]
    manifest = locate(store, parse_reference(text)).manifest
    require_model(manifest)
    return manifest.golden


def describe_golden(store: Store, digest: str) -> Shown:
    """Contents of a golden set, and the versions that use it. Raises DataError for a blob that is no golden set."""
    with TemporaryDirectory(prefix="enginesmith-golden-") as folder:
        golden = GoldenSet.load(fetch(store, digest, Path(folder) / "golden.safetensors"))
        cases = tuple((case.name, case.kind) for case in golden.cases)
        versions, lengths = tuple(_uses(store).get(digest, ())), golden.sequences.lengths if golden.sequences else ()
        return Shown(digest, cases, golden.labels is not None, golden.noise, versions, lengths)


def unfreeze(spec: ModelSpec) -> ModelSpec:
    """The spec without `golden.frozen`. Raises InputError for a spec without golden data."""
    if spec.golden is None:
        raise InputError(f"{spec.path}: there is no golden data to freeze; add golden.data")
    return spec.model_copy(update={"golden": spec.golden.model_copy(update={"frozen": None})})


def write_frozen(path: Path, digest: str) -> None:
    """Set `golden.frozen` in a spec's file and leave every other character as it is.

    Raises InputError if the file cannot be edited; it is replaced only if the new text parses to the intended spec.
    """
    text = path.read_text(encoding="utf-8")
    new_text = _with_frozen(text, digest)
    if new_text is None:
        raise InputError(f"{path}: golden is not a block of lines; write there: frozen: {digest}")

    def reads_as_meant(old: ModelSpec, new: ModelSpec) -> bool:
        is_frozen = new.golden is not None and new.golden.frozen == digest
        return is_frozen and unfreeze(new).model_dump() == unfreeze(old).model_dump()

    if not rewrite_spec(path, new_text, reads_as_meant):
        raise InputError(f"{path}: the file cannot be edited automatically; add under golden: frozen: {digest}")


def _with_frozen(text: str, digest: str) -> str | None:
    """The text of a spec with `golden.frozen`; None if `golden` is no mapping that can take it."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    golden = next((value for key, value in pairs if key.value == "golden"), None)
    if not isinstance(golden, yaml.MappingNode) or not golden.value:
        return None
    yaml_node = next((value for key, value in golden.value if key.value == "frozen"), None)
    if yaml_node is not None:
        return f'{text[: yaml_node.start_mark.index]}"{digest}"{text[yaml_node.end_mark.index :]}'
    first_mark = golden.value[0][0].start_mark
    if golden.flow_style:
        return f'{text[: first_mark.index]}frozen: "{digest}", {text[first_mark.index :]}'
    return f'{text[: first_mark.index]}frozen: "{digest}"\n{" " * first_mark.column}{text[first_mark.index :]}'


def _uses(store: Store) -> dict[str, list[str]]:
    versions_by_digest: dict[str, list[str]] = {}
    for model in models(store):
        for version in versions(store, model):
            if digest := load(store, model, version).sources.get("golden"):
                versions_by_digest.setdefault(digest, []).append(f"{model}@{version}")
    return versions_by_digest
