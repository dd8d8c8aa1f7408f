"""The router: opens engines of a version and sends each request to the one that fits, or to a fallback."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

from enginesmith.arrays import Array, InputCheck, dtype_of
from enginesmith.core.errors import DataError, Digest, EnginesmithError, InputError
from enginesmith.core.reports.latency import LatencyReport, Timed, timed_alike
from enginesmith.core.state import Padding
from enginesmith.core.text import SelfClosing, join_first
from enginesmith.core.types import PLUS, Session, Tensors
from enginesmith.descriptions import DescribedGraph, check_engine, decode_description, find_engine, read_description
from enginesmith.opening import open_onnx
from enginesmith.serving.buckets import (
    UNBOUNDED,
    EngineBucket,
    Route,
    RoutedEngine,
    converting,
    list_buckets,
    make_route,
    measured_seconds,
)

if TYPE_CHECKING:
    from enginesmith.client.pull import Pulled


@dataclass(frozen=True)
class BucketCount:
    """Request counts of a bucket. elements: input elements before padding.  padding: elements added by padding."""

    name: str
    requests: int
    elements: int
    padding: int


@dataclass(frozen=True)
class RouterCounts:
    """Counts of a router since its creation. fallbacks: name of a fallback -> requests that it answered.

    unanswered: requests outside all buckets that no fallback answered.  errors: requests whose engine raised an error.
    padding_share: of all elements that engines ran on in buckets, the share of padding.  fallback_rate: share of the
    requests outside all buckets.
    """

    buckets: tuple[BucketCount, ...]
    fallbacks: Mapping[str, int]
    unanswered: int
    errors: int
    requests: int = field(init=False)
    padding_share: float = field(init=False)
    fallback_rate: float = field(init=False)

    def __post_init__(self) -> None:
        unbucketed_count = sum(self.fallbacks.values()) + self.unanswered
        request_count = sum(bucket.requests for bucket in self.buckets) + unbucketed_count
        padding_elements = sum(bucket.padding for bucket in self.buckets)
        elements = padding_elements + sum(bucket.elements for bucket in self.buckets)
        object.__setattr__(self, "requests", request_count)
        object.__setattr__(self, "padding_share", padding_elements / elements if elements else 0.0)
        object.__setattr__(self, "fallback_rate", unbucketed_count / request_count if request_count else 0.0)


class RequestCounter:
    """Counts the requests of a router; thread-safe. buckets, fallbacks: their names."""

    def __init__(self, buckets: tuple[str, ...], fallbacks: tuple[str, ...]) -> None:
        self._lock = Lock()
        self._names, self._rows = buckets, [[0, 0, 0] for _ in buckets]
        self._fallbacks = dict.fromkeys(fallbacks, 0)
        self._unanswered = self._errors = 0

    def add(self, bucket: int, elements: int, padded: int, requests: int = 1) -> None:
        """Count requests in bucket number `bucket`, with their elements before and after padding."""
        with self._lock:
            counters = self._rows[bucket]
            counters[0] += requests
            counters[1] += elements
            counters[2] += padded - elements

    def add_fallback(self, name: str | None, requests: int = 1) -> None:
        """Count requests that no bucket holds, with the fallback that answered them, if any."""
        with self._lock:
            if name is None:
                self._unanswered += requests
            else:
                self._fallbacks[name] += requests

    def add_error(self) -> None:
        """Count an error of an engine."""
        with self._lock:
            self._errors += 1

    def counts(self) -> RouterCounts:
        """The current counts as a value."""
        with self._lock:
            bucket_counts = tuple(BucketCount(name, *row) for name, row in zip(self._names, self._rows, strict=True))
            fallbacks = dict(self._fallbacks)
            return RouterCounts(bucket_counts, fallbacks, self._unanswered, self._errors)


_WIDEN = "widen dims and build again, give inputs a pad, or give the router a fallback"
# Returns, for an engine's file, a function that runs it.
Opens = Callable[[Path], Callable[[Tensors], Tensors]]


@dataclass(frozen=True)
class _RoutedDescription(DescribedGraph):
    target: str
    precision: str
    backend: str
    digest: Digest
    padding: Padding = field(default_factory=Padding)


def open_described(
    description: Path | str, opens: Opens | None, latency: LatencyReport | None, timed: Timed = "session"
) -> tuple[RoutedEngine, Padding]:
    """The engine beside a description, opened, and the padding of its requests. opens: None for `open_onnx`.
    latency: None if it was not timed.  timed: which of its times count (`timed_alike`).

    Raises DataError if the file describes no engine and for a model with state, IntegrityError for other bytes than
    were published, and errors of `opens`.
    """
    path = Path(description)
    document = read_description(path)
    if "state" in document or "graphs" in document:
        feature, remedy_class = (
            ("state", "enginesmith.Streams") if "state" in document else ("several graphs", "enginesmith.Ensemble")
        )
        raise DataError(f"{path.name} describes a model with {feature}, which no router runs; use {remedy_class}")
    engine_fields = decode_description(document, _RoutedDescription, description)
    find_engine(path, document)
    run = opens(check_engine(path, document)) if opens else open_onnx(path)
    seconds = measured_seconds(latency, engine_fields.inputs, timed) if latency else None
    name = f"{engine_fields.target} {engine_fields.precision} {engine_fields.backend}"
    return RoutedEngine(
        name, run, engine_fields.inputs, engine_fields.outputs, engine_fields.profiles, seconds
    ), engine_fields.padding


# Maximum number of cached routes.
MOST_ROUTES = 4096


class Router(Session, SelfClosing):
    """Several engines of one model as one session; thread-safe.

    engines: best first; the inputs and outputs are those of the first one, and floats are converted for the others.
    padding: how requests are padded; a dim without a rule never is.  fallbacks: engines for requests outside all
    buckets, in order.
    Raises InputError without engines, for objects that are no engines, for engines with other inputs than the first,
    and for two with one name.
    """

    def __init__(
        self, engines: Sequence[RoutedEngine], padding: Padding | None = None, *, fallbacks: Sequence[RoutedEngine] = ()
    ) -> None:
        _check_arguments(engines, padding, fallbacks)
        first_engines = (*engines, *fallbacks)[:1]
        if not first_engines:
            raise InputError("a router has no engine; give at least one, or a fallback")
        self.inputs, self.outputs = first_engines[0].inputs, first_engines[0].outputs
        routed_engines = [self._alike(engine) for engine in engines]
        self.padding = padding or Padding()
        self.buckets: tuple[EngineBucket, ...] = list_buckets(routed_engines, self.padding)
        self._fallbacks = [self._alike(engine) for engine in fallbacks]
        engine_names = [engine.name for engine in (*routed_engines, *self._fallbacks)]
        if duplicate_name := next((name for name in engine_names if engine_names.count(name) > 1), None):
            raise InputError(f"two engines of a router are called {duplicate_name!r}; give each a name of its own")
        self._closed = False
        bucket_names = tuple(bucket.name for bucket in self.buckets)
        self._counter = RequestCounter(bucket_names, tuple(engine.name for engine in self._fallbacks))
        dim_names = (dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str) and PLUS not in dim)
        self._dims = tuple(dict.fromkeys(dim_names))
        self._check, self._routes = InputCheck(self.inputs), dict[tuple[int, ...], Route | None]()
        self._dtypes = [(spec.name, dtype_of(spec.dtype)) for spec in self.inputs]
        self._known = dict[tuple[tuple[int, ...], ...], Route]()

    @classmethod
    def opened(cls, pulled: "Sequence[Pulled]", *, opens: Opens | None = None) -> Self:
        """A router over pulled engines of one version, best first (`Client.pull_all`).

        An engine that takes any size, like the version's graph (`Policy(fallback="onnx")`), is a fallback. opens:
        returns, for an engine's file, a function that runs it; default: engines of ONNX Runtime.
        Raises InputError for objects that were not pulled; DataError for files that are no engines, for models with
        state, and for an engine of another compiler without `opens`; errors of `opens`; and as `Router`.
        """
        argument: object = pulled  # a caller may pass any object
        if not isinstance(argument, Sequence) or isinstance(argument, str):
            raise InputError(f"pulled is a {type(pulled).__name__}; give the list that Client.pull_all returns")
        if non_engine := next(
            (pulled_engine for pulled_engine in pulled if not hasattr(pulled_engine, "description")), None
        ):
            raise InputError(f"{non_engine!r} is not a pulled engine; give the list that Client.pull_all returns")
        timing_kind = timed_alike(engine.latency for engine in pulled if engine.latency)
        engines = [open_described(engine.description, opens, engine.latency, timing_kind) for engine in pulled]
        return cls(
            [engine for engine, _ in engines if engine.profiles],
            next((padding for _, padding in engines if padding.inputs), None),
            fallbacks=[engine for engine, _ in engines if not engine.profiles],
        )

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of a request, at its own sizes; padded outputs are views of the engine's arrays.

        Raises DataError for arrays that do not fit the model's inputs or, without a fallback, that no bucket takes;
        EnginesmithError if the fallbacks fail too, with each reason, and on a closed router; errors of the engine.
        """
        return self.run_joined(inputs, 1, None)

    def run_joined(self, inputs: Tensors, requests: int, elements: int | None) -> dict[str, Array]:
        """Like `run`, for a batch that was joined from `requests` requests, whose inputs had `elements` elements before
        padding (None: as many as these). The counts then use these numbers. For batchers."""
        route = self._find_known(inputs)
        if route is None or self._closed:
            sizes = self._check(inputs).sizes
            if (route := self._route(sizes)) is None or self._closed:
                return self._fall_back(inputs, sizes, requests)
            self._known[tuple([inputs[name].shape for name, _ in self._dtypes])] = route
        try:
            answer = route.answer(inputs)
        except Exception:
            self._counter.add_error()
            raise
        plan = route.plan
        own_elements = plan.own_elements if elements is None else elements
        self._counter.add(route.bucket, own_elements, plan.elements, requests)
        return answer

    def padded_sizes(self, sizes: Mapping[str, int]) -> Mapping[str, int] | None:
        """The sizes that a request's dims become in its bucket; None if no bucket takes it. sizes: of all its dims.
        Raises InputError if a dim is missing, or no number."""
        if missing_dim := next((dim for dim in self._dims if not isinstance(sizes.get(dim), Integral)), None):
            raise InputError(f"no size of dim {missing_dim!r}; give a whole number for each of {', '.join(self._dims)}")
        route = self._route({dim: sizes[dim] for dim in self._dims})
        return None if route is None else route.padded

    def largest(self, dim: str) -> int:
        """The largest size of a dim of the inputs that an engine takes."""
        return UNBOUNDED if self._fallbacks else max(bucket.bounds[dim].most for bucket in self.buckets)

    def counts(self) -> RouterCounts:
        """The counts so far; `enginesmith.core.codec.encode` converts them to JSON."""
        return self._counter.counts()

    def close(self) -> None:
        """Refuse requests from now on."""
        self._closed = True

    def _alike(self, engine: RoutedEngine) -> RoutedEngine:
        """The engine, with the dtypes of the router."""
        shapes, common_shapes = ({spec.name: spec.shape for spec in specs} for specs in (engine.inputs, self.inputs))
        if shapes != common_shapes:
            raise InputError(
                f"engine {engine.name!r} takes {shapes}, and the first one {common_shapes}; give engines of one model"
            )
        run = converting(engine.run, (engine.inputs, engine.outputs), (self.inputs, self.outputs))
        return replace(engine, run=run)

    def _find_known(self, inputs: Tensors) -> Route | None:
        """The cached route for shapes that were checked before; None if the request must be checked."""
        try:
            shapes = []
            for name, dtype in self._dtypes:
                array = inputs[name]
                if array.dtype is not dtype:  # numpy has one object for each dtype in native byte order
                    return None
                shapes.append(array.shape)
            return self._known.get(tuple(shapes)) if len(inputs) == len(shapes) else None
        except (KeyError, AttributeError, TypeError, IndexError):  # not all inputs, no array, or no mapping
            return None

    def _route(self, sizes: Mapping[str, int]) -> Route | None:
        key = tuple(sizes.values())
        try:
            return self._routes[key]
        except KeyError:
            route = make_route(self.buckets, sizes, self.padding)
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
                self._known.clear()
            self._routes[key] = route
            return route

    def _fall_back(self, inputs: Tensors, sizes: Mapping[str, int], requests: int) -> dict[str, Array]:
        """The outputs of the first fallback that succeeds. Raises DataError without a fallback, and EnginesmithError
        with the reason of each if all fail."""
        if self._closed:
            raise EnginesmithError("the router is closed; make another one")
        reasons: list[str] = []
        for engine in self._fallbacks:
            try:
                answer = dict(engine.run(inputs))
            except Exception as error:  # any error of a runtime
                reasons.append(f"{engine.name}: {type(error).__name__}: {error}")
            else:
                self._counter.add_fallback(engine.name, requests)
                return answer
        self._counter.add_fallback(None, requests)
        sizes_text = ", ".join(f"{dim} {size}" for dim, size in sizes.items()) or "inputs of fixed sizes"
        bucket_list = join_first([bucket.name for bucket in self.buckets], 4, "; ") or "none"
        miss_text = f"no bucket holds a request of {sizes_text}; buckets are {bucket_list}"
        if not reasons:
            raise DataError(f"{miss_text}; {_WIDEN}")
        raise EnginesmithError(f"{miss_text}, and no fallback answers: {'; '.join(reasons)}")


def _check_arguments(engines: object, padding: object, fallbacks: object) -> None:
    """Raise InputError for arguments of a router of another kind."""
    for name, argument in (("engines", engines), ("fallbacks", fallbacks)):
        if not isinstance(argument, Sequence) or isinstance(argument, str):
            raise InputError(
                f"{name} is a {type(argument).__name__}; give a list of RoutedEngine, or use Router.opened"
            )
        for engine in argument:
            if not isinstance(engine, RoutedEngine):
                raise InputError(f"{name} has a {type(engine).__name__}; give RoutedEngine, or use Router.opened")
    if padding is not None and not isinstance(padding, Padding):
        raise InputError(f"padding is a {type(padding).__name__}; give enginesmith.serving.Padding, or None")
