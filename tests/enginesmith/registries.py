"""Small real registries for the tests: engines of a few bytes, with real reports and approvals."""

import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.backends import discovery
from enginesmith.client.locate import VersionLocator, rank_located
from enginesmith.client.pull import BlobFetcher, Pulled, download_best, download_engine
from enginesmith.client.resolve import Policy
from enginesmith.core.errors import canonical_json, digest_of, digest_of_file
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.names import Reference
from enginesmith.core.reports.proof import Approved, Check, Report, approve
from enginesmith.core.requirements import GpuMemory, Requirement, for_target
from enginesmith.core.types import ShapeProfile, Target, TensorSpec
from enginesmith.registry.evidence.attachments import Attachment
from enginesmith.registry.manifest import EngineEntry, Manifest, make_request
from enginesmith.registry.store.base import FileStore, Store
from enginesmith.registry.store.cache import local_cache
from enginesmith.registry.store.layout import blob_key
from enginesmith.registry.store.objects.store import ObjectStore
from enginesmith.registry.store.s3.requests import client
from enginesmith.registry.versions.publish import Published, add_attachment, publish
from tests.enginesmith.object_stores.kinds import kind_of

# Every kind of store answers the same tests: a new kind is one word here, and one in `object_stores.kinds`.
BUCKETS = ("s3", "gs", "az")
# What a store itself does.
on_each_kind = pytest.mark.parametrize("store", ["file", *BUCKETS], indirect=True)
# What is made of a store: in `make test` on a folder and on the bucket whose server is quickest.
_OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in BUCKETS if kind != "gs"]
on_each_store = pytest.mark.parametrize("store", ["file", "gs", *_OTHERS], indirect=True)
# What buckets alone have.
on_each_bucket = pytest.mark.parametrize("server_kind", BUCKETS, indirect=True)

PASSED = Check("engine", "sqnr_db", "logits", "golden", 60.0, 40.0, True)
FAILED = Check("engine", "sqnr_db", "logits", "golden", 3.0, 40.0, False)


def engine(
    store: Store, target: str = "cpu", precision: str = "fp32", status: str = "proven", data: bytes | None = None
) -> EngineEntry:
    """A usable entry whose engine is stored."""
    parsed_target = parse_targets(target)[0]
    content = data if data is not None else f"engine {target} {precision}".encode()
    entry = EngineEntry(
        target=parsed_target.name,
        precision=precision,
        backend="onnxruntime" if parsed_target.is_cpu else "tensorrt-rtx",
        status=status,  # type: ignore[arg-type]
        reason="1 checks passed" if status == "proven" else f"no {parsed_target.name} here",
        compute_capability=parsed_target.compute_capability,
        product=parsed_target.product,
        digest=store.put_bytes(content),
        size_bytes=len(content),
        suffix=".onnx" if parsed_target.is_cpu else ".engine",
        inputs=(TensorSpec("image", "float32", ("batch", 1, 8, 8)),),
        outputs=(TensorSpec("logits", "float32", ("batch", 10)),),
        profiles=(ShapeProfile((("image", (1, 1, 8, 8), (8, 1, 8, 8), (32, 1, 8, 8)),)),),
    )
    memory = () if parsed_target.is_cpu else (GpuMemory(len(content)),)
    entry = replace(entry, requires=(for_target(parsed_target), *memory))
    return replace(entry, report=store.put_bytes(canonical_json(report(entry).to_json())))


def with_requirements(entry: EngineEntry) -> EngineEntry:
    """The entry with what its backend says that an engine of its request requires."""
    backend = discovery.configure(entry.backend, dict(entry.options))
    memory = () if entry.hardware.is_cpu else (GpuMemory(entry.size_bytes or 0),)
    return replace(entry, requires=(*backend.requires(make_request(entry)), *memory))


def refusal(target: str = "sm_75", precision: str = "fp32") -> EngineEntry:
    """An entry without an engine."""
    result = parse_targets(target)[0]
    return EngineEntry(
        result.name, precision, "tensorrt-rtx", "refused", "no FP32 GEMM; use fp16", result.compute_capability,
        requires=(for_target(result),),
    )  # fmt: skip


