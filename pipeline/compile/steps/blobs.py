"""Shared code of the requests: blobs as verified files, engines as sessions, and checks as a proof."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import discovery
from builders.onnx_graphs.bodies import list_shards
from enginesmith.core.errors import DataError, IntegrityError, digest_of_file
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.reports.proof import Check, FreeRunning, Spread, name_task_checks
from enginesmith.core.requirements import Weights
from enginesmith.core.types import Engine, Precision, Session
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import BlobDigest
from pipeline.values import EngineBlob, Exported, Json, Proof, Shards
from validation.metrics.tasks.terms import TaskMetric

# Of what was measured of a graph: statistics of its tensors, digests of samples, ranges.
MEASURED_BYTES = 16 << 30

if TYPE_CHECKING:
    from validation.golden.free_running import RecordedSession
    from validation.golden.golden_set import GoldenSet


@dataclass(frozen=True)
class StoredGraph:
    """An ONNX graph in a store, with the shards of its weights."""

    blob: BlobDigest
    shards: Shards


def fetch(store: Store, digest: str, dest: Path) -> Path:
    """A verified copy of a blob at `dest`.

    Raises IntegrityError for a missing or damaged blob; a damaged one is moved away, and the next build makes it again.
    """
    try:
        store.fetch(digest, dest)
    except IntegrityError as error:
        if store.has(digest):
            store.discard(digest)
            raise IntegrityError(
                f"{str(error).partition(';')[0]}; the damaged blob was moved away; `enginesmith build` rebuilds it"
            ) from error
        raise
    return dest


def fetch_graph(store: Store, digest: str, dest: Path) -> Path:
    """An ONNX graph, verified, at `dest`, with its shards beside it: to be read only, because they are links to the
    blobs where the file system allows that. Raises as `fetch`, and ModelError for weights in other files."""
    _link(store, digest, dest)
    for shard in list_shards(dest):
        if not (shard_path := dest.with_name(shard)).exists():
            _link(store, shard, shard_path)
    return dest


def _link(store: Store, digest: str, dest: Path) -> None:
    """A blob at `dest`, verified, as a second name of the same file, or as a copy. Raises as `fetch`."""
    with suppress(OSError, IntegrityError):
        dest.hardlink_to(store.path(digest))
        if digest_of_file(dest) == digest:
            return
    dest.unlink(missing_ok=True)
    fetch(store, digest, dest)


def put_graph(store: Store, path: Path) -> StoredGraph:
    """Store an ONNX graph, its shards first, or another engine's file, which has none. In a registry on this machine
    each shard becomes a link to its blob, so it takes space only once."""
    names = list_shards(path) if path.suffix == ".onnx" else ()
    shards = tuple((name, path.with_name(name).stat().st_size) for name in names)
    for shard, size in shards:
        shard_path = path.with_name(shard)
        if store.stored_size(shard) != size:
            store.put_file(shard_path)
            if store.near:
                with suppress(OSError):
                    link_path = shard_path.with_name(f"{shard}.link")
                    link_path.hardlink_to(store.path(shard))
                    link_path.replace(shard_path)
    return StoredGraph(store.put_and_digest_file(path), shards)


def fetch_engine(store: Store, blob: EngineBlob, folder: Path) -> Engine:
    """An engine, verified, with the ONNX model if the engine's file has no weights. Raises as `fetch`."""
    fetch_one = fetch_graph if blob.suffix == ".onnx" else fetch
    path = fetch_one(store, blob.digest, folder / f"engine{blob.suffix}")
    request = blob.request
    requires = (*discovery.configure(request.backend, dict(request.options)).requires(request), *blob.libraries)
    for digest in {build.sha256 for library in blob.libraries for build in library.builds}:
        if not (shard_path := folder / digest).exists():
            _link(store, digest, shard_path)
    is_stripped = any(isinstance(requirement, Weights) for requirement in requires)
    weights_path = fetch_graph(store, request.model, folder / "weights.onnx") if is_stripped else None
    return Engine(request, path, blob.digest, path.stat().st_size, blob.suffix, requires, weights=weights_path)


