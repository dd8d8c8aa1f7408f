"""Why an engine is built and a proof made: what changed since the last build of the unit, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from enginery.core.codec import encode
from enginery.core.digest import digest_of
from enginery.core.types import CALIBRATED, CPU_KIND, BuildRequest
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.inputs import Inputs, differences, inputs_of
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported

_SHAPES = ("inputs.", "outputs", "dims.")


@dataclass(frozen=True)
class BuildSources:
    """What engines were built from. reads: see `Exported`.  onnx, golden: digests."""

    inputs: Inputs
    reads: str
    onnx: str
    golden: str


@dataclass(frozen=True)
class LastBuild:
    """The build of a unit's newest engine."""

    request: BuildRequest
    sources: BuildSources


@dataclass(frozen=True)
class _NamedBuild:
    request: BuildRequest
    from_: str


@dataclass(frozen=True)
class _LatestBuilds:
    """The last builds of a model's units as they are on record. from_: by digest; units share them."""

    units: Mapping[str, _NamedBuild]
    from_: Mapping[str, BuildSources]


@dataclass(frozen=True)
class Causes:
    """What changed for each unit of a model since it was built last. before: those builds, by unit."""

    spec: ModelSpec
    context: RunContext
    before: Mapping[str, LastBuild]

    @cached_property
    def inputs(self) -> Inputs:
        """What the steps read now; files are read when it is asked for."""
        return inputs_of(self.spec, self.context)

    def list_changes(self, unit: str, *stages: str) -> list[str]:
        """What differs from what these stages read at the unit's last build; nothing where there was none."""
        before = self.before.get(unit)
        found = [differences(before.sources.inputs[stage], self.inputs[stage]) for stage in stages] if before else []
        return list(dict.fromkeys(cause for causes in found for cause in causes))

    def of_build(self, request: BuildRequest, onnx: str) -> str:
        """Why an engine has to be built. onnx: digest of the exported model."""
        before = self.before.get(request.unit)
        if before is None:
            return explain_change(None, request)
        exported = before.sources.onnx != onnx or _shapes(before.request) != _shapes(request)
        stages = ["export"] if exported else ["calibration"]
        if request.precision in CALIBRATED and before.request.model != request.model:
            stages = [*stages, "calibration"]
        return explain_change(before.request, request, self.list_changes(request.unit, *stages))


def causes_of(spec: ModelSpec, context: RunContext) -> Causes:
    """What is on record of the last builds of a model, to be compared with now."""
    known = context.recall("latest-builds", {"model": spec.model}, _LatestBuilds) or _LatestBuilds({}, {})
    before = {
        unit: LastBuild(found.request, known.from_[found.from_])
        for unit, found in known.units.items()
        if found.from_ in known.from_
    }
    return Causes(spec, context, before)


def remember_builds(
    spec: ModelSpec, exported: Exported, built: Sequence[BuildRequest], context: RunContext, new: bool
) -> None:
    """Note what these engines were built from, so that the next plan can say what has changed since.

    new: whether the version is; otherwise nothing is read again where the export was the same.
    """
    causes = causes_of(spec, context)
    before = [causes.before.get(request.unit) for request in built]
    if not new and all(
        last and (last.request, last.sources.reads) == (request, exported.reads)
        for last, request in zip(before, built, strict=True)
    ):
        return
    sources = BuildSources(causes.inputs, exported.reads, exported.model.digest, exported.golden)
    builds = {**causes.before, **{request.unit: LastBuild(request, sources) for request in built}}
    named = {unit: (last, digest_of(encode(last.sources))) for unit, last in sorted(builds.items())}
    units = {unit: _NamedBuild(last.request, name) for unit, (last, name) in named.items()}
    value = _LatestBuilds(units, {name: last.sources for last, name in named.values()})
    context.remember("latest-builds", {"model": spec.model}, encode(value), [])


def explain_change(before: BuildRequest | None, now: BuildRequest, causes: Sequence[str] = ()) -> str:
    """Why an engine has to be built, compared with the one built last for the same unit.

    causes: what changed in what the graph is made from.
    """
    if before is None:
        return "no engine for this unit yet"
    regraphed = before.model != now.model
    reshaped = _shapes(before) != _shapes(now)
    of_shapes = [cause for cause in causes if cause.startswith(_SHAPES)]
    reasons = [
        *((causes or ["its graph is another one"]) if regraphed else []),
        *((of_shapes or ["the shapes changed"]) if reshaped and not (regraphed and of_shapes) else []),
        *differences(_name("option", before.options), _name("option", now.options)),
        *differences(_name("version of", before.toolchain), _name("version of", now.toolchain)),
    ]
    return "; ".join(dict.fromkeys(reasons)) or "its engine is no longer in the registry"


def _shapes(request: BuildRequest) -> tuple[object, ...]:
    return request.inputs, request.outputs, request.profiles


def _name(word: str, values: Sequence[tuple[str, object]]) -> dict[str, str]:
    return {"kind of CPU" if name == CPU_KIND else f"{word} {name}": str(value) for name, value in values}