def report(
    entry: EngineEntry, verdict: str | None = None, host: str = "here", created_at: str = "2026-01-01T00:00:00+00:00"
) -> Report:
    """A report about an entry, by default one that stands behind its status."""
    result = verdict or entry.status
    return Report(
        unit=entry.unit,
        target=entry.target,
        precision=entry.precision,
        backend=entry.backend,
        engine=entry.digest,
        golden="0" * 64,
        checks=(FAILED if result == "failed" else PASSED,),
        verdict=result,  # type: ignore[arg-type]
        reason="sqnr_db 3, limit 40" if result == "failed" else "fine",
        created_at=created_at,
        host={"name": host},
        versions={},
    )


def approval(entry: EngineEntry) -> Approved:
    result = approve(report(entry))
    assert result is not None
    return result


def draft(store: Store, content: object = "a", model: str = "digits") -> Manifest:
    return Manifest(
        model=model,
        version="",
        created_at="2026-01-01T00:00:00+00:00",
        content=digest_of({"content": content}),
        sources={"onnx": store.put_bytes(b"onnx")},
        report=store.put_bytes(b"{}"),
        metrics={"fp32": {"accuracy": 0.97}},
    )


def publish_engines(
    store: Store,
    entries: Sequence[EngineEntry],
    content: object = "a",
    *,
    channel: str | None = "candidate",
    version: str | None = None,
    model: str = "digits",
    others: Sequence[EngineEntry] = (),
) -> Published:
    """Publish entries with their proofs."""
    pairs = [(entry, approval(entry)) for entry in entries]
    return publish(store, draft(store, content, model), pairs, others, channel=channel, wanted_version=version)


def attach(
    store: Store,
    manifest: Manifest,
    file: Path,
    kind: str = "vocabulary",
    requires: Sequence[Requirement] = (),
    created_at: str = "2026-01-02T00:00:00+00:00",
) -> Attachment:
    """Attach a file to a version, for machines that meet the requirements."""
    version, digest = (manifest.model, manifest.version, manifest.digest), digest_of_file(file)
    size = file.stat().st_size
    attachment = Attachment(file.name, kind, *version, digest, size, "tester", created_at, tuple(requires))
    return add_attachment(store, manifest, attachment, file)[0]


def flip(store: Store, digest: str) -> None:
    data = bytearray(store.read_blob(digest))
    data[0] ^= 1
    overwrite(store, blob_key(digest), bytes(data))


def overwrite(store: Store, key: str, data: bytes) -> None:
    """Write what no writer of ours would."""
    if isinstance(store, FileStore):
        path = store.root / key
        path.chmod(0o644)
        path.write_bytes(data)
    else:
        assert isinstance(store, ObjectStore)
        kind_of(store).overwrite(store, key, data)


def uploads(store: ObjectStore) -> int:
    """Uploads to S3 that were neither completed nor aborted."""
    multipart_uploads = client(store.place).list_multipart_uploads(Bucket=store.place.bucket, Prefix=store.place.prefix)
    return len(multipart_uploads.get("Uploads", ()))


def pull(
    store: Store, reference: Reference, target: Target, dest: Path, fetcher: BlobFetcher | None = None, **policy: Any
) -> Pulled:
    """Bring the engine that fits best, as `Client.pull` does with a store that is open already."""
    version = VersionLocator(store, checked=True).locate(reference)
    located_engine, result = rank_located(store, version, Machine.of(target), Policy(**policy))
    through = fetcher or BlobFetcher(None if store.near else local_cache())
    return download_best(result, lambda resolution: download_engine(store, located_engine, resolution, dest, through))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked child; its pid. The child exits 0, or 1 after printing what it raised."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def run_together(works: Iterable[Callable[[], object]]) -> None:
    """Run each in a child of its own, all at once. Raises AssertionError where one fails."""
    children = [in_child(work) for work in works]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * len(children)
