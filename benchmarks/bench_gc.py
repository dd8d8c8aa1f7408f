"""What a garbage collection costs by the number of documents: seconds, memory, requests by kind, on a store in memory.

A registry has models of 20 versions, each with 12 engines and an attestation and a record for each of them; 10 versions
of each model are garbage. The first collection marks these, the second (after the grace period) deletes them, the third
finds nothing to do. Requests are counted as a bucket would be asked; `--pause` makes each of them take so long.
Usage: python -m benchmarks.bench_gc [--documents 10000 100000 1000000] [--pause SECONDS]
"""

import argparse
import json
import os
import resource
import time
from datetime import timedelta
from hashlib import sha256

from benchmarks.counting_store import CountingStore
from enginesmith.core.errors import canonical_json, digest_of
from enginesmith.registry.evidence.attestations import attest
from enginesmith.registry.gc import GRACE, collect
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.layout import MANIFEST, blob_key, manifest_key, record_key
from enginesmith.registry.versions import channels
from tests.enginesmith.registries import engine, publish_engines, report
from tests.enginesmith.registry.memory import MemoryStore

VERSIONS = 20
TARGETS = ["cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_120"]
PRECISIONS = ["fp32", "fp16"]


class Template:
    """The documents of one real version, which are copied with other digests."""

    def __init__(self) -> None:
        store = MemoryStore()
        entries = [
            engine(store, target, precision, data=f"{target} {precision}".encode())
            for target in TARGETS
            for precision in PRECISIONS
        ]
        self.manifest: Manifest = publish_engines(store, entries, "a", channel=None).manifest
        for entry in self.manifest.engines:
            attest(store, self.manifest, report(entry, entry.status, host="elsewhere"))
        channels.promote(store, self.manifest, "candidate")
        self.channel = store.objects["models/digits/channels/candidate.json"]
        start = "models/digits/versions/1/"
        self.documents = {key.removeprefix(start): data for key, data in store.objects.items() if key.startswith(start)}
        self.digests = sorted(key.rpartition("/")[2] for key in store.objects if key.startswith("blobs/"))

    def write(self, store: CountingStore, model: str, version: str) -> int:
        """Write a version of a model, with blobs of its own; the number of its documents."""
        own_digests = {digest: sha256(f"{model}@{version} {digest}".encode()).hexdigest() for digest in self.digests}
        for digest in own_digests.values():
            store.put(blob_key(digest), b"blob")
        count = 0
        for name, data in self.documents.items():
            text = data.decode().replace('"digits"', f'"{model}"').replace('"version":"1"', f'"version":"{version}"')
            for old_name, new_digest in own_digests.items():
                text, name = text.replace(old_name, new_digest), name.replace(old_name, new_digest)
            if name == MANIFEST:
                fields = {key: value for key, value in json.loads(text).items() if key != "digest"}
                text = canonical_json({**fields, "digest": digest_of(fields)}).decode()
            store.put(f"models/{model}/versions/{version}/{name}", text.encode())
            count += 1
        for number, entry in enumerate(self.manifest.engines):
            key = sha256(f"{model}@{version} {number}".encode()).hexdigest()
            engine_digest = own_digests[str(entry.digest)]
            record = canonical_json({"blobs": [engine_digest], "value": {"digest": engine_digest}})
            store.put(record_key("build", key), record)
            count += 1
        return count

    def point(self, store: CountingStore, model: str) -> int:
        """Point a model's channel at its newest version."""
        newest_object = store.objects[manifest_key(model, str(VERSIONS))]
        document = json.loads(self.channel)
        digest = sha256(newest_object).hexdigest()
        document.update(model=model, snapshots={})
        document["move"].update(version=str(VERSIONS), manifest=digest)
        store.put(f"models/{model}/channels/candidate.json", canonical_json(document))
        return 1


def fill(documents: int) -> tuple[CountingStore, int, int]:
    """A registry of about so many documents; how many it has, and of how many models."""
    store, template, count, models = CountingStore(), Template(), 0, 0
    while count < documents:
        model, models = f"model-{models:05}", models + 1
        for version in range(1, VERSIONS + 1):
            count += template.write(store, model, str(version))
        count += template.point(store, model)
    return store, count, models


def measure(documents: int, pause_s: float) -> None:
    """Collect three times, and print a line of JSON for each."""
    store, count, models = fill(documents)
    blobs = len(store.objects) - count
    store.pause_s = pause_s
    moment_grace = store.now()
    store.now = lambda: moment_grace
    for label in ("marks", "deletes", "finds nothing"):
        start_s, cpu = time.perf_counter(), time.process_time()
        with store.count() as requests:
            collected = collect(store, delete=True)
        states = {state: sum(item.state == state for item in collected.items) for state in ("waiting", "deleted")}
        figures = {
            "documents": count,
            "models": models,
            "blobs": blobs,
            "collection": label,
            **states,
            "seconds": round(time.perf_counter() - start_s, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "requests": dict(sorted(requests.items())),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "marks_bytes": max((len(data) for key, data in store.objects.items() if key.startswith("gc/")), default=0),
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(figures), flush=True)
        moment_grace = moment_grace + GRACE + timedelta(hours=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each request takes")
    options = parser.parse_args()
    for documents in options.documents:
        if len(options.documents) == 1:
            measure(documents, options.pause)
        elif (child := os.fork()) == 0:  # each in a process of its own, whose memory is its own
            measure(documents, options.pause)
            os._exit(0)
        else:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
