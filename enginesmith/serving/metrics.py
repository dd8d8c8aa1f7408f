"""The counts of routers for Prometheus. prometheus-client (extra `build`) is imported only on use.

Labels have few values: a model, which the caller names, and its buckets and fallbacks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from enginesmith.serving.router import Router

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily

# name -> meaning; docs/guides/router.md has them too.
ROUTER_METRICS = {
    "enginesmith_router_requests": "Requests that a bucket answered.",
    "enginesmith_router_elements": "Elements of the inputs that a bucket ran on, by kind: own, padding.",
    "enginesmith_router_fallbacks": "Requests that no bucket held, by the fallback that answered.",
    "enginesmith_router_errors": "Requests whose engine raised an error.",
}


class RouterCollector:
    """A collector of a router's counts, for `registry.register`. model: its label."""

    def __init__(self, router: Router, model: str) -> None:
        self._router, self._model = router, model

    def collect(self) -> Iterator["MetricFamily"]:
        """The current metrics."""
        from prometheus_client.core import CounterMetricFamily

        counts, model = self._router.counts(), self._model
        buckets = counts.buckets
        rows: dict[str, tuple[tuple[str, ...], list[tuple[tuple[str, ...], float]]]] = {
            "requests": (("bucket",), [((bucket.name,), bucket.requests) for bucket in buckets]),
            "elements": (
                ("bucket", "kind"),
                [
                    ((bucket.name, kind), value)
                    for bucket in buckets
                    for kind, value in (("own", bucket.elements), ("padding", bucket.padding))
                ],
            ),
            "fallbacks": (
                ("fallback",),
                [((name,), count) for name, count in {**counts.fallbacks, "": counts.unanswered}.items()],
            ),
            "errors": ((), [((), counts.errors)]),
        }
        for name, help_text in ROUTER_METRICS.items():
            labels, samples = rows[name.removeprefix("enginesmith_router_")]
            family = CounterMetricFamily(name, help_text, labels=("model", *labels))
            for values, value in samples:
                family.add_metric((model, *values), float(value))
            yield family


def prometheus_text(router: Router, model: str) -> str:
    """A router's counts in the text format of Prometheus. model: their label."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    register(router, model, registry)
    return generate_latest(registry).decode()


def register(router: Router, model: str, registry: "CollectorRegistry | None" = None) -> None:
    """Add a router's counts to a registry of prometheus-client (None: its default one). model: their label."""
    from prometheus_client import REGISTRY

    (registry or REGISTRY).register(RouterCollector(router, model))
