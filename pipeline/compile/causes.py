"""The reasons for builds and proofs: the changes since a unit's last build, under names that the spec's owner knows;
and the recorded sources of each unit's newest engine, by model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from enginesmith.core.codec import encode
from enginesmith.core.errors import digest_of, digest_of_file, digest_of_path, is_digest
from enginesmith.core.text import pluralize
from enginesmith.core.types import CALIBRATED, CPU_KIND, BuildRequest
from pipeline.compile.closure.code import Root, backend_root, find_code
from pipeline.compile.run_context import NotOnRecord, RunContext, Work
from pipeline.compile.steps.calibration import MergeParts, ObservePart, ObservePartRemotely, calibration_digest
from pipeline.compile.steps.exports import ExportModel, place_of, source_digests
from pipeline.compile.steps.graphs import CheckGraph, WriteGraph
from pipeline.compile.steps.keys import WRITE_MODEL, package_versions
from pipeline.compile.steps.proofs import CheckEngine
from pipeline.compile.steps.search import SearchQuantization
from pipeline.spec.model import ModelSpec
from pipeline.values import Json

# Inputs of steps, by stage ('export', 'calibration', 'golden', 'proof'), then by name: a digest, or a value as text.
Inputs = dict[str, dict[str, str]]


@dataclass(frozen=True)
class BuildSources:
    """Sources of engines. reads: see `Exported`.  onnx, golden: digests.  inputs: what steps read, by
    stage and name."""

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
    """The record of a model's last builds. units: by unit.  from_: sources by their digest, which units share."""

    units: Mapping[str, _NamedBuild]
    from_: Mapping[str, BuildSources]


def recall_builds(model: str, context: RunContext) -> dict[str, LastBuild]:
    """The last build of each unit of a model that has one."""
    latest_builds = context.recall("latest-builds", {"model": model}, _LatestBuilds) or _LatestBuilds({}, {})
    return {
        unit: LastBuild(unit_build.request, latest_builds.from_[unit_build.from_])
        for unit, unit_build in latest_builds.units.items()
        if unit_build.from_ in latest_builds.from_
    }


def remember_builds(
    model: str,
    build_requests: Sequence[BuildRequest],
    reads: str,
    read_sources: Callable[[], BuildSources],
    context: RunContext,
    new: bool,
) -> None:
    """Note what these engines were built from, so that the next plan can say what has changed since.

    reads: see `Exported`.  read_sources: reads the files; called only for a version that is new, or where a request or
    `reads` is another than at the last build.
    """
    previous_builds = recall_builds(model, context)
    last_builds = [previous_builds.get(request.unit) for request in build_requests]
    if not new and all(
        last_build and (last_build.request, last_build.sources.reads) == (request, reads)
        for last_build, request in zip(last_builds, build_requests, strict=True)
    ):
        return
    sources = read_sources()
    builds = {**previous_builds, **{request.unit: LastBuild(request, sources) for request in build_requests}}
    named_builds = {
        unit: (last_build, digest_of(encode(last_build.sources))) for unit, last_build in sorted(builds.items())
    }
    units = {unit: _NamedBuild(last_build.request, name) for unit, (last_build, name) in named_builds.items()}
    value = _LatestBuilds(units, {name: last_build.sources for last_build, name in named_builds.values()})
    context.remember("latest-builds", {"model": model}, encode(value), [])


# Followed by a module.
_CODE = "code of "
_SHAPES = ("inputs.", "outputs", "dims.")
_LONGEST, _MOST_MODULES = 60, 3


def inputs_of(work: Work) -> Inputs:
    """Current inputs of each stage ('export', 'calibration', 'golden' and 'proof') that are known without running it.

    Raises ModelError for a source file that is missing or leads out of the spec's folder.
    """
    spec = work.spec
    calibration, golden = spec.calibration, spec.golden
    observe_types = [ObservePart, ObservePartRemotely, MergeParts] if calibration else []
    search_types = [SearchQuantization] if calibration and spec.quantization.searches else []
    metric = golden.model_dump(mode="json", include={"metric"})["metric"] if golden else None
    validation_fields = spec.validation.model_dump(mode="json", include={"limits", "contract"}, exclude_unset=True)
    return {
        "export": _export_inputs(work),
        "calibration": {
            **({f"calibration data {calibration.data}": calibration_digest(spec)} if calibration else {}),
            **_flatten(spec.model_dump(mode="json", include={"calibration", "quantization"})),
            **_code(WriteGraph, *observe_types, *search_types),
        },
        "golden": {
            **({f"golden data {golden.data}": digest_of_path(spec.file(golden.data))} if golden else {}),
            **(_flatten({"golden": {"data": golden.data, "labels": golden.labels}}) if golden else {}),
            **_code(ExportModel),
        },
        "proof": {
            **_flatten({"golden": {"metric": metric}, "validation": validation_fields}),
            **_code(CheckGraph, CheckEngine, *map(backend_root, spec.backends)),
        },
    }


def _export_inputs(work: Work) -> dict[str, str]:
    spec = work.spec
    try:
        input_digests = source_digests(spec, work.context)
    except NotOnRecord:  # a large ONNX file that changed: what else it names shows when it is read
        input_digests = {"files": {spec.source_file: digest_of_file(spec.file(spec.source_file))}, "packages": {}}
    return {
        **{_name_file(file, spec): digest for file, digest in input_digests["files"].items()},
        **_flatten(spec.model_dump(mode="json", include={"source", "inputs", "outputs", "dims"})),
        **_name_versions(input_digests["packages"]),
        **_code(*WRITE_MODEL),
    }


