"""A PyTorch source as a job sees it: the captured program lives in a process of its own (`user_process`).

The first step: a source becomes one canonical ONNX model, a golden set of what the source computes, and proof that
the two agree.

The source is a PyTorch entry point, a `.pt2` program or an ONNX file. Expected outputs come from the source itself:
PyTorch run eagerly, or the ONNX file as it was given, on onnxruntime without optimisation. They are frozen on the
golden inputs and at every edge of the dims' buckets. The user's code (a `.pt2` can hold pickles, which are code too)
runs in a process of its own, which holds nothing of this one (`sources.user_process`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from builders.reference import ReferenceSession
from enginery.core.digest import digest_of_file
from enginery.core.errors import ModelError
from enginery.core.reports.proof import Check, Spread
from enginery.core.types import Dim, Session, Tensors, TensorSpec
from enginery.user_code.task import Answered, Asked, Captured, Task, TorchProgram
from pipeline.sources.onnx_model import canonical, check_weights, load_onnx, save_onnx
from pipeline.sources.request import ExportRequest
from pipeline.sources.user_process import UserProcess, start_user_process
from validation.comparison.sessions import expected_checks
from validation.data.samples import Samples, resize, sizes_of
from validation.golden.golden_set import Case, GoldenSet, freeze
from validation.limits.budget import budgets
from validation.limits.noise_floor import Noise, noise_floor
from validation.metrics.tally import Spreads


class TorchModel:
    """A captured program. outputs: their own names, in order.  notes: for people."""

    def __init__(self, process: UserProcess, captured: Captured, workdir: Path) -> None:
        self._process, self._workdir = process, workdir
        self.outputs, self.notes = captured.outputs, captured.notes

    def run(self, inputs: Tensors) -> Tensors:
        """The original's outputs, by their own names, in order. Raises ModelError when it fails on these inputs."""
        _, outputs = self._process.ask(Asked(), Answered, inputs)
        return outputs

    def to_onnx(self) -> onnx.ModelProto:
        """The program as ONNX, not yet canonical. Raises ModelError naming the operator that has no ONNX form."""
        path = self._workdir / "captured.onnx"
        self._process.ask(Asked(path), Answered)
        model = onnx.load(path)
        path.unlink()
        return model


@contextmanager
def open_torch_model(request: ExportRequest, workdir: Path) -> Iterator[TorchModel]:
    """Capture a source of kind 'torch' or 'pt2'; the program can be asked inside this context.

    Raises ModelError naming the user's file and line, and StepError when the user's code ends its process.
    """
    fields = {name: value for name, value in vars(request).items() if name != "outputs"}
    task = Task(TorchProgram(**fields))
    with start_user_process(task) as process:
        captured, _ = process.ask(task, Captured)
        yield TorchModel(process, captured, workdir)


RANDOM_GROUPS, RANDOM_SEED = 8, 0


@dataclass(frozen=True)
class ExportResult:
    """Files of an export, their digests, and the checks of the ONNX model against its source.

    notes: what a person should know, such as that golden inputs are random.  spreads: how the errors spread.
    """

    onnx: Path
    onnx_digest: str
    golden: Path
    golden_digest: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    spreads: tuple[Spread, ...] = ()


@dataclass(frozen=True)
class _Source:
    """A source as read: its ONNX form before tidying, the names its outputs get, and how to run the original."""

    model: Callable[[], "onnx.ModelProto"]
    outputs: tuple[str, ...]
    run: Callable[[Tensors], Tensors]
    notes: tuple[str, ...] = ()


def export(
    request: ExportRequest,
    samples: Samples | None,
    labels: "np.ndarray | None",
    workdir: Path,
    limits: Mapping[str, float | None] | None = None,
    known: Path | None = None,
) -> ExportResult:
    """Write `model.onnx` and `operations.golden.safetensors` under `workdir`, and compare the model with its source.

    known: the canonical model, when this source was exported before and only the golden set is new.
    samples: golden inputs; None takes seeded random ones.  labels: true answers of the samples, kept with them.
    limits: of the comparison, where the documented ones are not wanted. A check that fails is a value, not an error.
    Raises ModelError for a source that cannot be exported, and DataError for samples that cannot be read.
    """
    model_file, golden_file = workdir / "model.onnx", workdir / "golden.safetensors"
    spreads = Spreads()
    groups = samples or list(random_groups(request.inputs, request.dims))
    with write_model(request, model_file, workdir, known) as source:
        golden = freeze(groups, request.inputs, request.dims, source.run, labels)
    with ReferenceSession(model_file, name="the exported model") as session:
        golden = replace(golden, noise=_noise(request, model_file, session, golden))
        golden_digest = golden.save(golden_file)
        budget = budgets("export", "fp32", golden.noise).override(limits or {})
        checks = expected_checks("export", session, golden, budget, spreads)
    notes = [*source.notes, *([] if samples else [_random_note()]), *_noise_note(golden)]
    digest = digest_of_file(model_file)
    return ExportResult(model_file, digest, golden_file, golden_digest, checks, tuple(notes), spreads.at("export"))


