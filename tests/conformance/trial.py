"""One graph through one backend, as production does it: read, made canonical, planned, built, opened, run, compared.

Runs in whatever process calls it; `examine` is what a process of its own is told to call.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx

from builders.backends import discovery
from builders.backends.discovery import check_compatible
from builders.backends.request_checks import profiles
from enginesmith.core.errors import EnginesmithError, digest_of_file
from enginesmith.core.hardware import machine
from enginesmith.core.types import Backend, BuildRequest, Dim, Precision, Session, Target, Tensors, TensorSpec
from pipeline.sources.canonical import canonical
from pipeline.sources.onnx_model import load_onnx, save_onnx, specs_of
from tests.conformance.outcomes import Kind, Outcome
from validation.comparison.sessions import case_checks
from validation.limits.budget import default_budget

_LONGEST = 600


@dataclass(frozen=True)
class Run:
    """Inputs, and the outputs that are right."""

    inputs: Tensors
    expected: Tensors


@dataclass(frozen=True)
class Item:
    """What is tried. model: as a user would hand it in, written into a folder.  runs: called when the engine runs here,
    with the inputs and outputs of the canonical form.  compare: why an output is not right; by default the budgets of
    an engine."""

    name: str
    model: Callable[[Path], Path]
    runs: Callable[[Sequence[TensorSpec], Sequence[TensorSpec]], Sequence[Run]]
    dims: tuple[Dim, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    precision: Precision = "fp32"
    compare: Callable[[str, Any, Any], str | None] | None = None


def backend_of(name: str) -> Backend:
    """An installed backend, or 'package.module:Class' for one that is not."""
    module, colon, cls = name.partition(":")
    return cast("Backend", getattr(import_module(module), cls)()) if colon else discovery.configure(name, {})


def target_for(backend: Backend) -> Target | None:
    """The target to try a backend on: one that runs here, else the first that it builds a plain fp32 model for."""
    tensor = (TensorSpec("x", "float32", (1, 4)),)
    served_targets = [target for target in machine.parse_targets("all") if backend.serves(target)]
    for target in sorted(served_targets, key=lambda target: (backend.runs(target) is not None, target.name != "sm_89")):
        if not backend.refuses(BuildRequest("0" * 64, "fp32", target, backend.name, tensor, tensor, ())):
            return target
    return None


def attempt(backend: Backend, target: Target, item: Item, workdir: Path) -> Outcome:
    """Try one item; whatever happens short of the end of this process is an outcome."""
    start_s, step = time.monotonic(), _Step()
    try:
        kind, reason = _attempt(backend, target, item, workdir, step)
    except EnginesmithError as error:
        kind, reason = "refused", str(error)
    except Exception as error:  # this is what it is about: an error that is none of ours would reach a user
        kind, reason = "broke", f"{type(error).__name__}: {error}"
    text = "" if kind in ("passed", "built") else step.name
    return Outcome(item.name, kind, _short(reason), text, step.engine, round(time.monotonic() - start_s, 3))


@dataclass
class _Step:
    name: str = "source"
    engine: str = ""


def _attempt(backend: Backend, target: Target, item: Item, workdir: Path, at: _Step) -> tuple[Kind, str]:
    model, inputs, outputs = read_item(item, workdir)
    at.name = "plan"
    request = request_for(backend, target, (model, inputs, outputs), item.dims, item.precision)
    if reason := backend.refuses(request):
        return "refused", reason
    at.name = "build"
    engine = backend.build(request, model, fresh(workdir / "engine"))
    at.engine = engine.digest
    if engine.digest != digest_of_file(engine.path) or engine.size_bytes != engine.path.stat().st_size:
        return "wrong", "the engine's digest or size is not that of its file"
    model.unlink()  # an engine must stand alone
    if backend.runs(target):
        return "built", ""
    at.name = "open"
    check_compatible(backend, engine)
    with backend.open(engine) as session:
        at.name = "run"
        wrong_answers = specs_reason(session, request) or _answers(session, item, (inputs, outputs))
    return ("wrong", wrong_answers) if wrong_answers else ("passed", "")


def read_item(item: Item, workdir: Path) -> tuple[Path, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The canonical form of an item's model as a file, its inputs and its outputs."""
    inputs = item.model(fresh(workdir / "given"))
    model = canonical(load_onnx(inputs, inputs.parent), item.inputs)
    path = fresh(workdir / "canonical") / "model.onnx"
    save_onnx(model, path)
    return path, *specs_of(model)


