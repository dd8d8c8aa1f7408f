"""Registries for a fleet: versions with engines that have build keys, toolchains and a spec, of a few bytes each."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from enginesmith.core.types import BuildRequest
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.manifest import EngineEntry, make_request
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import registered_key
from enginesmith.registry.versions.publish import publish
from tests.enginesmith.registries import approval, draft, engine, with_requirements

RTX = {"tensorrt-rtx-cu13-bindings": "1.7.1.116", "enginesmith-tensorrt-rtx": "1"}
TRT = {"tensorrt-cu13-libs": "10.16.1.11", "tensorrt": "10.16.1.11", "enginesmith-tensorrt": "1"}
RTX_OPTIONS = {"tf32": False, "workspace_mib": 0}
TRT_OPTIONS = {**RTX_OPTIONS, "optimization_level": 3, "hardware_compatibility": "none"}


def nothing_known(model: str, request: BuildRequest) -> Expectation | None:
    """The predictor of a registry without a history."""
    return None


def built(
    store: Store, target: str, precision: str = "fp16", status: str = "unproven", backend: str = "tensorrt-rtx"
) -> EngineEntry:
    """An engine with the build key of what it says of itself."""
    entry = engine(store, target, precision, status, f"{target} {precision} {status} {backend}".encode())
    if not entry.hardware.is_cpu:
        is_full = backend == "tensorrt"
        toolchain, options = (TRT, TRT_OPTIONS) if is_full else (RTX, RTX_OPTIONS)
        entry = replace(entry, backend=backend, toolchain=toolchain, options=options)
    return with_key(with_requirements(replace(entry, graph=store.put_bytes(b"graph"))))


def with_key(entry: EngineEntry) -> EngineEntry:
    return replace(entry, build_key=make_request(entry).key)


def without_engine(store: Store, target: str, status: str, reason: str, precision: str = "fp16") -> EngineEntry:
    """What a version says of a unit that has no engine."""
    entry = built(store, target, precision)
    return replace(entry, status=status, reason=reason, digest=None, size_bytes=None, suffix=None, report=None)


def published(
    store: Store,
    model: str,
    engines: Iterable[EngineEntry],
    *,
    targets: Sequence[str] = ("gpu", "l4"),
    channel: str = "candidate",
    others: Sequence[EngineEntry] = (),
    registered: bool = True,
) -> None:
    """Publish a version and point a channel at it. registered: whether its spec can be built again by an event."""
    if registered:
        store.replace(registered_key(model), b'{"registered": []}', store.read(registered_key(model)))
    entries = list(engines)
    spec = {"targets": list(targets), "precisions": sorted({entry.precision for entry in entries})}
    new = replace(draft(store, [model, [entry.digest for entry in entries]], model), spec=spec)
    publish(store, new, [(entry, approval(entry)) for entry in entries], others, channel=channel, wanted_version=None)
