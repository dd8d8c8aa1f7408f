"""How often an engine leaves the registry when many nodes pull it at once through `enginesmith cache`, and what it
costs.

    python -m benchmarks.bench_cache --clients 200 --mb 100

Clients are threads of a few processes; each reads the engine over one connection in spans of 32 MiB, digests it and
keeps nothing, because two hundred copies need more disk than a small machine has. Some more, `--pulls`, are whole pulls
into a folder. The registry is a folder; what leaves it is counted by the cache. With `--kill` the cache is killed when
half of the bytes have been sent, and all clients go on from the registry.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import psutil

from enginesmith.client.client import Client
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.nearest import open_nearest
from tests.enginesmith.registries import engine, publish_engines

SPAN_BYTES = 32 << 20
BLOCK_BYTES = 1 << 20
CHANNEL = "bench:candidate"


def publish_engine(store: Store, size: int) -> BlobDigest:
    """Publish an engine of random bytes; its digest."""
    entry = engine(store, data=os.urandom(size))
    publish_engines(store, [entry], model="bench")
    return BlobDigest(str(entry.digest))


def read_all(uri: str, blob: BlobDigest, size: int) -> tuple[float, float]:
    """Read the engine to its end, verify it, and return when that began and ended (s, one clock for all processes)."""
    store, block, started = open_nearest(uri, lambda _: None), memoryview(bytearray(BLOCK_BYTES)), time.monotonic()
    hasher = blob.hasher()
    for start in range(0, size, SPAN_BYTES):
        left = min(SPAN_BYTES, size - start)
        with store.open_range(blob.digest, start, left) as fill:
            while left:
                view = block[: min(left, BLOCK_BYTES)]
                fill(view)
                hasher.update(view)
                left -= len(view)
    if hasher.hexdigest() != blob.expected:
        raise SystemExit("a client got other bytes")
    return started, time.monotonic()


def run_clients(uri: str, blob: BlobDigest, size: int, count: int) -> None:
    """One process of clients: all start at once; prints when each began and ended as JSON."""
    with ThreadPoolExecutor(count) as pool:
        print(json.dumps(list(pool.map(lambda _: read_all(uri, blob, size), range(count)))))


def metric(url: str, name: str) -> float:
    """A metric of the cache."""
    lines = urlopen(f"{url}/metrics", timeout=60).read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def start_cache(store: Store, folder: Path) -> "tuple[subprocess.Popen[str], str]":
    """A cache of the registry, and its URL."""
    command = [sys.executable, "-m", "enginesmith", "cache", "--listen", "127.0.0.1:0", "--dir", str(folder)]
    process = subprocess.Popen([*command, "--registry", store.uri], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[0]


def measure(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the clients against a fresh cache."""
    size = given.mb * 1_000_000
    store = open_store(folder / "registry", create=True)
    blob = publish_engine(store, size)
    cache, url = start_cache(store, folder / "kept")
    process, uri = psutil.Process(cache.pid), f"{url},{store.uri}"
    share = [given.clients // given.processes + (n < given.clients % given.processes) for n in range(given.processes)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_cache",
        "--worker",
        uri,
        blob.digest,
        str(size),
    ]
    before, most = process.cpu_times(), 0
    workers = [subprocess.Popen([*command, str(count)], stdout=subprocess.PIPE, text=True) for count in share if count]
    pulls = [threading.Thread(target=pull, args=(uri, folder / f"pull{n}")) for n in range(given.pulls)]
    for thread in pulls:
        thread.start()
    wanted, sent, came = size * (given.clients + given.pulls), 0.0, 0.0
    while any(worker.poll() is None for worker in workers):
        if cache.poll() is None:
            most = max(most, process.memory_info().rss)
            sent, came = (
                metric(url, "enginesmith_cache_client_bytes_total"),
                metric(url, "enginesmith_cache_origin_bytes_total"),
            )
            if given.kill and sent > wanted / 2:
                cache.send_signal(signal.SIGKILL)
                cache.wait()
        time.sleep(0.5)
    times = [pair for worker in workers for pair in json.loads(worker.communicate()[0])]
    seconds = sorted(end - begin for begin, end in times)
    wall = max(end for _, end in times) - min(begin for begin, _ in times)
    for thread in pulls:
        thread.join()
    if cache.poll() is None:
        sent, came = (
            metric(url, "enginesmith_cache_client_bytes_total"),
            metric(url, "enginesmith_cache_origin_bytes_total"),
        )
        after = process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        cache.terminate()
        cache.wait(60)
    else:
        cpu = float("nan")
    return {
        "clients": given.clients, "pulls": given.pulls, "engine_mb": given.mb, "killed": given.kill,
        "origin_times_size": round(came / size, 3), "sent_gb": round(sent / 1e9, 2), "seconds": round(wall, 1),
        "gb_s": round(sent / 1e9 / wall, 2), "cache_cpu_s_per_gb": round(cpu / max(sent / 1e9, 1e-9), 2),
        "cache_rss_mib": most >> 20, "client_seconds_median": round(seconds[len(seconds) // 2], 1),
        "client_seconds_slowest": round(seconds[-1], 1), "load_average": round(os.getloadavg()[0], 1),
        "cpus": os.cpu_count(),
    }  # fmt: skip


def pull(uri: str, dest: Path) -> None:
    """A whole pull, without this machine's cache."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Client(uri, cache=None).pull(CHANNEL, dest)
    shutil.rmtree(dest)


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--pulls", type=int, default=4)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        uri, digest, size, count = given.worker
        run_clients(uri, BlobDigest(digest), int(size), int(count))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(given, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
