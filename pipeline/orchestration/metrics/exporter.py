"""A registry's numbers for Prometheus, from its own documents: `enginery metrics`.

A flow's process lives too short to be scraped, and a catalogue has hundreds of them. What they did stands in the
registry; so one exporter beside it has the numbers of all, also of those that died. It reads in the background, at its
own pace: a scrape answers at once, with the last that was read.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from enginery.core.errors import EngineryError
from enginery.registry.runs.totals import BUCKETS_S
from enginery.registry.store.base import Store
from pipeline.orchestration.metrics import names
from pipeline.orchestration.metrics.live import Trouble
from pipeline.orchestration.metrics.names import Metric
from pipeline.orchestration.metrics.registry_view import Looker, RegistryView

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# Said whether or not there is such a run, so that a panel shows 0 and not a gap.
_RUN_STATES = ("running", "done", "failed", "interrupted", "lost")


class Exporter:
    """Reads a registry and holds what it saw; a collector of prometheus-client's. say: is told when reading fails."""

    def __init__(self, store: Store, say: Callable[[str], object] = lambda _: None) -> None:
        self._looker, self._say = Looker(store), say
        self._view = RegistryView()
        self._up, self._at = False, 0.0

    def refresh(self) -> bool:
        """Look again; whether that went well. What was seen before stays where it did not."""
        try:
            self._view = self._looker.look()
        except EngineryError as error:
            if self._up or not self._at:
                self._say(f"the registry cannot be read: {error}")
            self._up = False
            self._at = self._at or time.time()
        else:
            self._up, self._at = True, time.time()
        return self._up

    def run(self, every_s: float, stop: threading.Event) -> None:
        """Look again and again until `stop` is set."""
        while not stop.wait(every_s):
            self.refresh()

    def registry(self) -> "CollectorRegistry":
        """A Prometheus registry with these metrics alone."""
        from prometheus_client import CollectorRegistry

        made = CollectorRegistry(auto_describe=False)
        made.register(self)
        made.register(Trouble())
        return made

    def collect(self) -> Iterator[Any]:
        """Every metric family, from the last look."""
        view = self._view
        yield from _builds(view)
        yield _counter(names.CACHE, {("hit",): view.totals.hits, ("miss",): view.totals.misses})
        yield _gauge(names.QUEUE, {(): view.waiting})
        yield _gauge(names.RUNNING, {(): view.running})
        yield _gauge(names.RUNS, {(state,): view.runs.get(state, 0) for state in _RUN_STATES})
        yield _gauge(names.LAST_RUN, {(model,): at for model, at in view.last_runs.items()})
        yield _gauge(names.LAST_RUN_OK, {(model,): float(fine) for model, fine in view.last_ok.items()})
        yield from _models(view)
        yield _gauge(names.UP, {(): float(self._up)})
        yield _gauge(names.READ_AT, {(): self._at})


def _builds(view: RegistryView) -> Iterator[Any]:
    from prometheus_client.core import HistogramMetricFamily

    yield _counter(names.BUILDS, {labels: tally.count for labels, tally in view.totals.builds.items()})
    seconds = HistogramMetricFamily(
        names.BUILD_SECONDS.name, names.BUILD_SECONDS.help, labels=names.BUILD_SECONDS.labels
    )
    for labels, tally in view.totals.builds.items():
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, (*tally.buckets, tally.count), strict=True))
        seconds.add_metric(labels, buckets, tally.seconds)
    yield seconds


def _models(view: RegistryView) -> Iterator[Any]:
    engines: dict[tuple[str, ...], float] = {}
    for model in view.models.values():
        for labels, count in model.statuses.items():
            engines[labels] = engines.get(labels, 0) + count
    unproven = {labels[1:]: count for labels, count in engines.items() if labels[0] == "unproven"}
    yield _gauge(names.ENGINES, engines)
    yield _gauge(names.UNPROVEN, unproven)
    yield _gauge(
        names.DRIFT, {labels: value for model in view.models.values() for labels, value in model.drift.items()}
    )
    yield _gauge(names.MODELS, {(): len(view.models) + view.left_out})
    yield _gauge(names.LEFT_OUT, {(): view.left_out})


def _gauge(metric: Metric, values: Any) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(metric.name, metric.help, labels=metric.labels), values)


def _counter(metric: Metric, values: Any) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(metric.name, metric.help, labels=metric.labels), values)


def _filled(family: Any, values: Any) -> Any:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