@contextmanager
def write_model(request: ExportRequest, path: Path, workdir: Path, known: Path | None = None) -> Iterator[_Source]:
    """Write the canonical ONNX model of a source to `path`, or move `known` there; the source is open meanwhile.

    Raises ModelError for a source that cannot be exported.
    """
    with _source(request, workdir) as source:
        if known is None:
            model = source.model()
            check_weights(model)
            save_onnx(canonical(model, request.inputs, source.outputs), path)
        else:
            known.rename(path)
        yield source


def _noise(request: ExportRequest, model: Path, single: Session, golden: GoldenSet) -> Noise:
    """What float32 alone does to the model's outputs, on single samples: a batch repeats what they show."""
    from validation.limits.noise_floor import DoubleSession

    try:
        exact = DoubleSession(model)
    except ValueError as error:
        return Noise(reason=str(error))
    edges = _ends(golden.of_kind("edge"))
    cases = {"golden": _singles(request, golden.of_kind("golden")), "edge": _singles(request, edges)}
    return noise_floor(exact.run, single.run, cases)


def _ends(cases: Iterable[Case]) -> list[Case]:
    """The smallest and the greatest: between them lies what all sizes lose."""
    ordered = sorted(cases, key=lambda case: sum(array.size for array in case.inputs.values()))
    return [ordered[0], ordered[-1]] if ordered else []


def _singles(request: ExportRequest, cases: Iterable[Case]) -> Iterator[Tensors]:
    """The inputs of cases with the leading dim at its least, each combination of the other sizes once."""
    leading = {spec.shape[0] if spec.shape else None for spec in request.inputs}
    batch = next((dim for dim in request.dims if leading == {dim.name}), None)
    seen = set[tuple[tuple[str, int], ...]]()
    for case in cases:
        sizes = sizes_of(case.inputs, request.inputs) | ({batch.name: batch.min} if batch else {})
        key = tuple(sorted(sizes.items()))
        if key not in seen or case.kind == "golden":
            seen.add(key)
            yield resize(case.inputs, request.inputs, sizes)


def _noise_note(golden: GoldenSet) -> list[str]:
    reason = golden.noise.reason if golden.noise else ""
    return [f"the noise floor of float32 is not known ({reason}): the documented limits count"] if reason else []


@contextmanager
def _source(request: ExportRequest, workdir: Path) -> Iterator[_Source]:
    if request.kind == "onnx":
        with _onnx_source(request, workdir) as source:
            yield source
        return

    with open_torch_model(request, workdir) as model:
        yield _torch_source(model, request)


def _torch_source(model: "TorchModel", request: ExportRequest) -> _Source:
    names = request.outputs or model.outputs
    if len(names) != len(model.outputs):
        raise ModelError(
            f"the model returns {len(model.outputs)} tensors, the spec names {len(names)} outputs "
            f"({', '.join(names)}); name each of them, in order"
        )

    def run(inputs: Tensors) -> Tensors:
        return dict(zip(names, model.run(inputs).values(), strict=True))

    return _Source(model.to_onnx, names, run, model.notes)


@contextmanager
def _onnx_source(request: ExportRequest, workdir: Path) -> Iterator[_Source]:
    model = load_onnx(request.root / request.file, request.root)
    names = _choose_outputs(model, request.outputs)
    given = workdir / "source.onnx"
    save_onnx(model, given)
    with ReferenceSession(given, name=str(request.root / request.file)) as session:
        yield _Source(lambda: model, names, session.run)
    given.unlink()


def _choose_outputs(model: "onnx.ModelProto", names: Sequence[str] | None) -> tuple[str, ...]:
    """Keep the named outputs of the model, in that order, and drop the others."""
    own = {value.name: value for value in model.graph.output}
    for name in names or ():
        if name not in own:
            raise ModelError(f"output {name!r} is not in the model; its outputs are {', '.join(own)}")
    chosen = [own[name] for name in names or own]
    del model.graph.output[:]
    model.graph.output.extend(chosen)
    return tuple(value.name for value in chosen)


def random_groups(specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[dict[str, "np.ndarray"]]:
    """Seeded stand-ins for golden data, at the dims' opt: standard normal floats, integers 0 or 1, booleans."""
    generator = np.random.default_rng(RANDOM_SEED)
    sizes = {dim.name: dim.opt for dim in dims}
    for _ in range(RANDOM_GROUPS):
        yield {spec.name: _random(generator, spec, sizes) for spec in specs}


def _random(generator: np.random.Generator, spec: TensorSpec, sizes: Mapping[str, int]) -> "np.ndarray":
    kind = np.dtype(spec.dtype).kind
    drawn = generator.standard_normal(spec.at(sizes)) if kind == "f" else generator.integers(0, 2, spec.at(sizes))
    return drawn.astype(spec.dtype)


def _random_note() -> str:
    return (
        f"no golden data: {RANDOM_GROUPS} groups of random inputs stand in (seed {RANDOM_SEED}; "
        "floats standard normal, integers 0 or 1); add golden.data, real inputs show more"
    )
