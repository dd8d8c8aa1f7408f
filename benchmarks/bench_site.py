"""What the site of a registry of many models costs: the first time, with nothing changed, after one channel moved; and
the size of its pages. Run as `python -m benchmarks.bench_site [MODELS]`."""

import gzip
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from enginesmith.registry.store.base import FileStore, open_store
from enginesmith.registry.store.layout import channel_key, manifest_key
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Channel, Move
from pipeline.site.folder import STATE, SiteFolder, Written
from pipeline.site.generate import write_site
from tests.pipeline.site.sites import move, publish_small


def fill(store: FileStore, count: int) -> None:
    """Publish two versions of each of `count` models: those of one, under other names."""
    for content in "ab":
        publish_small(store, "model-00000", content)
    manifests = [lookup.load(store, "model-00000", version) for version in "12"]
    for number in range(1, count):
        model = f"model-{number:05}"
        for manifest in manifests:
            named_manifest = replace(manifest, model=model)
            store.create(manifest_key(model, manifest.version), named_manifest.to_bytes())
        to = Move("2", named_manifest.digest, "2026-01-01T00:00:00+00:00", "ada", "built")
        store.create(channel_key(model, "candidate"), Channel(model, "candidate", 1, to).to_bytes())


@contextmanager
def unsynced() -> Iterator[None]:
    """Writes that wait for no disk, so that a registry of many models is there soon; nothing in here is measured."""
    sync = os.fsync
    os.fsync = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = sync


def timed(what: str, work: Callable[[], Written]) -> None:
    """Run `work`, and print its wall and CPU time and what it wrote."""
    wall, cpu = time.monotonic(), time.process_time()
    done = work()
    took = f"{time.monotonic() - wall:.1f} s, {time.process_time() - cpu:.1f} s of CPU"
    peak = psutil.Process().memory_info().rss / 2**20
    print(
        f"{what}: {took}; drawn {done.drawn}, written {done.written}; {peak:.0f} MiB; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main(count: int) -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as place:
        store = open_store(Path(place) / "registry", create=True)
        assert isinstance(store, FileStore)
        with unsynced():
            fill(store, count)
        out_path = Path(place) / "site"

        def write() -> Written:
            return write_site(store, SiteFolder(out_path))

        timed(f"{count} models, 2 versions each, the first time", write)
        timed("nothing changed", write)
        move(store, "model-00007", "1")
        timed("one channel moved", write)
        state = sum(path.stat().st_size for path in (out_path / STATE).rglob("*.json"))
        files = sum(path.is_file() for path in out_path.rglob("*"))
        print(f"{files} files; {state / count:.0f} bytes a model are kept of what was drawn")
        for path in ("index.html", "models.js", "models/model-00007/versions/2/index.html"):
            data = (out_path / path).read_bytes()
            print(f"{path}: {len(data)} bytes, {len(gzip.compress(data, 6))} compressed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
