"""New buckets for a registered spec whose traffic has drifted: chosen from what was recorded, and registered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from enginesmith.core.errors import UnknownNameError
from enginesmith.core.names import check_model
from enginesmith.core.types import Dim
from enginesmith.registry.registered_specs import Registration
from enginesmith.registry.store.base import open_store
from pipeline.canary.automatic import SUFFIXES
from pipeline.intake.registration import SCHEME, place_at, register, spec_at
from pipeline.orchestration.run import Executors, RunOptions, open_run
from pipeline.progress import Progress
from pipeline.spec.model import ModelSpec, load_spec
from pipeline.traffic.buckets import BucketAdvice, advise_buckets, write_buckets
from pipeline.traffic.place import BucketOptions, TrafficAtPlace, read_place, split_beyond

# Buckets grow to hold all but this share of the requests: a few requests of odd sizes shall not make all runs larger.
LEFT_OUT = 0.001
# The least share of the engine time that other buckets must save before the model is built again for them.
LEAST_SAVING = 0.02
# Default maximum of profiles: a compiler tunes for each, and each makes a GPU engine larger.
MOST_PROFILES = 8


@dataclass(frozen=True)
class DriftAnswer:
    """What was done about drifted traffic. reason: in words.  edges: of each dim that was chosen for.

    registration: of the spec with these buckets; None where nothing was registered.
    """

    reason: str
    edges: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    registration: Registration | None = None


@dataclass(frozen=True)
class DriftRequest:
    """A model in a registry whose traffic has drifted. traffic: a folder or bucket's prefix with MODEL.jsonl or
    MODEL.npz.  model, registry: the name, and the URI.  options: how buckets are chosen."""

    model: str
    registry: str
    traffic: str | None
    options: BucketOptions


def answer_drift(
    drift_request: DriftRequest, progress: Progress, executors: Executors, say: Callable[[str], None]
) -> DriftAnswer:
    """Choose buckets from the recorded traffic of a model, and register its newest registered spec with them.

    Where sizes beyond the spec's came, its dims grow to hold all but one in a thousand requests. Nothing is registered
    where the present buckets hold the traffic and others would save little.

    drift_request: the model and its traffic.  progress, executors: of the run that times it.  say: gets lines about the
    progress.
    Raises DataError for traffic that does not fit the model, UnavailableError, and what timing raises.
    """
    model, registry, traffic = drift_request.model, drift_request.registry, drift_request.traffic
    if traffic is None:
        return DriftAnswer("no recorded traffic is named; `enginesmith prefect deploy --traffic LOCATION` names it")
    try:
        with place_at(traffic) as traffic_place, spec_at(f"{SCHEME}{check_model(model)}", registry) as spec_file:
            names = [f"{model}{suffix}" for suffix in SUFFIXES if traffic_place.has(f"{model}{suffix}")]
            if not names:
                return DriftAnswer(f"{traffic} has no traffic of {model} ({model}.jsonl or {model}.npz)")
            traffic_place.refresh()
            spec = spec_file.load()
            recorded_traffic = read_place(traffic_place.folder / names[0], spec.tensors(), model)
            return _answer(drift_request, spec, recorded_traffic, progress, executors, say)
    except UnknownNameError as error:
        return DriftAnswer(str(error))


def _answer(
    drift_request: DriftRequest,
    spec: ModelSpec,
    recorded_traffic: TrafficAtPlace,
    progress: Progress,
    executors: Executors,
    say: Callable[[str], None],
) -> DriftAnswer:
    growth = {dim.name: edge for dim in spec.named_dims() if (edge := needed_edge(dim, recorded_traffic)) > dim.max}
    if growth:
        say("; ".join(f"{dim} grows from {_edges(spec, dim)[-1]} to {edge}" for dim, edge in growth.items()))
        write_buckets(spec.path, {dim: (*_edges(spec, dim), edge) for dim, edge in growth.items()})
        spec = load_spec(spec.path, spec.address)
    options = drift_request.options
    options = replace(
        options, dims=options.dims or default_dims(spec, growth), max_profiles=options.max_profiles or MOST_PROFILES
    )
    with open_run(spec, RunOptions(registry=drift_request.registry), progress, executors, keep_state=False) as run:
        split = split_beyond(recorded_traffic.trace, spec.named_dims())
        advice = advise_buckets(replace(run, spec=spec), recorded_traffic, split, options)
    edges = advice.choice.edges
    for plan in advice.choice.plans:
        say(f"{plan.name}: {plan.profiles} profiles, {plan.seconds.value:.3g} engine seconds a request")
    if not growth and (stay_reason := _too_small(advice)):
        return DriftAnswer(stay_reason, edges)
    write_buckets(spec.path, edges)
    registration, is_registered = register(open_store(drift_request.registry), load_spec(spec.path, spec.address))
    bucket_text = "; ".join(f"{dim}: {', '.join(map(str, sizes))}" for dim, sizes in edges.items())
    return DriftAnswer(
        f"{'already registered' if is_registered else 'registered'} with buckets {bucket_text}", edges, registration
    )


def needed_edge(dim: Dim, recorded_traffic: TrafficAtPlace) -> int:
    """The size, a multiple of the dim's, within which all but `LEFT_OUT` of the requests are."""
    size = int(np.quantile(recorded_traffic.trace.sizes[dim.name], 1.0 - LEFT_OUT, method="higher"))
    return -(-size // dim.multiple) * dim.multiple


def default_dims(spec: ModelSpec, grown: Mapping[str, int]) -> tuple[str, ...]:
    """The dims to choose buckets for: those that have buckets or grew, else all except the batch, as (); the batch only
    if nothing else is dynamic."""
    named_dims = [dim for dim in spec.named_dims() if not dim.static]
    dim_names = tuple(dim.name for dim in named_dims if dim.name in grown or len(dim.edges) > 1)
    return dim_names or (tuple(dim.name for dim in named_dims) if len(named_dims) == 1 else ())


def _too_small(advice: BucketAdvice) -> str:
    """Why the present buckets stay; '' where they do not."""
    present_plan = next(plan for plan in advice.choice.plans if plan.name == "present")
    saving = present_plan.saved
    if saving is None or (saving.low > 0 and saving.value >= LEAST_SAVING):
        return ""
    interval = f"{100 * saving.low:.1f} to {100 * saving.high:.1f} %"
    return (
        f"the present buckets stay: others would save {100 * saving.value:.1f} % of the engine time ({interval}); a "
        f"change needs {100 * LEAST_SAVING:g} % or more, and an interval above 0"
    )


def _edges(spec: ModelSpec, dim: str) -> tuple[int, ...]:
    spec_dim = next(named_dim for named_dim in spec.named_dims() if named_dim.name == dim)
    return spec_dim.edges or (spec_dim.max,)
