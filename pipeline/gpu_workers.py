"""Proofs and canaries on a Ray worker that has the GPU, asked for by a process that has none.

Ray's workers hold the GPUs of their generation, busy or idle, so whatever needs one is a task of Ray, as a build is:
Ray places it on a worker that is there, or has its autoscaler start one, and the task holds one GPU until it has ended.
Values are small: a job is told digests and names, and its reports go through the registry.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from builders.errors import InputError, StepError
from builders.jobs import Job, Limits, Needs
from builders.local import LocalExecutor
from builders.types import Target
from pipeline.canary.automatic import Canaried, Wanted, canary, sides_of
from pipeline.pending import Pending, Proof, prove
from pipeline.registry import versions
from pipeline.registry.machine import AUTO, target_named
from pipeline.registry.parsing import parse_json
from pipeline.registry.store import open_store
from pipeline.steps.engines import gpu_labels
from pipeline.values import Json
from pipeline.workshop import Workshop
from validation.canary.report import MOST_BYTES

# Engines that are proven have the limits of their spec, each by itself; memory is the worker's to limit. A task that
# hangs gives its GPU back after a day.
LIMITS = Limits(86_400.0, 1 << 40, "replay less traffic, or start it again: what is proven by now is not proven again")
# What ends one version's task, and says nothing about the next one's.
_OF_ONE = ("error", "crash", "timeout", "memory", "node-memory", "node-lost")


def gpu_named(name: str) -> Target:
    """The GPU, a generation or a product of it, that workers have. Raises InputError for none, and for 'auto'."""
    target = None if name == AUTO else target_named(name)
    if target is None or target.is_cpu:
        raise InputError(f"{name!r} names no GPU of Ray's workers; name a generation or a product, such as sm_89 or l4")
    return target


def prove_on_worker(item: Pending, on: Target, shop: Workshop) -> list[Proof]:
    """As `pending.prove`, on a worker with this GPU; a task that fails is the version's row.

    Raises StepError 'no-node' where no worker with it comes, and when cancelled; UnavailableError without a cluster.
    """
    name = f"prove {item.reference} on {on.name}"
    engines = [entry.digest for entry in item.engines]
    arguments = {"model": item.manifest.model, "version": item.manifest.version, "engines": engines}
    try:
        rows = _run(name, "prove_here", arguments, on, shop)
    except StepError as error:
        if error.kind not in _OF_ONE:
            raise
        return [Proof(item.reference, None, "error", str(error))]
    return [Proof(**row) for row in rows]


def canary_on_worker(wanted: Wanted, shop: Workshop, say: Callable[[str], None]) -> Canaried:
    """As `automatic.canary`, on a worker with the GPU that `wanted.target` names; both engines take turns on it.

    No worker is asked for where there is nothing to compare. Raises as `automatic.canary` and `prove_on_worker` do.
    """
    on = gpu_named(wanted.target)
    sides = sides_of(shop.store, wanted)
    if isinstance(sides, str):
        return Canaried(None, sides)
    name = f"canary {wanted.model}@{wanted.version} on {on.name}"
    found = _run(name, "canary_here", {"wanted": asdict(wanted)}, on, shop)
    for line in found["said"]:
        say(line)
    report = found["report"]
    document = parse_json(shop.store.read_blob(report), MOST_BYTES) if report else None
    return Canaried(found["verdict"], found["reason"], report, document)


def prove_here(store: str, model: str, version: str, engines: list[str]) -> list[Json]:
    """The worker's side of `prove_on_worker`: a row for each engine. engines: digests."""
    place, executor = open_store(store), LocalExecutor()
    manifest = versions.load(place, model, version)
    item = Pending(manifest, tuple(entry for entry in manifest.engines if entry.digest in engines))
    return [asdict(row) for row in prove(item, Workshop(place, executor, executor))]


def canary_here(store: str, wanted: Json) -> Json:
    """The worker's side of `canary_on_worker`: verdict, reason, the report's digest, and what was said meanwhile."""
    said: list[str] = []
    found = canary(open_store(store), Wanted(**wanted), said.append)
    return {"verdict": found.verdict, "reason": found.reason, "report": found.report, "said": said}


def _run(name: str, function: str, arguments: Json, on: Target, shop: Workshop) -> Any:
    needs = Needs(gpu_labels(on), required=True, gpus=1)
    job = Job(name, f"{__name__}:{function}", {"store": shop.store.uri, **arguments}, LIMITS, needs)
    return shop.shown(shop.executor, name, job)
