"""Why an engine is built and a proof made: what changed since the last build of the unit, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from enginery.core.digest import digest_of
from enginery.core.types import CALIBRATED, CPU_KIND, BuildRequest
from pipeline.compile.run_context import Workshop
from pipeline.compile.steps.inputs import Inputs, differences, inputs_of
from pipeline.spec.model import ModelSpec
from pipeline.values import Exported, Json

_SHAPES = ("inputs.", "outputs", "dims.")


@dataclass(frozen=True)
class LastBuild:
    """What the newest engine of a unit was built from. reads: see `Exported`.  onnx, golden: digests."""

    request: BuildRequest
    inputs: Inputs
    reads: str
    onnx: str
    golden: str


@dataclass(frozen=True)
class Causes:
    """What changed for each unit of a model since it was built last. before: those builds, by unit."""

    spec: ModelSpec
    shop: Workshop
    before: Mapping[str, LastBuild]

    @cached_property
    def inputs(self) -> Inputs:
        """What the steps read now; files are read when it is asked for."""
        return inputs_of(self.spec, self.shop)

    def changed(self, unit: str, *stages: str) -> list[str]:
        """What differs from what these stages read at the unit's last build; nothing where there was none."""
        before = self.before.get(unit)
        found = [differences(before.inputs[stage], self.inputs[stage]) for stage in stages] if before else []
        return list(dict.fromkeys(cause for causes in found for cause in causes))

    def of_build(self, request: BuildRequest, onnx: str) -> str:
        """Why an engine has to be built. onnx: digest of the exported model."""
        before = self.before.get(request.unit)
        if before is None:
            return explain_change(None, request)
        exported = before.onnx != onnx or _shapes(before.request) != _shapes(request)
        stages = ["export"] if exported else ["calibration"]
        if request.precision in CALIBRATED and before.request.model != request.model:
            stages = [*stages, "calibration"]
        return explain_change(before.request, request, self.changed(request.unit, *stages))


def causes_of(spec: ModelSpec, shop: Workshop) -> Causes:
    """What is on record of the last builds of a model, to be compared with now."""
    known = shop.recall("latest-builds", {"model": spec.model}) or {"units": {}, "from": {}}
    try:
        before = {
            unit: LastBuild(BuildRequest.from_json(found["request"]), **known["from"][found["from"]])
            for unit, found in known["units"].items()
        }
    except (KeyError, TypeError):  # written by other code; a record is only a memory
        before = {}
    return Causes(spec, shop, before)


def remember_builds(
    spec: ModelSpec, exported: Exported, built: Sequence[BuildRequest], shop: Workshop, new: bool
) -> None:
    """Note what these engines were built from, so that the next plan can say what has changed since.

    new: whether the version is; otherwise nothing is read again where the export was the same.
    """
    causes = causes_of(spec, shop)
    before = [causes.before.get(request.unit) for request in built]
    if not new and all(
        last and (last.request, last.reads) == (request, exported.reads)
        for last, request in zip(before, built, strict=True)
    ):
        return
    now = {request.unit: LastBuild(request, causes.inputs, *_read(exported)) for request in built}
    value = _as_json({**causes.before, **now})
    shop.remember("latest-builds", {"model": spec.model}, value, [])


def _read(exported: Exported) -> tuple[str, str, str]:
    return exported.reads, exported.model.digest, exported.golden


def _as_json(builds: Mapping[str, LastBuild]) -> Json:
    """Units that were built from the same share it."""
    units, sources = {}, {}
    for unit, last in sorted(builds.items()):
        source = {"inputs": last.inputs, "reads": last.reads, "onnx": last.onnx, "golden": last.golden}
        name = digest_of(source)
        sources[name] = source
        units[unit] = {"request": last.request.to_json(), "from": name}
    return {"units": units, "from": sources}


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
        *differences(_named("option", before.options), _named("option", now.options)),
        *differences(_named("version of", before.toolchain), _named("version of", now.toolchain)),
    ]
    return "; ".join(dict.fromkeys(reasons)) or "its engine is no longer in the registry"


def _shapes(request: BuildRequest) -> tuple[object, ...]:
    return request.inputs, request.outputs, request.profiles


def _named(word: str, values: Sequence[tuple[str, object]]) -> dict[str, str]:
    return {"kind of CPU" if name == CPU_KIND else f"{word} {name}": str(value) for name, value in values}