def _code(*roots: Root) -> dict[str, str]:
    """Code that requests can reach, by module, and the versions of the packages that they import."""
    closure = find_code(*roots)
    modules = {f"{_CODE}{module}": digest for module, digest in closure.modules.items()}
    return {**_name_versions(package_versions(*closure.packages)), **modules}


def _name_versions(versions: Mapping[str, object]) -> dict[str, str]:
    return {f"version of {name}": str(version) for name, version in versions.items()}


def _name_file(place: str, spec: ModelSpec) -> str:
    """'weights w.safetensors', 'entry point model.py', 'module layers.py', 'library libcube.so', 'external data
    model.bin'."""
    source = spec.source
    if place == place_of(spec.file(spec.source_file), spec):
        return f"{ {'torch': 'entry point', 'pt2': 'program', 'onnx': 'model'}[source.kind] } {place}"
    if source.weights and place == place_of(spec.file(source.weights), spec):
        return f"weights {place}"
    if any(place == place_of(spec.file(library.file), spec) for library in source.libraries):
        return f"library {place}"
    return f"{'module' if source.kind == 'torch' else 'external data'} {place}"


def _flatten(value: Json, prefix: str = "") -> dict[str, str]:
    """The leaves of a part of a spec, by their dotted names, without unset ones."""
    flat_values: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            flat_values |= _flatten(item, f"{prefix}{name}.")
        elif item is not None:
            text = item if isinstance(item, str) else json.dumps(item)
            flat_values[f"{prefix}{name}"] = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return flat_values


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Descriptions of changes: 'weights w.safetensors changed', 'dims.batch.max: 8 -> 16'.

    A file that is not read any more is left out: what used to name it changed as well. Modules of Enginesmith are
    listed in one line: 'code of validation.comparison.sessions and validation.metrics.drift changed'.
    """
    names, changes = sorted(before.keys() | now.keys()), list[str]()
    if changed_code := [name for name in names if name.startswith(_CODE) and before.get(name) != now.get(name)]:
        module_names = [name.removeprefix(_CODE) for name in changed_code[:_MOST_MODULES]]
        if other_count := len(changed_code) - len(module_names):
            module_names.append(pluralize(other_count, "other module"))
        changes.append(f"{_CODE}{' and '.join(filter(None, (', '.join(module_names[:-1]), module_names[-1])))} changed")
    for name in (name for name in names if not name.startswith(_CODE)):
        old_value, new_value = before.get(name), now.get(name)
        if old_value == new_value or (new_value is None and is_digest(str(old_value))):
            continue
        if is_digest(str(new_value)):
            changes.append(f"{name} is new" if old_value is None else f"{name} changed")
        else:
            changes.append(
                f"{name}: {'none' if old_value is None else old_value} -> {'none' if new_value is None else new_value}"
            )
    return changes


@dataclass(frozen=True)
class Causes:
    """Changes for each unit of a model since its last build."""

    work: Work

    @cached_property
    def before(self) -> Mapping[str, LastBuild]:
        """The last builds, by unit; their records are read on first use."""
        return recall_builds(self.work.spec.model, self.work.context)

    @cached_property
    def inputs(self) -> Inputs:
        """Current inputs of the steps; files are read on first use."""
        return inputs_of(self.work)

    def list_changes(self, unit: str, *stages: str) -> list[str]:
        """Differences from the inputs of these stages at the unit's last build; empty without one."""
        last_build = self.before.get(unit)
        change_groups = (
            [differences(last_build.sources.inputs[stage], self.inputs[stage]) for stage in stages]
            if last_build
            else []
        )
        return list(dict.fromkeys(cause for causes in change_groups for cause in causes))

    def of_build(self, request: BuildRequest, onnx: str) -> str:
        """Why an engine has to be built. onnx: digest of the exported model."""
        last_build = self.before.get(request.unit)
        if last_build is None:
            return explain_change(None, request)
        is_exported_anew = last_build.sources.onnx != onnx or _shapes(last_build.request) != _shapes(request)
        stages = ["export"] if is_exported_anew else ["calibration"]
        if request.precision in CALIBRATED and last_build.request.model != request.model:
            stages = [*stages, "calibration"]
        return explain_change(last_build.request, request, self.list_changes(request.unit, *stages))


def explain_change(before: BuildRequest | None, now: BuildRequest, causes: Sequence[str] = ()) -> str:
    """Why an engine is built, compared with the unit's last. causes: changes of the graph's sources."""
    if before is None:
        return "no engine for this unit yet"
    has_new_graph = before.model != now.model
    has_new_shapes = _shapes(before) != _shapes(now)
    shape_causes = [cause for cause in causes if cause.startswith(_SHAPES)]
    reasons = [
        *((causes or ["its graph changed"]) if has_new_graph else []),
        *((shape_causes or ["the shapes changed"]) if has_new_shapes and not (has_new_graph and shape_causes) else []),
        *differences(_name("option", before.options), _name("option", now.options)),
        *differences(_name("version of", before.toolchain), _name("version of", now.toolchain)),
    ]
    return "; ".join(dict.fromkeys(reasons)) or "its engine is no longer in the registry"


def _shapes(request: BuildRequest) -> tuple[object, ...]:
    return request.inputs, request.outputs, request.profiles


def _name(word: str, values: Sequence[tuple[str, object]]) -> dict[str, str]:
    return {"kind of CPU" if name == CPU_KIND else f"{word} {name}": str(value) for name, value in values}
