"""How long `enginesmith list` takes with 10,000 models on a store whose requests each take 20 ms: without the index,
and with it; and what a look of the metrics' exporter costs.

Each model has 20 versions and two channels; manifests are not read, and say nothing.
Usage: python -m benchmarks.bench_list [--models 10000] [--pause 0.02]
"""

import argparse
import json
import os
import time
from collections.abc import Callable

from benchmarks.counting_store import CountingStore
from enginesmith.core.errors import canonical_json
from enginesmith.registry.store.layout import channel_key, manifest_key
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.index import list_models
from tests.enginesmith.registries import engine, publish_engines
from tests.enginesmith.registry.memory import MemoryStore

VERSIONS = 20


def fill(models: int) -> CountingStore:
    """A registry of so many models."""
    real_store, store = MemoryStore(), CountingStore()
    manifest = publish_engines(real_store, [engine(real_store)], "a").manifest.to_bytes()
    document = json.loads(real_store.objects[channel_key("digits", "candidate")])
    for number in range(models):
        for version in range(1, VERSIONS + 1):
            store.put(manifest_key(f"model-{number:05}", str(version)), manifest)
        for name in ("candidate", "stable"):
            named_fields = {**document, "model": f"model-{number:05}", "name": name}
            store.put(channel_key(f"model-{number:05}", name), canonical_json(named_fields))
    return store


def measure(store: CountingStore, what: str, work: Callable[[], object]) -> None:
    """Print a line of JSON with the seconds and requests of `work`."""
    start_s, cpu = time.perf_counter(), time.process_time()
    with store.count() as requests:
        result = work()
    figures = {
        "what": what,
        "models": len(result) if isinstance(result, list) else None,
        "seconds": round(time.perf_counter() - start_s, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "requests": dict(sorted(requests.items())),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each request takes")
    options = parser.parse_args()
    store = fill(options.models)
    measure(store, "without a pause, making the index", lambda: list_models(store))
    store.pause_s = options.pause
    measure(store, "list", lambda: list_models(store))
    measure(store, "a page of 50", lambda: list_models(store, limit=50, after="model-00100"))
    entries = [engine(store)]
    store.pause_s = 0.0
    manifest = publish_engines(store, entries, "b", model="one-more").manifest
    store.pause_s = options.pause
    measure(store, "a channel's move", lambda: channels.promote(store, manifest, "stable"))
    measure(store, "its versions", lambda: lookup.versions(store, "one-more"))


if __name__ == "__main__":
    main()
