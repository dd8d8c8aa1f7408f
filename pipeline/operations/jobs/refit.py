"""Giving a published engine other weights, in a process of its own: the worker's side of `enginery refit`."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from builders.backends import discovery
from builders.backends.refitting import get_refitting
from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginery.core.errors import InputError, ModelError
from enginery.core.requirements import Weights
from enginery.core.types import BuildRequest
from enginery.registry.store.base import open_store
from pipeline.compile.jobs.blobs import fetch, fetch_engine
from pipeline.compile.jobs.engines import record_engine
from pipeline.values import EngineBlob, EngineRecord


@dataclass(frozen=True)
class RefitEngine:
    """Make the engine of `request` from another one, and put it on record as if it had been built.

    before: the old engine.  origin: where it was published, for the notes.
    """

    before: EngineBlob
    request: BuildRequest
    origin: str

    def run(self, context: WorkerContext) -> EngineRecord:
        """The new engine's record. Raises ModelError when the models differ in more than their weights."""
        place, workdir = open_store(context.store), context.workdir
        old, wanted = self.before, self.request
        backend = discovery.configure(wanted.backend, dict(wanted.options))
        discovery.check_toolchain(backend, wanted)
        refitter = get_refitting(backend)
        if refitter is None:
            raise InputError(f"engines of {wanted.backend} cannot be refitted")
        enter_phase("fetching")
        model = fetch(place, wanted.model, workdir / "new.onnx")
        _check_alike(fetch(place, old.request.model, workdir / "old.onnx"), model)
        enter_phase("refitting")
        begun = time.monotonic()
        made = refitter.refit(fetch_engine(place, old, workdir), model, wanted, workdir)
        seconds = round(time.monotonic() - begun, 3)
        enter_phase("storing")
        stripped = any(isinstance(item, Weights) for item in made.requires)
        how = "weights left to the ONNX model" if stripped else "weights replaced"
        note = f"refitted from {self.origin}, engine {old.digest[:12]}: {how}, kernels kept"
        engine = replace(made, request=wanted, notes=(*made.notes, note))
        return record_engine(place, engine, seconds, {}, refitted_from=old.digest)


def _check_alike(old: Path, new: Path) -> None:
    from builders.onnx_graphs.structure import differs

    if reason := differs(old, new):
        raise ModelError(f"the models differ in more than their weights: {reason}; build the engine again")
