"""Compiling one engine, and running it."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builders import backends, fitting
from builders.errors import EngineryError, InputError
from builders.process import enter_phase
from builders.types import BuildRequest, Session
from pipeline.jobs.blobs import dims_from, fetch, fetched_engine, golden_set, proof_of, runnable, tensors_from
from pipeline.jobs.calls import tried_calls
from pipeline.jobs.limits import engine_limits
from pipeline.jobs.timing import TimingCache
from pipeline.registry.store import Store, open_store
from pipeline.values import Json

if TYPE_CHECKING:
    from validation.drift import Drift
    from validation.golden import GoldenSet
    from validation.limits import StagedLimits
    from validation.report import Check


def build_engine(store: str, request: Json, workdir: Path, workspace_mib: int | None = None) -> Json:
    """Compile one engine and upload it: digests, size, suffix, notes, seconds, and the digests of what the build left
    beside it, and the request that was built. Puts itself on record by the key of that request.

    workspace_mib: instead of the request's, in MiB, for a build whose first try ran out of memory. What is built is
    then another request, and it is put on record that it stands for the one asked for.
    """
    from builders.digest import digest_of
    from pipeline.registry.records import remember

    place = open_store(store)
    asked = BuildRequest.from_json(request)
    wanted = asked if workspace_mib is None else asked.with_option("workspace_mib", workspace_mib)
    backend = backends.configure(wanted.backend, dict(wanted.options))
    backends.check_toolchain(backend, wanted)
    enter_phase("fetching")
    model = fetch(place, wanted.model, workdir / "model.onnx")
    timing = TimingCache(place, backend, workdir)
    timing.fetch()
    enter_phase("compiling")
    begun = time.monotonic()
    try:
        engine = backend.build(wanted, model, workdir)
    except EngineryError:
        timing.keep()  # what was measured until then makes the next try shorter
        raise
    seconds = round(time.monotonic() - begun, 3)
    enter_phase("storing")
    stored = place.seal_file(engine.path)
    extras = {name: place.put_file(path) for name, path in engine.extras}
    timing.keep()
    value: Json = {
        "digest": stored.digest,
        "blake3": stored.blake3,
        "size_bytes": engine.size_bytes,
        "suffix": engine.suffix,
        "notes": [*engine.notes, *timing.notes, *_reduced_notes(asked, wanted)],
        "seconds": seconds,
        "extras": extras,
        "request": wanted.to_json(),
    }
    remember(place, "build", digest_of({"build": wanted.key}), value, [value["digest"], *extras.values()])
    if wanted != asked:
        remember(place, "reduced-workspace", digest_of({"build": asked.key}), {"request": wanted.to_json()})
    return value


def _reduced_notes(asked: BuildRequest, built: BuildRequest) -> list[str]:
    if built == asked:
        return []
    before, now = (dict(request.options)["workspace_mib"] for request in (asked, built))
    return [f"built with workspace_mib {now} instead of {before}: a first build had run out of memory"]


def check_engine(
    store: str,
    request: Json,
    suffix: str,
    engine: str,
    golden: str,
    limits: Mapping[str, float],
    metric: Json | None,
    contract: Json | None,
    calls: Json | None,
    workdir: Path,
) -> Json:
    """Run an engine against the graph it was built from (the engine joint), with its contract and the task metric.

    contract: of the spec, and the shapes that it speaks of; None when there is none.  calls: as `tried_calls` takes it.
    """
    from builders.onnxruntime import OrtSession
    from validation.budget import default_budget
    from validation.compare import drift_checks
    from validation.fuzz.outcome import Pair
    from validation.tally import Spreads

    place, spreads, started = open_store(store), Spreads(), time.perf_counter()
    wanted = BuildRequest.from_json(request)
    frozen = golden_set(place, golden, workdir)
    graph = runnable(fetch(place, wanted.model, workdir / "graph.onnx"), wanted.precision)
    with (
        OrtSession(graph, optimized=False) as expected,
        engine_session(place, wanted, engine, suffix, workdir) as actual,
    ):
        held = engine_limits(graph, expected, wanted, frozen, limits, workdir)
        usual: dict[str, Drift] = {}
        checks = drift_checks("engine", expected, actual, frozen, held, spreads, usual)
        documented = default_budget("engine", wanted.precision)
        pair = Pair(expected, actual, wanted.precision, held, documented, usual=usual)
        checks += tried_calls(calls, wanted, pair, frozen, graph, (checks, time.perf_counter() - started))
        if contract:
            checks += _contract_checks(contract, expected, actual, frozen, held)
        return proof_of(checks, actual, frozen, metric, "engine", spreads.at("engine"))


def _contract_checks(
    contract: Json, expected: Session, actual: Session, golden: "GoldenSet", limits: "StagedLimits"
) -> "tuple[Check, ...]":
    from validation.batches import leading_dim
    from validation.contracts.contract import Contract, contract_checks

    inputs, dims = tensors_from(contract["shapes"]["inputs"]), dims_from(contract["shapes"]["dims"])
    batch = next((dim for dim in dims if dim.name == leading_dim(inputs)), None)
    promised = Contract.from_json(contract)
    budgets = (limits.loosest() if promised.bitwise else limits.current).budgets
    return contract_checks(promised, expected, actual, golden, (inputs, batch), budgets)


@dataclass(frozen=True)
class OpenEngine:
    """An ONNX Runtime engine as a file, and how to run it and parts of it."""

    request: BuildRequest
    path: Path
    open: Callable[[Path], AbstractContextManager[Session]]


def open_engine(place: Store, request: Json, digest: str, suffix: str, workdir: Path) -> OpenEngine:
    """Fetch an engine that can be taken apart. Raises InputError for another backend's."""
    from builders.onnxruntime import OnnxRuntime

    wanted = BuildRequest.from_json(request)
    backend = backends.configure(wanted.backend, dict(wanted.options))
    if not isinstance(backend, OnnxRuntime):
        raise InputError(f"engines of {wanted.backend} cannot be tapped yet; attribute their graph")
    return OpenEngine(wanted, fetch(place, digest, workdir / f"engine{suffix}"), backend.session)


def engine_session(
    place: Store, request: BuildRequest, digest: str, suffix: str, workdir: Path
) -> AbstractContextManager[Session]:
    """The engine of this digest, fetched and verified, opened by its backend."""
    return fitting.open_engine(fetched_engine(place, request, digest, suffix, workdir))
