"""The metrics of one run, served from its process while it goes on."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from builders.execution.jobs import Usage
from enginesmith.core.address import HttpAddress
from enginesmith.registry.builds.build_history import BUCKETS_S
from enginesmith.registry.store import files
from pipeline.orchestration.metrics import definitions
from pipeline.orchestration.metrics.definitions import RegistryMetric
from pipeline.progress.events import Event, Finished, Planned, ProcessEnded, Progress, Retrying, RunConcluded, Started

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily

    from enginesmith.listening import HttpServer


class LiveMetrics(Progress):
    """Counts a run's events. registry: Prometheus's; None makes one, so that two runs of a process do not mix."""

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = registry or CollectorRegistry()
        self._lock = threading.Lock()
        self._units: dict[str, tuple[str, str]] = {}
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._usage: dict[str, Usage] = {}

        def made(kind: type[Any], metric: RegistryMetric, **more: object) -> Any:
            return kind(metric.name, metric.help, metric.labels, registry=self.registry, **more)

        self._builds = made(Counter, definitions.BUILDS)
        self._seconds = made(Histogram, definitions.BUILD_SECONDS, buckets=BUCKETS_S)
        self._cache = made(Counter, definitions.CACHE)
        self._retries = made(Counter, definitions.RETRIES)
        self._peak = made(Gauge, definitions.PEAK)
        self._unproven = made(Gauge, definitions.UNPROVEN)
        made(Gauge, definitions.QUEUE).set_function(lambda: len(self._waiting))
        made(Gauge, definitions.RUNNING).set_function(lambda: len(self._running))
        self.registry.register(Trouble())

    def emit(self, event: Event) -> None:
        """Count it."""
        match event:
            case Planned(plan):
                with self._lock:
                    self._units |= {unit.name: (unit.request.target.name, unit.request.backend) for unit in plan.units}
                    self._waiting |= {unit.name for unit in plan.wanted}
            case RunConcluded(outcome):
                self._unproven.clear()
                for engine in outcome.engines:
                    if engine.status == "unproven":
                        self._unproven.labels(engine.target, engine.backend).inc()
            case Started() | Retrying() | ProcessEnded() | Finished():
                if unit := self._units.get(event.name):
                    self._count(event, unit)

    def _count(self, event: Started | Retrying | ProcessEnded | Finished, unit: tuple[str, str]) -> None:
        """Count what happened to a unit of the plan. unit: its labels."""
        match event:
            case Started(name):
                with self._lock:
                    self._waiting.discard(name)
                    self._running.add(name)
            case Retrying():
                self._retries.labels(*unit).inc()
            case ProcessEnded(name, usage):
                self._usage[name] = usage
                self._peak.labels(*unit).set(usage.peak_mib * 2**20)
            case Finished(name, state):
                with self._lock:
                    self._waiting.discard(name)
                    self._running.discard(name)
                    ended = self._usage.pop(name, None)
                self._cache.labels("hit" if state == "cached" else "miss").inc()
                if state != "cached":
                    self._builds.labels(state, *unit).inc()
                    if ended:
                        self._seconds.labels(state, *unit).observe(ended.seconds)


def family(metric: RegistryMetric, values: Mapping[tuple[str, ...], float]) -> "MetricFamily":
    """A counter or gauge for Prometheus. values: by the labels' values, in the order of `metric.labels`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        made.add_metric(labels, value)
    return made


class Trouble:
    """A collector of the counts of failed and repeated requests to the registry, in this process."""

    def collect(self) -> Iterator["MetricFamily"]:
        """Two counters."""
        seen = files.read_error_counts()
        yield family(definitions.ERRORS, {(): seen["errors"]})
        yield family(definitions.REPEATED, {(): seen["retries"]})


@contextmanager
def serve_metrics(registry: "CollectorRegistry", port: int, address: str) -> Iterator["HttpServer"]:
    """Serve http://ADDRESS:PORT/metrics while inside; the system chooses the port for 0.

    Raises UnavailableError when the port is taken or the address is none of this machine's.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    from enginesmith.listening import HttpAnswer, HttpRequest, HttpServer

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.target.partition("?")[0] != "/metrics":
            return HttpAnswer(404, b"metrics are at /metrics\n")
        return HttpAnswer(200, generate_latest(registry), {"Content-Type": CONTENT_TYPE_LATEST})

    with HttpServer(answer, HttpAddress(address, port), remedy="give another port, or 0") as server:
        yield server
