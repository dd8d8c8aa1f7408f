"""The JSON description beside a pulled engine: what a server needs to load it; and the names of both."""

import json
from collections.abc import Mapping
from dataclasses import replace

from enginesmith.core.codec import encode
from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.state import state_ends, states_of, with_int8_states
from enginesmith.registry.manifest import EngineEntry, Manifest, make_request
from enginesmith.registry.versions.lookup import Located
from enginesmith.serving.padding import padding_of

FORMAT = 1


def folder_name(located: Located, engine: EngineEntry) -> str:
    """The name of the folder of an engine, unique by the digest of its description."""
    description = describe(located, engine, f"{stem_of(located.manifest, engine)}{engine.suffix}")
    return f"{located.manifest.version}-{digest_of_bytes(as_json(description))[:16]}"


def stem_of(manifest: Manifest, engine: EngineEntry) -> str:
    """The file name of an engine and its description, without the suffix; with the backend where the version has
    engines of several for one target and precision."""
    stem = f"{manifest.model}-{manifest.version}-{engine.target}-{engine.precision}"
    beside = (item for item in manifest.engines if item.digest and item.target == engine.target)
    if len({item.backend for item in beside if item.precision == engine.precision}) > 1:
        stem += f"-{engine.backend}"
    return f"{stem}-cache" if manifest.is_cache(engine) else stem


def weights_name(manifest: Manifest, engine: EngineEntry) -> str | None:
    """The file name of the model beside an engine that holds its weights; None where it has them itself."""
    return f"{stem_of(manifest, engine)}.weights.onnx" if engine.is_stripped else None


def shards_of(manifest: Manifest, engine: EngineEntry) -> dict[str, int]:
    """The shards beside an engine, its own and those of the model with its weights: sizes in bytes by digest."""
    weights = manifest.shards.get(str(engine.graph), {}) if engine.is_stripped else {}
    return {**manifest.shards.get(str(engine.digest), {}), **weights}


def as_json(found: Mapping[str, object]) -> bytes:
    """A description as bytes of its file."""
    return (json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def describe(located: Located, engine: EngineEntry, file: str) -> dict[str, object]:
    """What a server needs to load an engine, and the engine's origin, as a JSON object."""
    manifest = located.manifest
    origin = {
        "format": FORMAT,
        "file": file,
        "model": manifest.model,
        "version": manifest.version,
        "channel": located.channel.name if located.channel else None,
        "manifest": manifest.digest,
    }
    weights = weights_name(manifest, engine)
    found: dict[str, object] = {"weights": weights} if weights else {}
    found |= {"kind": "cache"} if manifest.is_cache(engine) else {}
    if shards := shards_of(manifest, engine):
        found["shards"] = sorted(shards)
    request = with_int8_states(make_request(engine))
    if states := states_of(manifest.spec):
        found |= {
            "state": [encode(state) for state in states],
            "ends": state_ends(request.inputs, states, request.profiles),
        }
    if (padding := padding_of(manifest.spec)).inputs:
        found["padding"] = encode(padding)
    if engine.quantized_states:
        engine = replace(engine, inputs=request.inputs, outputs=request.outputs, profiles=request.profiles)
    return origin | found | {key: value for key, value in encode(engine).items() if key != "checks"}
