"""What the steps of a model read, by the names that its owner knows, so that two builds can be compared.

Why an engine is built and a proof made: what changed since the last build of the unit, by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from enginery.core.digest import digest_of_file, is_digest
from enginery.core.text import pluralize
from enginery.core.types import CALIBRATED, CPU_KIND, BuildRequest
from pipeline.compile.closure.code import Root, backend_root, find_code
from pipeline.compile.last_builds import Inputs, LastBuild, recall_builds
from pipeline.compile.run_context import NotOnRecord, RunContext
from pipeline.compile.steps.calibration import MergeParts, ObservePart, ObservePartRemotely, calibration_digest
from pipeline.compile.steps.exports import ExportModel, place_of, source_digests
from pipeline.compile.steps.graphs import CheckGraph, WriteGraph
from pipeline.compile.steps.keys import WRITE_MODEL, package_versions
from pipeline.compile.steps.proofs import CheckEngine
from pipeline.compile.steps.search import SearchQuantization
from pipeline.spec.model import ModelSpec
from pipeline.values import Json

# Followed by a module.
_CODE = "code of "
_LONGEST, _MOST_MODULES = 60, 3


def inputs_of(spec: ModelSpec, context: RunContext) -> Inputs:
    """What each stage reads now: 'export', 'calibration', 'golden' and 'proof', as far as nothing must be run for it.

    Raises ModelError for a source file that is missing or leads out of the spec's folder.
    """
    return {
        "export": _export(spec, context),
        "calibration": _calibration(spec),
        "golden": _golden(spec),
        "proof": _proof(spec),
    }


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What changed, in words: 'weights w.safetensors changed', 'dims.batch.max: 8 -> 16'.

    A file that is not read any more is left out: what used to name it changed as well. Modules of Enginery are told in
    one line: 'code of validation.comparison.sessions and validation.metrics.drift changed'.
    """
    names = sorted(before.keys() | now.keys())
    found = _code_differences([name for name in names if name.startswith(_CODE) and before.get(name) != now.get(name)])
    for name in (name for name in names if not name.startswith(_CODE)):
        old, new = before.get(name), now.get(name)
        if old == new or (new is None and is_digest(str(old))):
            continue
        if is_digest(str(new)):
            found.append(f"{name} is new" if old is None else f"{name} changed")
        else:
            found.append(f"{name}: {'none' if old is None else old} -> {'none' if new is None else new}")
    return found


def _code_differences(changed: Sequence[str]) -> list[str]:
    if not changed:
        return []
    named = [name.removeprefix(_CODE) for name in changed[:_MOST_MODULES]]
    if more := len(changed) - len(named):
        named.append(pluralize(more, "other module"))
    return [f"{_CODE}{' and '.join(filter(None, (', '.join(named[:-1]), named[-1])))} changed"]


def _export(spec: ModelSpec, context: RunContext) -> dict[str, str]:
    parts: Json = spec.model_dump(mode="json", include={"source", "inputs", "outputs", "dims"})
    try:
        read = source_digests(spec, context)
    except NotOnRecord:  # a large ONNX file that changed: what else it names shows when it is read
        read = {"files": {spec.source.file: digest_of_file(spec.file(spec.source.file))}, "packages": {}}
    return {
        **{_name_files(place, spec): digest for place, digest in read["files"].items()},
        **_flat(parts),
        **_versions(read["packages"]),
        **_code(*WRITE_MODEL),
    }


def _calibration(spec: ModelSpec) -> dict[str, str]:
    wanted, searching = spec.calibration, [SearchQuantization] if spec.quantization.searches else []
    parts = _flat(spec.model_dump(mode="json", include={"calibration", "quantization"}))
    if wanted is None:
        return parts | _code(WriteGraph)
    code = _code(WriteGraph, ObservePart, ObservePartRemotely, MergeParts, *searching)
    return {f"calibration data {wanted.data}": calibration_digest(spec), **parts, **code}


def _golden(spec: ModelSpec) -> dict[str, str]:
    wanted = spec.golden
    data = {f"golden data {wanted.data}": digest_of_file(spec.file(wanted.data))} if wanted else {}
    parts = {"golden": {"data": wanted.data, "labels": wanted.labels}} if wanted else {}
    return {**data, **_flat(parts), **_code(ExportModel)}


def _proof(spec: ModelSpec) -> dict[str, str]:
    metric = spec.golden.metric.model_dump(mode="json") if spec.golden and spec.golden.metric else None
    limits = spec.validation.model_dump(mode="json", include={"limits", "contract"}, exclude_unset=True)
    parts = {"golden": {"metric": metric}, "validation": limits}
    return {**_flat(parts), **_code(CheckGraph, CheckEngine, *map(backend_root, spec.backends))}


def _code(*roots: Root) -> dict[str, str]:
    """What requests can reach, by module, and the versions of the packages that they import."""
    found = find_code(*roots)
    modules = {f"{_CODE}{module}": digest for module, digest in found.modules.items()}
    return {**_versions(package_versions(*found.packages)), **modules}


def _name_files(place: str, spec: ModelSpec) -> str:
    """'weights w.safetensors', 'entry point model.py', 'module layers.py', 'external data model.bin'."""
    source = spec.source
    if place == place_of(spec.file(source.file), spec):
        return f"{ {'torch': 'entry point', 'pt2': 'program', 'onnx': 'model'}[source.kind] } {place}"
    if source.weights and place == place_of(spec.file(source.weights), spec):
        return f"weights {place}"
    return f"{'module' if source.kind == 'torch' else 'external data'} {place}"


def _versions(found: Json) -> dict[str, str]:
    return {f"version of {name}": str(version) for name, version in found.items()}


def _flat(value: Json, prefix: str = "") -> dict[str, str]:
    """The leaves of a part of a spec, by their dotted names; what is not set is left out."""
    found: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, dict):
            found |= _flat(item, f"{prefix}{name}.")
        elif item is not None:
            found[f"{prefix}{name}"] = _text(item)
    return found


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_SHAPES = ("inputs.", "outputs", "dims.")


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
    return Causes(spec, context, recall_builds(spec.model, context))


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
