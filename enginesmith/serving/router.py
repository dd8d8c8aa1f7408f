"""Sends each request to the cheapest bucket of an engine that holds it, and what none holds to a fallback.

::

    pulled = client.pull_all("minilm:stable", "engines/")       # all engines of the version that this machine can run
    with enginesmith.Router.opened(pulled, cache="engines/compiled") as router:
        outputs = router.run({"input_ids": ids, "attention_mask": mask})      # of the request's own sizes
        print(router.counts().fallback_rate)

Public and stable: `Router(engines, padding, fallbacks=, compiled=, reference_rate=, on_drift=)` of `RoutedEngine`s,
`Router.opened(pulled, opens=, compiles=, cache=, ...)`; `run(inputs)`, `inputs`, `outputs` as of a
`Session`; `padded_sizes(sizes)`; `counts()`, `drift`, `close()`. All methods are for several threads at once.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Self

from enginesmith.arrays import Array, InputCheck, dtype_of
from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.reports.latency import timed_alike
from enginesmith.core.types import PLUS, Session, Tensors
from enginesmith.serving.buckets import EngineBucket, Route, RoutedEngine, converting, list_buckets, make_route
from enginesmith.serving.counts import CompileCounts, RequestCounter, RouterCounts
from enginesmith.serving.drift import RateDrift, RateDriftDetector
from enginesmith.serving.fallback import FallbackChain, describe_miss
from enginesmith.serving.just_in_time import CompileSizes, JustInTime
from enginesmith.serving.opening import Opens, PulledEngine, open_described
from enginesmith.serving.ort_compiling import OrtCompiler
from enginesmith.serving.padding import Padding

# Routes of sizes that were met, which are kept until there are so many.
MOST_ROUTES = 4096


class Router(Session):
    """Several engines of one model as one session, for several threads at once.

    engines: best first; the inputs and outputs are those of the first one, and floats are converted for the others.
    padding: how requests are padded; a dim without a rule never is.  fallbacks: engines that take what no bucket holds,
    in order.  compiled: compiles for single sizes.  reference_rate: the share of fallbacks in the traffic that the
    buckets were chosen from; None learns it.  on_drift: called once, by the thread of a request, when that share has
    risen.
    Raises InputError without engines, for what is none, for engines of other inputs than the first, for two of one
    name, and for a reference rate that is no share.
    """

    def __init__(
        self,
        engines: Sequence[RoutedEngine],
        padding: Padding | None = None,
        *,
        fallbacks: Sequence[RoutedEngine] = (),
        compiled: JustInTime | None = None,
        reference_rate: float | None = None,
        on_drift: Callable[[RateDrift], object] | None = None,
    ) -> None:
        _check_arguments(engines, padding, fallbacks, reference_rate, on_drift)
        first = (*engines, *fallbacks)[:1]
        if not first:
            raise InputError("a router has no engine; give at least one, or a fallback")
        self.inputs, self.outputs = first[0].inputs, first[0].outputs
        known = [self._alike(engine) for engine in engines]
        self.padding = padding or Padding()
        self.buckets: tuple[EngineBucket, ...] = list_buckets(known, self.padding)
        self._fallbacks = FallbackChain([self._alike(engine) for engine in fallbacks], compiled)
        names = [*(engine.name for engine in known), *self._fallbacks.names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two engines of a router are called {twice!r}; give each a name of its own")
        self._compiled, self._on_drift, self._closed = compiled, on_drift, False
        self._detector = RateDriftDetector(reference_rate)
        counted = tuple(bucket.name for bucket in self.buckets)
        self._counter = RequestCounter(counted, self._fallbacks.names, self._detector)
        named = (dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str) and PLUS not in dim)
        self._dims = tuple(dict.fromkeys(named))
        self._check, self._routes = InputCheck(self.inputs), dict[tuple[int, ...], Route | None]()
        self._dtypes = [(spec.name, dtype_of(spec.dtype)) for spec in self.inputs]
        self._known = dict[tuple[tuple[int, ...], ...], Route]()

    @classmethod
    def opened(
        cls,
        pulled: Sequence[PulledEngine],
        *,
        opens: Opens | None = None,
        compiles: CompileSizes | None = None,
        cache: Path | str | None = None,
        most_compiled: int = 8,
        reference_rate: float | None = None,
        on_drift: Callable[[RateDrift], object] | None = None,
    ) -> Self:
        """A router over pulled engines of one version, best first (`Client.pull_all`).

        An engine that takes any size, as the version's graph (`Policy(fallback="onnx")`), is a fallback. opens: gives
        for an engine's file a function that runs it; default: engines of ONNX Runtime.  compiles: makes a runner for
        sizes that no bucket holds, in the background; default: where there is a graph and a `cache`, a folder that
        routers may share, ONNX Runtime with fixed shapes.  most_compiled: runners that are held.
        Raises InputError for what was not pulled; DataError for what is no engine, for models with state, and for an
        engine of another compiler without `opens`; what `opens` raises; and as `Router`.
        """
        _check_pulled(pulled)
        timed = timed_alike(each.latency for each in pulled if each.latency)
        found = [open_described(each.description, opens, each.latency, timed) for each in pulled]
        graph = next((each for each in found if not each.bounded and each.file.suffix == ".onnx"), None)
        if compiles is None and graph and cache is not None:
            compiles = OrtCompiler(graph.file, graph.digest, Path(cache))
            if why := compiles.why_unusable():
                warnings.warn(f"{why}; no sizes are compiled, other fallbacks answer", RuntimeWarning, stacklevel=2)
        return cls(
            [each.engine for each in found if each.bounded],
            next((each.padding for each in found if each.padding.inputs), None),
            fallbacks=[each.engine for each in found if not each.bounded],
            compiled=JustInTime(compiles, most_compiled) if compiles else None,
            reference_rate=reference_rate,
            on_drift=on_drift,
        )

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The outputs of a request, at its own sizes; padded outputs are views of the engine's arrays.

        Raises DataError for arrays that are none of the model's inputs or, without a fallback, that no bucket holds;
        EnginesmithError where the fallbacks fail too, with each reason, and on a closed router; what the engine raises.
        """
        return self.run_joined(inputs, 1, None)

    def run_joined(self, inputs: Tensors, requests: int, elements: int | None) -> dict[str, Array]:
        """As `run`, of a batch that was joined from `requests` requests, whose inputs had `elements` elements before
        they were padded (None: as many as these), so that it is counted as these. For batchers."""
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
        own = plan.own if elements is None else elements
        if (drift := self._counter.add(route.bucket, own, plan.elements, requests)) is not None:
            self._report(drift)
        return answer

    def padded_sizes(self, sizes: Mapping[str, int]) -> Mapping[str, int] | None:
        """What the dims of a request (all of them, with their sizes) become in its bucket; None where no bucket holds
        it. Raises InputError where a dim is missing, or no number."""
        if lacking := next((dim for dim in self._dims if not isinstance(sizes.get(dim), Integral)), None):
            raise InputError(f"no size of dim {lacking!r}; give a whole number for each of {', '.join(self._dims)}")
        route = self._route({dim: sizes[dim] for dim in self._dims})
        return None if route is None else route.padded

    @property
    def drift(self) -> RateDrift | None:
        """The alarm on the fallback rate; None where there was none."""
        return self._detector.drift

    def counts(self) -> RouterCounts:
        """What was counted so far; `enginesmith.core.codec.encode` makes JSON of it."""
        return self._counter.counts(self._compiled.counts() if self._compiled else CompileCounts())

    def close(self) -> None:
        """End the thread that compiles; requests are refused from now on."""
        self._closed = True
        if self._compiled:
            self._compiled.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _alike(self, engine: RoutedEngine) -> RoutedEngine:
        """The engine, taking and giving the dtypes of the router."""
        shapes, common = ({spec.name: spec.shape for spec in specs} for specs in (engine.inputs, self.inputs))
        if shapes != common:
            raise InputError(
                f"engine {engine.name!r} takes {shapes}, and the first one {common}; give engines of one model"
            )
        run = converting(engine.run, (engine.inputs, engine.outputs), (self.inputs, self.outputs))
        return replace(engine, run=run)

    def _find_known(self, inputs: Tensors) -> Route | None:
        """The route of a request with the shapes of one that was checked before; None where it has to be checked."""
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
        if self._closed:
            raise EnginesmithError("the router is closed; make another one")
        name: str | None = None
        try:
            name, answer = self._fallbacks.answer(inputs, sizes, lambda: describe_miss(sizes, self.buckets))
            return answer
        finally:
            if (drift := self._counter.add_fallback(name, requests)) is not None:
                self._report(drift)

    def _report(self, drift: RateDrift) -> None:
        if self._on_drift is None:
            return
        try:
            self._on_drift(drift)
        except Exception as error:  # of the listener, which must not take the answer of a request with it
            with suppress(RuntimeWarning):  # where warnings are errors
                warnings.warn(
                    f"on_drift of a router raised {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2
                )


