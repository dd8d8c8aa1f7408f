"""Fuzzes one published engine on this machine, with the limits of the spec that it was built from."""

from dataclasses import asdict, dataclass
from typing import Any

from builders.jobs import Job
from pipeline.canary.engines import Chosen
from pipeline.registry.requests import request_of
from pipeline.revalidate import spec_of
from pipeline.spec.model import overrides
from pipeline.steps.keys import engine_limits
from pipeline.values import Json
from pipeline.workshop import Workshop


@dataclass(frozen=True)
class Asked:
    """What to try. cases: random ones, besides the boundaries.  histogram: {dim: {size: count}}.  only: one case."""

    seed: int = 0
    cases: int = 50
    histogram: Any = None
    only: str | None = None


def fuzz_published(chosen: Chosen, asked: Asked, shop: Workshop) -> Json:
    """The report on one engine: every case with its outcome, and the smallest failing ones with their command.

    Raises InputError for a histogram or a case that does not fit the model, StepError for an engine that crashes.
    """
    entry, manifest = chosen.entry, chosen.manifest
    spec, request = spec_of(manifest), request_of(entry)
    registry = shop.store.uri.removeprefix("file://")
    command = ["enginery", "fuzz", f"{manifest.model}@{manifest.version}", "--registry", registry]
    command += ["--target", entry.target, "--precision", entry.precision, "--seed", str(asked.seed)]
    arguments = {
        "store": shop.store.uri,
        "request": request.to_json(),
        "suffix": entry.suffix,
        "engine": entry.digest,
        "golden": manifest.sources["golden"],
        "model": {
            "inputs": [asdict(tensor) for tensor in spec.tensors()],
            "dims": [asdict(dim) for dim in spec.named_dims()],
        },
        "limits": dict(overrides(spec, request.precision, "engine")),
        "asked": {
            "seed": asked.seed,
            "count": asked.cases,
            "histogram": asked.histogram,
            "only": asked.only,
            "command": command,
        },
    }
    limits = engine_limits(spec, "proof")
    name = f"fuzz {entry.unit}"
    report: Json = shop.shown(shop.local, name, Job(name, "pipeline.jobs.fuzz:fuzz_engine", arguments, limits))
    return {**chosen.identity, **report}
