"""What a load test sends and to what: an engine of a version, requests of recorded traffic or of golden data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from enginesmith.core.errors import DataError, InputError
from enginesmith.core.reports.load import LoadReport, LoadTerms
from enginesmith.core.types import Tensors
from enginesmith.recording.traffic import RecordedTraffic, read_traffic
from enginesmith.registry.manifest import request_of
from enginesmith.registry.store.base import Store
from enginesmith.serving.padding import padding_of
from pipeline.canary.engines import ChosenEngine
from pipeline.capacity.load_test import run_load
from pipeline.capacity.workloads import sizes_of_request
from pipeline.compile.steps.blobs import fetch_engine, golden_set
from pipeline.operations.revalidate import spec_of
from pipeline.spec.model import ModelSpec
from pipeline.traffic.place import check_model, split_beyond
from pipeline.values import EngineBlob
from validation.data.batches import leading_dim
from validation.latency.measurement.buckets import make_buckets
from validation.load.arrivals import BurstTerms, PlannedArrivals, plan_poisson, plan_recorded
from validation.load.server import ServedEngine, write_requests
from validation.traffic.trace import trace_of


@dataclass(frozen=True)
class LoadOptions:
    """rate: requests a second, outside of bursts.  batch: samples of a batch at most, None: as many as the model takes.
    at: sizes of the dims, as 'length=64'.  traffic: recorded requests, sent in place of golden data."""

    rate: float
    seconds: float
    bursts: BurstTerms = field(default_factory=BurstTerms)
    batch: int | None = None
    wait_s: float = 0.002
    at: str | None = None
    traffic: Path | None = None
    seed: int = 0


def load_published(
    store: Store, chosen: ChosenEngine, options: LoadOptions, folder: Path, say: Callable[[str], object]
) -> LoadReport:
    """A load test of an engine on this machine. folder: an empty one.  say: as of `run_load`.

    Raises InputError for sizes and batches that the model does not have and for models with state, DataError for
    traffic of another one, and as `run_load`.
    """
    spec, entry = spec_of(chosen.manifest), chosen.entry
    if spec.state:
        raise InputError(f"{spec.model} has state between its calls; a load test sends single requests")
    dims, batch = spec.named_dims(), leading_dim(entry.inputs)
    most = next((dim.max for dim in dims if dim.name == batch), 1)
    if options.batch is not None and options.batch > most:
        raise InputError(f"batch {options.batch}: {spec.model} takes {most} samples at most; give fewer")
    traffic = _read_traffic(options.traffic, spec) if options.traffic else None
    if traffic and options.at:
        raise InputError("the traffic says the sizes; leave out --at, or --traffic")
    sizes = {} if traffic else sizes_of_request(options.at, dims, batch)
    requests = _golden(store, chosen, sizes, folder) if traffic is None else [one.inputs for one in traffic.requests]
    arrivals = _plan(options, traffic)
    if not len(arrivals):
        raise InputError(f"{options.rate:g} a second for {options.seconds:g} s are no request; give more seconds")
    engine = fetch_engine(store, EngineBlob(request_of(entry), str(entry.digest), str(entry.suffix)), folder)
    write_requests(folder / "requests.npz", requests)
    plan = ServedEngine(
        engine.request, engine.path, engine.digest, engine.suffix, engine.weights, padding_of(chosen.manifest.spec),
        folder / "requests.npz", batch, options.batch or most, options.wait_s,
    )  # fmt: skip
    bursts = options.bursts
    kind = "recorded" if traffic is not None and traffic.timed else "poisson"
    terms = LoadTerms(
        options.rate, options.seconds, bursts.factor, bursts.seconds, bursts.every_s, kind, plan.most, options.wait_s,
        options.seed, sizes,
    )  # fmt: skip
    return run_load(plan, arrivals, np.arange(len(arrivals)) % len(requests), terms, folder, say)


def _read_traffic(path: Path, spec: ModelSpec) -> RecordedTraffic:
    """Traffic that the model's dims hold: behind one engine there is no fallback. Raises DataError for other."""
    inputs, dims = spec.tensors(), spec.named_dims()
    check_model(path, spec.model)
    traffic = read_traffic(path, inputs)
    split = split_beyond(trace_of(traffic, inputs), dims)
    if split.beyond:
        sizes = "; ".join(f"{dim}={min(found)}" for dim, found in split.beyond.items())
        ranges = ", ".join(f"{dim.name} {dim.words}" for dim in dims)
        raise DataError(
            f"{path}: {split.requests - len(split.within)} of {split.requests} requests are beyond the dims"
            f" ({ranges}), such as {sizes}; no engine holds them: leave them out, or widen the dims"
        )
    return traffic


def _golden(store: Store, chosen: ChosenEngine, sizes: dict[str, int], folder: Path) -> Sequence[Tensors]:
    real = golden_set(store, chosen.manifest.golden, folder).real_inputs
    return [make_buckets([sizes], chosen.entry.inputs, real)[0].inputs]


def _plan(options: LoadOptions, traffic: RecordedTraffic | None) -> PlannedArrivals:
    if traffic is None or not traffic.timed:
        return plan_poisson(options.rate, options.seconds, options.bursts, options.seed)
    if options.bursts.factor != 1.0:
        raise InputError("recorded arrivals have bursts of their own; leave out --burst")
    if len(traffic.requests) < 2 or not traffic.seconds > 0.0:
        raise DataError("the traffic has fewer than two times of arrival; record more, or give traffic without times")
    return plan_recorded([one.at for one in traffic.requests], options.rate, options.seconds)
