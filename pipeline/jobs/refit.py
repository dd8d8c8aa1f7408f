"""Giving a published engine other weights, in a process of its own: the worker's side of `enginery refit`."""

import time
from pathlib import Path

from builders import backends
from builders.digest import digest_of
from builders.errors import InputError, ModelError
from builders.process import enter_phase
from builders.refitting import Refitting, is_stripped
from builders.types import BuildRequest
from pipeline.jobs.blobs import fetch, fetched_engine
from pipeline.registry.records import remember
from pipeline.registry.store import open_store
from pipeline.values import Json


def refit_engine(store: str, before: Json, engine: str, suffix: str, request: Json, origin: str, workdir: Path) -> Json:
    """Make the engine of `request` from the one that `before` asked for, and put it on record as if it had been built.

    engine, suffix: of the old one.  origin: where it was published, for the notes.
    Raises ModelError when the models differ in more than their weights.
    """
    place = open_store(store)
    old, wanted = BuildRequest.from_json(before), BuildRequest.from_json(request)
    backend = backends.configure(wanted.backend, dict(wanted.options))
    backends.check_toolchain(backend, wanted)
    if not isinstance(backend, Refitting):
        raise InputError(f"engines of {wanted.backend} cannot be refitted")
    enter_phase("fetching")
    model = fetch(place, wanted.model, workdir / "new.onnx")
    _check_alike(fetch(place, old.model, workdir / "old.onnx"), model)
    enter_phase("refitting")
    begun = time.monotonic()
    made = backend.refit(fetched_engine(place, old, engine, suffix, workdir), model, wanted, workdir)
    seconds = round(time.monotonic() - begun, 3)
    enter_phase("storing")
    stored = place.seal_file(made.path)
    how = "weights left to the ONNX model" if is_stripped(wanted) else "weights replaced"
    value: Json = {
        "digest": stored.digest,
        "blake3": stored.blake3,
        "size_bytes": made.size_bytes,
        "suffix": made.suffix,
        "notes": [*made.notes, f"refitted from {origin}, engine {engine[:12]}: {how}, kernels kept"],
        "seconds": seconds,
        "refitted_from": engine,
        "request": request,
    }
    remember(place, "build", digest_of({"build": wanted.key}), value, [value["digest"]])
    return value


def _check_alike(old: Path, new: Path) -> None:
    from builders.structure import differs

    if reason := differs(old, new):
        raise ModelError(f"the models differ in more than their weights: {reason}; build the engine again")
