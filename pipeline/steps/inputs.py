"""What the steps of a model read, by the names that its owner knows, so that two builds can be compared."""

import json
from typing import Any

from builders.digest import digest_of_file, is_digest
from pipeline.only_records import NotOnRecord
from pipeline.spec.model import ModelSpec
from pipeline.steps.keys import CHECK_CODE, EXPORT_CODE, MEASURING, OBSERVATION_CODE
from pipeline.steps.ranges import calibration_digest
from pipeline.steps.sources import place_of, source_digests
from pipeline.values import Json
from pipeline.workshop import Workshop, code_of, versions

# By stage, then by name: a digest, or a value as text.
Inputs = dict[str, dict[str, str]]
_CODE = "enginery's own code"
_LONGEST = 60


def inputs_of(spec: ModelSpec, shop: Workshop) -> Inputs:
    """What each stage reads now: 'export', 'calibration', 'golden' and 'proof', as far as nothing must be run for it.

    Raises ModelError for a source file that is missing or leads out of the spec's folder.
    """
    return {
        "export": _export(spec, shop),
        "calibration": _calibration(spec),
        "golden": _golden(spec),
        "proof": _proof(spec),
    }


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What changed, in words: 'weights w.safetensors changed', 'dims.batch.max: 8 -> 16'.

    A file that is not read any more is left out: what used to name it changed as well.
    """
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new or (new is None and is_digest(str(old))):
            continue
        if is_digest(str(new)):
            found.append(f"{name} is new" if old is None else f"{name} changed")
        else:
            found.append(f"{name}: {'none' if old is None else old} -> {'none' if new is None else new}")
    return found


def _export(spec: ModelSpec, shop: Workshop) -> dict[str, str]:
    parts: Json = spec.model_dump(mode="json", include={"source", "inputs", "outputs", "dims"})
    try:
        read = source_digests(spec, shop)
    except NotOnRecord:  # a large ONNX file that changed: what else it names shows when it is read
        read = {"files": {spec.source.file: digest_of_file(spec.file(spec.source.file))}, "packages": {}}
    return {
        **{_named(place, spec): digest for place, digest in read["files"].items()},
        **_flat(parts),
        **_versions(read["packages"] | versions("torch", "onnx", "onnxscript", "onnx-ir")),
        _CODE: code_of(*EXPORT_CODE),
    }


def _calibration(spec: ModelSpec) -> dict[str, str]:
    wanted, shared = spec.calibration, {**_versions(versions(*MEASURING)), _CODE: code_of(*OBSERVATION_CODE)}
    parts = _flat(spec.model_dump(mode="json", include={"calibration", "quantization"}))
    if wanted is None:
        return parts | shared
    return {f"calibration data {wanted.data}": calibration_digest(spec), **parts, **shared}


def _golden(spec: ModelSpec) -> dict[str, str]:
    wanted = spec.golden
    data = {f"golden data {wanted.data}": digest_of_file(spec.file(wanted.data))} if wanted else {}
    parts = {"golden": {"data": wanted.data, "labels": wanted.labels}} if wanted else {}
    code = code_of(*EXPORT_CODE, *CHECK_CODE)
    return {**data, **_flat(parts), **_versions(versions("torch", "onnxruntime", "numpy")), _CODE: code}


def _proof(spec: ModelSpec) -> dict[str, str]:
    metric = spec.golden.metric.model_dump(mode="json") if spec.golden and spec.golden.metric else None
    limits = spec.validation.model_dump(mode="json", include={"limits", "contract"}, exclude_unset=True)
    parts = {"golden": {"metric": metric}, "validation": limits}
    return {**_flat(parts), **_versions(versions(*MEASURING)), _CODE: code_of(*CHECK_CODE)}


def _named(place: str, spec: ModelSpec) -> str:
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
