"""What the requests have in common: blobs as verified files, engines as sessions, and checks as a proof."""

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import compatibility, discovery
from enginery.core.errors import IntegrityError
from enginery.core.reports.proof import Check, Spread
from enginery.core.requirements import Weights
from enginery.core.types import Engine, Precision, Session
from enginery.registry.store.base import Store
from pipeline.values import EngineBlob, Json, Proof
from validation.comparison.terms import TaskMetric

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSet


def fetch(store: Store, digest: str, dest: Path) -> Path:
    """A verified copy of a blob at `dest`.

    Raises IntegrityError for a missing or damaged blob; a damaged one is set aside, so that the next run makes it anew.
    """
    try:
        store.fetch(digest, dest)
    except IntegrityError as error:
        if store.has(digest):
            store.discard(digest)
            raise IntegrityError(
                f"{str(error).partition(';')[0]}; it was set aside: run `enginery build` and it is made anew"
            ) from error
        raise
    return dest


def fetch_engine(store: Store, blob: EngineBlob, folder: Path) -> Engine:
    """An engine, verified, with the ONNX model where the weights are left to that. Raises as `fetch`."""
    path = fetch(store, blob.digest, folder / f"engine{blob.suffix}")
    request = blob.request
    requires = discovery.configure(request.backend, dict(request.options)).requires(request)
    stripped = any(isinstance(item, Weights) for item in requires)
    weights = fetch(store, request.model, folder / "weights.onnx") if stripped else None
    return Engine(request, path, blob.digest, path.stat().st_size, blob.suffix, requires, weights=weights)


def open_session(store: Store, blob: EngineBlob, folder: Path) -> AbstractContextManager[Session]:
    """The engine, fetched and verified, opened by its backend. Raises as `fetch`, and what the backend raises."""
    return compatibility.open_engine(fetch_engine(store, blob, folder))


def golden_set(store: Store, digest: str, workdir: Path) -> "GoldenSet":
    """The golden set of this digest. Raises as `fetch`, and DataError for a blob that is none."""
    from validation.golden.golden_set import GoldenSet

    return GoldenSet.load(fetch(store, digest, workdir / "golden.safetensors"))


def proof_of(
    checks: Iterable[Check],
    session: Session,
    golden: "GoldenSet",
    metric: TaskMetric | None,
    what: str,
    spreads: Sequence[Spread] = (),
) -> Proof:
    """Checks, task metric and spreads as a proof; the metric is a check of its own. what: the thing that was run."""
    from validation.comparison.sessions import task_check

    task = [replace(task_check(session, golden, metric), case=f"golden, {what}")] if metric else []
    metrics = tuple((check.name, check.value) for check in task if check.value is not None)
    return Proof((*checks, *task), metrics, tuple(spreads))


def runnable(graph: Path, precision: Precision) -> Path:
    """The ONNX file of a graph that shows on this CPU what a GPU would compute, in fp32 arithmetic that rounds where
    the graph rounds; `graph` itself where it has no 16-bit floats.

    onnxruntime's CPU has no bf16 kernels, and between fp16 nodes it keeps fp32, which hides rounding and overflow.
    """
    if precision == "fp32":
        return graph
    import onnx

    from pipeline.quantization.schemes.cast import emulate, needs_emulation

    model = onnx.load(graph)
    if not needs_emulation(model):
        return graph
    emulated = graph.with_name("emulated.onnx")
    onnx.save(emulate(model), emulated)
    return emulated


def text_of(value: Json) -> bytes:
    """JSON for people: sorted, indented. Raises ValueError for NaN and infinities."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()
