"""A registry's numbers for Prometheus, from its own documents: `enginery metrics`.

A flow's process lives too short to be scraped, and a catalogue has hundreds of them. What they did stands in the
registry; so one exporter beside it has the numbers of all, also of those that died. It reads in the background, at its
own pace: a scrape answers at once, with the last that was read.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from enginery.core.errors import EngineryError
from enginery.registry.runs.totals import BUCKETS_S, Totals
from enginery.registry.store.base import Store
from pipeline.orchestration.metrics import definitions
from pipeline.orchestration.metrics.live import Trouble, family
from pipeline.orchestration.metrics.registry_view import Looker, view_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily


class Exporter:
    """Reads a registry and holds what it saw; a collector of prometheus-client's. say: is told when reading fails."""

    def __init__(self, store: Store, say: Callable[[str], object] = lambda _: None) -> None:
        self._looker, self._say = Looker(store), say
        self._view = view_of((), (), 0, Totals())
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

    def collect(self) -> Iterator["MetricFamily"]:
        """Every metric family, from the last look."""
        for metric, values in self._view.values.items():
            yield family(metric, values)
        yield _seconds(self._view.totals)
        yield family(definitions.UP, {(): float(self._up)})
        yield family(definitions.READ_AT, {(): self._at})


def _seconds(totals: Totals) -> "MetricFamily":
    from prometheus_client.core import HistogramMetricFamily

    metric = definitions.BUILD_SECONDS
    made = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    for tally in totals.builds:
        made.add_metric(tally.labels, list(zip(bounds, (*tally.buckets, tally.count), strict=True)), tally.seconds)
    return made