def open_session(store: Store, blob: EngineBlob, folder: Path) -> AbstractContextManager[Session]:
    """The engine, fetched and verified, opened by its backend. Raises as `fetch`, and what the backend raises."""
    return discovery.open_engine(fetch_engine(store, blob, folder))


def golden_set(store: Store, digest: str, workdir: Path) -> "GoldenSet":
    """The golden set of this digest. Raises as `fetch`, and DataError for a blob that is not a golden set."""
    from validation.golden.golden_set import GoldenSet

    return GoldenSet.load(fetch(store, digest, workdir / "golden.safetensors"))


def this_machine() -> str:
    """Hardware that affects the bits of outputs: the kind of CPU, and the number of cores that share a sum."""
    return f"{this_kind().name}, {os.cpu_count()} cores"


def answers_here(export: Exported) -> str | None:
    """Digest of the exported model's answers to its golden set, if a machine like this one computed them."""
    golden_answers = export.answers
    return golden_answers.blob if golden_answers and golden_answers.machine == this_machine() else None


@contextmanager
def open_reference(store: Store, path: Path, golden: "GoldenSet", answers: str | None) -> "Iterator[RecordedSession]":
    """The graph at `path`, opened to be run as it is written. answers: digest of this graph's answers to the golden set
    on this kind of machine; without them, or if they cannot be read, the graph is run for all of them. Raises as
    `ReferenceSession`."""
    from builders.reference import ReferenceSession, threads_for
    from validation.golden.free_running import RecordedSession
    from validation.golden.golden_set import GoldenSet

    answer_set = None
    if answers:
        with suppress(IntegrityError, DataError):
            answer_set = GoldenSet.load(fetch(store, answers, path.with_name("answers.safetensors")))
    with ReferenceSession(path, threads=threads_for(path, bool(golden.sequences))) as session:
        yield RecordedSession(session, len(golden.cases), answer_set)


def proof_of(
    checks: Iterable[Check],
    session: Session,
    golden: "GoldenSet",
    metrics: Sequence[TaskMetric],
    proof_name: str,
    drifts: tuple[Sequence[Spread], Sequence[FreeRunning]] = ((), ()),
) -> Proof:
    """Checks, task metrics and drifts (how errors spread, and along sequences) as a proof; each value of a metric is a
    check of its own, and where a metric decides, drift beyond its limits is not a failure. proof_name: the thing that
    was run.  metrics: the spec's task metrics.  checks: of the stage."""
    from validation.comparison.tasks import lift_limits, task_checks

    task = [replace(check, case=f"{check.case}, {proof_name}") for check in task_checks(session, golden, metrics)]
    task_values = {name: check.value for name, check in name_task_checks(task).items()}
    values = tuple((name, value) for name, value in task_values.items() if value is not None and math.isfinite(value))
    return Proof((*lift_limits(checks, metrics), *task), values, tuple(drifts[0]), tuple(drifts[1]))


def runnable(graph: Path, precision: Precision) -> Path:
    """The ONNX file of a graph that shows on this CPU what a GPU would compute, in fp32 arithmetic that rounds where
    the graph rounds; `graph` itself where it has neither 16-bit floats nor floats in blocks.

    onnxruntime's CPU has no bf16 kernels, and between fp16 nodes it keeps fp32, which hides rounding and overflow.
    """
    if precision == "fp32":
        return graph
    from builders.onnx_graphs.outline import load_outline
    from builders.onnx_graphs.weights import load_graph
    from pipeline.quantization.schemes.block_floats import emulate_blocks, needs_blocks_emulated
    from pipeline.quantization.schemes.cast import emulate, needs_emulation
    from pipeline.sources.onnx_model import save_onnx

    outline = load_outline(graph)
    has_blocks, has_halves = needs_blocks_emulated(outline), needs_emulation(outline)
    if not has_blocks and not has_halves:
        return graph
    emulated_path, model = graph.with_name("emulated.onnx"), load_graph(graph)
    model = emulate_blocks(model) if has_blocks else model
    save_onnx(emulate(model) if has_halves else model, emulated_path)
    return emulated_path


def text_of(value: Json) -> bytes:
    """JSON for people: sorted, indented. Raises ValueError for NaN and infinities."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()