def _check_pulled(pulled: object) -> None:
    """Raise InputError for what is no list of pulled engines."""
    if not isinstance(pulled, Sequence) or isinstance(pulled, str):
        raise InputError(f"pulled is a {type(pulled).__name__}; give the list that Client.pull_all returns")
    if wrong := next((each for each in pulled if not hasattr(each, "description")), None):
        raise InputError(f"{wrong!r} is no pulled engine; give the list that Client.pull_all returns")


def _check_arguments(
    engines: object, padding: object, fallbacks: object, reference_rate: object, on_drift: object
) -> None:
    """Raise InputError for arguments of a router of another kind."""
    for name, found in (("engines", engines), ("fallbacks", fallbacks)):
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise InputError(f"{name} is a {type(found).__name__}; give a list of RoutedEngine, or use Router.opened")
        for item in found:
            if not isinstance(item, RoutedEngine):
                raise InputError(f"{name} has a {type(item).__name__}; give RoutedEngine, or use Router.opened")
    if padding is not None and not isinstance(padding, Padding):
        raise InputError(f"padding is a {type(padding).__name__}; give enginesmith.Padding, or None")
    if reference_rate is not None and not isinstance(reference_rate, Real):
        raise InputError(f"reference rate {reference_rate!r}: give a share of the requests, from 0 to 1")
    if on_drift is not None and not callable(on_drift):
        raise InputError(f"on_drift is a {type(on_drift).__name__}; give a function that takes a RateDrift")