def request_for(
    backend: Backend,
    target: Target,
    model: tuple[Path, tuple[TensorSpec, ...], tuple[TensorSpec, ...]],
    dims: Sequence[Dim],
    precision: Precision = "fp32",
) -> BuildRequest:
    """The request that a plan would make."""
    path, inputs, outputs = model
    return BuildRequest(
        digest_of_file(path), precision, target, backend.name, inputs, outputs, tuple(profiles(inputs, dims)),
        discovery.options_of(backend), discovery.toolchain_of(backend),
    )  # fmt: skip


def specs_reason(session: Session, request: BuildRequest) -> str | None:
    """Where a session's inputs or outputs are not the request's, by name, dtype, rank and order."""
    for role, have, want in (("inputs", session.inputs, request.inputs), ("outputs", session.outputs, request.outputs)):
        actual_specs, names = ([(spec.name, spec.dtype, len(spec.shape)) for spec in specs] for specs in (have, want))
        if actual_specs != names:
            return f"the session's {role} are {actual_specs}, the request's {names}"
    return None


def _answers(session: Session, item: Item, specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]]) -> str | None:
    for run in item.runs(*specs):
        if reason := answer_reason(session.run(run.inputs), run.expected, item.precision, item.compare):
            shapes = {name: array.shape for name, array in run.inputs.items()}
            return f"{reason}, for {shapes}"
    return None


def answer_reason(
    answer: Tensors,
    expected: Tensors,
    precision: Precision,
    compare: Callable[[str, Any, Any], str | None] | None = None,
) -> str | None:
    """Why an answer is not right: other names, shapes, dtypes or values. None when it is."""
    if list(answer) != list(expected):
        return f"outputs {list(answer)} instead of {list(expected)}"
    for name, output_spec in expected.items():
        got = answer[name]
        if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (output_spec.shape, output_spec.dtype):
            return f"{name!r} is {_kind(got)} instead of {_kind(output_spec)}"
        if reason := (compare or within_budget(precision))(name, output_spec, got):
            return reason
    return None


def within_budget(precision: Precision) -> Callable[[str, Any, Any], str | None]:
    """The comparison by the budgets of the engine stage: exact for integers, NaN only where NaN is right."""
    budget = default_budget("engine", precision)

    def compare(name: str, right: Any, got: Any) -> str | None:
        if right.dtype.kind in "OUS":
            return None if (right == got).all() else f"{name!r} has other strings"
        mask = np.isfinite(right.astype("float64")) if right.dtype.kind not in "biu" else np.ones(right.shape, bool)
        if not np.array_equal(right[~mask], got[~mask], equal_nan=True):
            return f"{name!r} differs where it is not finite"
        if mask.all():
            checks = case_checks("engine", "", name, right, got, budget) if right.size else ()
        else:
            checks = case_checks("engine", "", name, right[mask], got[mask], budget) if mask.any() else ()
        failed_texts = [f"{check.name} {check.value} (limit {check.limit})" for check in checks if not check.passed]
        return f"{name!r}: {', '.join(failed_texts)}" if failed_texts else None

    return compare


def _kind(array: Any) -> str:
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    if folder.exists():
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def saved(model: onnx.ModelProto, folder: Path, *, external: bool = False) -> Path:
    """A model on disk, its weights in a file of their own if asked for."""
    path = folder / "given.onnx"
    if external:
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    else:
        onnx.save(model, path)
    return path
