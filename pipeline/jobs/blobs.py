"""What the jobs have in common: JSON to values, blobs to verified files, checks to JSON."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.errors import IntegrityError
from builders.refitting import is_stripped
from builders.types import BuildRequest, Dim, Engine, Precision, Session, TensorSpec, tensor_from_json
from pipeline.registry.store import Store
from pipeline.values import Json

if TYPE_CHECKING:
    from validation.golden import GoldenSet
    from validation.spread import Spread


def tensors_from(items: list[Json]) -> tuple[TensorSpec, ...]:
    """Inputs or outputs, as a step's value holds them."""
    return tuple(tensor_from_json(item) for item in items)


def dims_from(items: list[Json]) -> tuple[Dim, ...]:
    """Dynamic dims, as a step's key holds them."""
    return tuple(Dim(**{**item, "edges": tuple(item["edges"])}) for item in items)


def fetch(store: Store, digest: str, dest: Path) -> Path:
    """A verified copy of a blob. A damaged blob is set aside, so that the next run makes it anew."""
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


def fetched_engine(store: Store, request: BuildRequest, digest: str, suffix: str, folder: Path) -> Engine:
    """An engine, verified, with the model that has its weights where its own file leaves them out."""
    path = fetch(store, digest, folder / f"engine{suffix}")
    weights = fetch(store, request.model, folder / "weights.onnx") if is_stripped(request) else None
    return Engine(request, path, digest, path.stat().st_size, suffix, weights=weights)


def golden_set(store: Store, digest: str, workdir: Path) -> "GoldenSet":
    """The golden set of this digest."""
    from validation.golden import GoldenSet

    return GoldenSet.load(fetch(store, digest, workdir / "golden.safetensors"))


def proof_of(
    checks: Any, session: Session, golden: "GoldenSet", metric: Json | None, what: str, spreads: "Sequence[Spread]" = ()
) -> Json:
    """Checks, task metric and spreads as JSON; the metric is a check of its own. what: the thing that was run."""
    from validation.compare import task_check

    task = [replace(task_check(session, golden, metric), case=f"golden, {what}")] if metric else []
    metrics = {check.name: check.value for check in task if check.value is not None}
    found = {"checks": [check.to_json() for check in (*checks, *task)], "metrics": metrics}
    return {**found, "spreads": [spread.to_json() for spread in spreads]}


def runnable(graph: Path, precision: Precision) -> Path:
    """A graph that shows on this CPU what a GPU would compute, in fp32 arithmetic that rounds where the graph rounds.

    onnxruntime's CPU has no bf16 kernels, and between fp16 nodes it keeps fp32, which hides rounding and overflow.
    """
    if precision == "fp32":
        return graph
    import onnx as onnx_package

    from pipeline.quantization.schemes.emulate import emulate

    emulated = graph.with_name("emulated.onnx")
    onnx_package.save(emulate(onnx_package.load(graph)), emulated)
    return emulated


def text_of(value: Json) -> bytes:
    """JSON for people: sorted, indented. Raises ValueError for NaN and infinities."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode()
