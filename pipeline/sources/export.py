"""Exports a source as a canonical ONNX model and a golden set of the source's outputs, and checks that both agree.

The source is a PyTorch entry point, a `.pt2` program or an ONNX file. Expected outputs come from the source itself:
PyTorch run eagerly, or the original ONNX file on onnxruntime without optimisation. They are computed for the golden
inputs and at every edge of the dims' buckets. The user's code (a `.pt2` can contain pickles, which are code, too) runs
in a separate process (`user_process`).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import onnx

from builders.execution.fork_server import fork_here
from builders.onnx_graphs.bodies import NO_LIBRARIES, Libraries, list_bodies, list_weight_files, set_items
from builders.onnx_graphs.outline import load_outline
from builders.onnx_graphs.structure import find_tables, select_needed
from builders.onnx_graphs.weights import load_graph, without_weights
from builders.reference import ReferenceSession, threads_for
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError
from enginesmith.core.reports.proof import Check, FreeRunning, Spread
from enginesmith.core.state import step_inputs
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.user_code.channel import ArraysOnly
from enginesmith.user_code.entry_point import weights_beside
from enginesmith.user_code.task import Asked, Captured, Task, TorchProgram
from pipeline.sources.canonical import canonical
from pipeline.sources.noise import measure_noise
from pipeline.sources.onnx_header import fix_inputs, wrong_outputs
from pipeline.sources.onnx_model import check_weights, load_onnx, name_libraries, read_libraries, save_onnx
from pipeline.sources.request import ExportRequest
from pipeline.sources.steps import StateModel, check_states
from pipeline.sources.user_process import start_user_process
from validation.comparison.sessions import expected_checks
from validation.comparison.tasks import free_running_checks, step_spreads
from validation.data.joined import Steps
from validation.data.samples import Samples
from validation.golden.free_running import RecordedSession
from validation.golden.golden_set import GoldenSequences, GoldenSet, freeze
from validation.limits.budget import budgets
from validation.metrics.tally import Along

# The number of groups of random inputs if no golden data is given, and their seed.
RANDOM_GROUPS, RANDOM_SEED = 8, 0
# The note on inputs for which the source itself returns NaN, which is no fault of the export.
_OWN_NAN = "the model itself answers NaN there: give golden.data whose first values it answers, or narrow the dims"
# Every onnxruntime from 1.30 on reads this IR version and older ones.
READ_IR_VERSION = 10
# The file to which a torch source is exported.
CAPTURED = "captured.onnx"
# Operators whose result sizes depend on values. Operators with bodies (If, Loop) may contain such operators.
_SIZED_BY_VALUES = frozenset(
    ("NonZero", "Compress", "Unique", "NonMaxSuppression", "ImageDecoder", "StringNormalizer", "StringSplit")
)
# Operator -> index of the first of its inputs that determine the size of the result.
_FIRST_SIZE_INPUT = {
    **dict.fromkeys(("Range", "ConstantOfShape", "MelWeightMatrix"), 0),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), 0),
    **dict.fromkeys(("Slice", "Reshape", "Expand", "Tile", "Pad", "TopK", "OneHot", "Upsample", "CenterCropPad"), 1),
    **dict.fromkeys(("Resize", "Squeeze", "Unsqueeze", "Split", "SplitToSequence", "SequenceAt", "SequenceErase"), 1),
    **dict.fromkeys(("STFT", "DFT", "AffineGrid", "Col2Im", "ReduceL1", "ReduceL2", "ReduceLogSum"), 1),
    **dict.fromkeys(("ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"), 1),
    "ReduceSumSquare": 1,
    "MaxUnpool": 2,
}
# For operators in other domains, the rule for the size is unknown: none of their results gets a fixed size.
_KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")


@dataclass(frozen=True)
class ExportResult:
    """The files of an export, and the checks of the ONNX model against its source.

    notes: for people, such as that golden inputs are random.  answers: a file of the ONNX model's outputs for the
    golden set; None if they are large (`RecordedSession.save`).  free_running: of a model with state, the drift along
    sequences.
    """

    onnx: Path
    golden: Path
    golden_digest: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    spreads: tuple[Spread, ...] = ()
    answers: Path | None = None
    free_running: tuple[FreeRunning, ...] = ()


@dataclass(frozen=True)
class _Source:
    """An open source. model: returns the ONNX model, not yet canonical.  outputs: names.  run: runs the original.

    notes: for people.  libraries: with the model's operators, beside the exported model.
    """

    model: Callable[[], onnx.ModelProto]
    outputs: tuple[str, ...]
    run: Callable[[Tensors], Tensors]
    notes: tuple[str, ...] = ()
    libraries: Libraries = NO_LIBRARIES


def export(
    request: ExportRequest,
    samples: Samples | None,
    labels: Array | None,
    workdir: Path,
    limits: Mapping[str, float | None] | None = None,
    known_model: Path | None = None,
    order: Array | None = None,
    steps: Steps | None = None,
) -> ExportResult:
    """Write `model.onnx` and `golden.safetensors` into `workdir`, and compare the model with its source.

    samples: golden inputs; None: seeded random ones.  labels: their true answers, for the golden set.
    limits: of a spec, in place of documented ones.  known_model: the canonical model, if this source was exported
    before and only the golden set is new.  order: of a model with state, the number of each sample's sequence; None:
    all are in one.  steps: the samples of each step; None: each sample is a step. A failed check is a value, not an
    error.

    request: the source, and the form of its model.
    Raises ModelError for a source that cannot be exported, and DataError for samples that cannot be read.
    """
    model_file, golden_file = workdir / "model.onnx", workdir / "golden.safetensors"
    state_axes = Along()
    groups: Samples | Sequence[Tensors] = samples or ()
    sequences: GoldenSequences | None = None
    with fork_here() as start_process:  # before a framework is imported, whose threads no fork would copy
        with write_model(request, model_file, workdir, known_model) as source:
            outline = load_outline(model_file)
            if request.states:
                check_states(request.states, outline)
            if not samples:
                tables = find_tables(outline.graph)
                groups = [*random_groups(step_inputs(request.inputs, request.states), request.dims, tables)]
            try:
                if request.states:
                    groups, sequences, labels = _with_states(request, source, groups, (order, steps), labels)
                golden = freeze(groups, request.inputs, request.dims, source.run, labels)
            except ModelError as error:
                if samples:
                    raise
                raise ModelError(
                    f"{error}; the inputs were random, with the sizes in dims: correct the dims, or add golden.data"
                ) from error
        noise = measure_noise(model_file, golden, request.inputs, request.dims, workdir, start_process)
        if sequences:
            rolled_noise = measure_noise(model_file, sequences, request.inputs, request.dims, workdir, start_process)
            sequences = replace(sequences, golden=replace(sequences.golden, noise=rolled_noise))
        golden = replace(golden, noise=noise, sequences=sequences)
    threads = threads_for(model_file, bool(sequences))
    with ReferenceSession(model_file, threads=threads, name="the exported model") as session:
        golden_digest = golden.save(golden_file)
        budget = budgets("export", "fp32", golden.noise).override(limits or {})
        recorder = RecordedSession(session, len(golden.cases))
        spreads = step_spreads(golden, state_axes)
        checks = tuple(_note_nan(expected_checks("export", recorder, golden, budget, spreads), golden))
        free_session = recorder.free_running(sequences) if sequences else None
        if sequences and free_session:
            roll_budget = budgets("export", "fp32", sequences.golden.noise).override(limits or {})
            checks += free_running_checks("export", None, free_session, sequences.golden, roll_budget, state_axes)
        answers = recorder.save(workdir / "answers.safetensors", free_session)
    notes = *source.notes, *_list_notes(golden, random=not samples)
    evidence = checks, notes, spreads.at("export"), answers, state_axes.at("export")
    return ExportResult(model_file, golden_file, golden_digest, *evidence)


def _note_nan(checks: Sequence[Check], golden: GoldenSet) -> Iterator[Check]:
    """The checks. A failed check of NaN gets a note if the source model itself gave NaN."""
    for check in checks:
        cases = [case for case in golden.cases if check.case in (case.name, case.kind)]
        is_failed = check.name == "nonfinite" and not check.passed
        is_own = is_failed and any(np.isnan(case.expected[check.output]).any() for case in cases)
        yield replace(check, note=f"{_OWN_NAN}; {check.note}") if is_own else check


def _list_notes(golden: GoldenSet, random: bool) -> Iterator[str]:
    """The notes for people on a golden set. random: whether its inputs are random."""
    if random:
        yield (
            f"no golden data: {RANDOM_GROUPS} groups of random inputs stand in (seed {RANDOM_SEED}; floats standard "
            "normal, integers and booleans 0 or 1, the first of a row 1); add golden.data, real inputs show more"
        )
    if golden.noise and (reason := golden.noise.reason):
        yield f"the noise floor of float32 is not known ({reason}): the documented limits apply"


def _with_states(
    request: ExportRequest,
    source: _Source,
    samples: Samples | Sequence[Tensors],
    order: tuple[Array | None, Steps | None],
    labels: Array | None,
) -> tuple[list[dict[str, Array]], GoldenSequences, Array | None]:
    """The golden inputs of a model with state, in groups; its sequences; the labels in the order of the groups.
    samples: or random groups.  order: `order` and `steps` of `export`."""
    state_model = StateModel(source.run, request.inputs, request.dims, request.states, order[1])
    if not isinstance(samples, Samples):
        groups = state_model.complete_random(samples)
        return groups, state_model.sequences(None, None, samples[: len(groups)]), labels
    return state_model.freeze(samples, order[0], labels)


@contextmanager
def write_model(
    request: ExportRequest, path: Path, workdir: Path, known_model: Path | None = None
) -> Iterator[_Source]:
    """Write the canonical ONNX model of a source to `path`, or move `known_model` there. The source is open in the
    context.

    Raises ModelError for a source that cannot be exported.
    """
    with (_onnx_source if request.kind == "onnx" else _torch_source)(request, workdir) as source:
        if known_model is None:
            model = source.model()
            check_weights(model)
            model = canonical(model, request.inputs, source.outputs)
            _name_axes(model, request, source.run)
            name_libraries(model, source.libraries)
            save_onnx(model, path)
        else:
            known_model.rename(path)
        yield source


def _name_axes(model: onnx.ModelProto, request: ExportRequest, run: Callable[[Tensors], Tensors]) -> None:
    """In place: name output axes that shape inference does not know, as behind a Resize. The source runs on random
    inputs. An axis is named by the dim whose size it has in every run; if its size is the same in every run, the axis
    gets that size. All dims are at min, one at a time at its next size (where rounded sizes differ), its opt and its
    max, and then all at max.

    An output whose size may depend on values (`_SIZED_BY_VALUES`) does not change. An output behind custom operators
    gets no fixed size. A dim with a failed run names no axis, and then no axis gets a fixed size.
    """
    open_axes = list(_find_open_axes(model.graph, {dim.name for dim in request.dims}))
    if not open_axes:
        return
    dims = [dim for dim in request.dims if not dim.static]
    tables, matches = find_tables(model.graph), [{dim.name for dim in dims} for _ in open_axes]
    seen_sizes = [set[tuple[int, ...]]() for _ in open_axes]
    trials = [{dim.name: size} for dim in dims for size in {dim.min, dim.sizes[1], dim.opt, dim.max}]
    for trial in [*trials, *([{dim.name: dim.max for dim in dims}] if len(dims) != 1 else [])]:
        sizes = {dim.name: dim.min for dim in request.dims} | trial
        trial_dims = [replace(dim, opt=sizes[dim.name]) for dim in request.dims]
        try:
            outputs = run(next(random_groups(request.inputs, trial_dims, tables)))
        except (ModelError, MemoryError):  # the golden set's edges report a MemoryError
            matches = [names - trial.keys() if trial in trials else names for names in matches]
            for axis_sizes in seen_sizes:
                axis_sizes.add(())
            continue
        for (name, axis, _), names, axis_sizes in zip(open_axes, matches, seen_sizes, strict=True):
            size = outputs[name].shape[axis : axis + 1]
            names &= {dim for dim in names if size == (sizes[dim],)}
            axis_sizes.add(size)
    for (output, _, dim), names, axis_sizes in zip(open_axes, matches, seen_sizes, strict=True):
        for name in names:  # one at most: each dim grew alone
            dim.dim_param = name
        is_known = all(node.domain in _KNOWN_DOMAINS for node in select_needed(model.graph.node, [output]))
        if is_known and len(axis_sizes) == 1 and (size := axis_sizes.pop()):
            dim.dim_value = size[0]


def _find_open_axes(
    graph: onnx.GraphProto, dim_names: Collection[str]
) -> Iterator[tuple[str, int, onnx.TensorShapeProto.Dimension]]:
    """(output, axis, dim) of each axis without a size and dims of the request, if no values determine its size."""
    for value in graph.output:
        axes = [
            (value.name, axis, size)
            for axis, size in enumerate(value.type.tensor_type.shape.dim)
            if not size.HasField("dim_value")
            and not all(name in dim_names for name in re.findall(r"[A-Za-z_]\w*", size.dim_param or "_"))
        ]
        if axes and not _is_sized_by_values(graph, value.name):
            yield from axes


def _is_sized_by_values(graph: onnx.GraphProto, name: str) -> bool:
    """Whether the size of a tensor of the graph may depend on values of the inputs, and not only on their sizes."""
    value_names = {value.name for value in graph.input}
    for node in select_needed(graph.node, [name]):
        size_inputs = node.input[_FIRST_SIZE_INPUT.get(node.op_type, len(node.input)) :]
        if node.op_type in _SIZED_BY_VALUES or list_bodies(node) or value_names.intersection(size_inputs):
            return True
        if node.op_type not in ("Shape", "Size") and value_names.intersection(node.input):
            value_names.update(node.output)
    return False


@contextmanager
def _torch_source(request: ExportRequest, workdir: Path) -> Iterator[_Source]:
    """A source of kind 'torch' or 'pt2', captured in a separate process.

    Raises ModelError with the user's file and line, and StepError if the user's code ends its process.
    """
    field_names = {field.name for field in fields(TorchProgram)}
    task = Task(TorchProgram(**{name: value for name, value in vars(request).items() if name in field_names}))
    with start_user_process(task) as process:
        program, _ = process.ask(task, Captured)
        names = request.outputs or program.outputs
        if len(names) != len(program.outputs):
            raise ModelError(
                f"the model returns {len(program.outputs)} tensors, the spec names {len(names)} outputs "
                f"({', '.join(names)}); name each of them, in order"
            )

        def convert() -> onnx.ModelProto:
            path = workdir / CAPTURED
            process.ask(Asked(path), ArraysOnly)
            model = load_graph(path)
            path.unlink()
            return model

        def run(inputs: Tensors) -> Tensors:
            _, outputs = process.ask(Asked(), ArraysOnly, inputs)
            return dict(zip(names, outputs.values(), strict=True))

        yield _Source(convert, names, run, program.notes)
    weights_beside(workdir / CAPTURED).unlink(missing_ok=True)


@contextmanager
def _onnx_source(request: ExportRequest, workdir: Path) -> Iterator[_Source]:
    has_libraries, path = bool(request.libraries), request.root / request.file
    model = load_onnx(path, request.root, request.most_embedded_bytes, custom=has_libraries)
    libraries = read_libraries(request.root, request.libraries, workdir)
    fix_inputs(model, request.arguments)
    names = choose_outputs(model, request.outputs)
    name_libraries(model, libraries)
    source_path = path
    if not _is_as_given(model, source_path):
        source_path = workdir / "source.onnx"
        save_onnx(model, source_path)
    threads = threads_for(source_path, True) if request.states else 0
    with ReferenceSession(source_path, threads=threads, name=str(path)) as session:
        yield _Source(lambda: model, names, session.run, libraries=libraries)
    (workdir / "source.onnx").unlink(missing_ok=True)


def _is_as_given(model: onnx.ModelProto, path: Path) -> bool:
    """Whether the file `path` equals the model that was read from it, and can be run in its place."""
    if list_weight_files(path):
        return False
    light_model = without_weights(load_outline(path, lists=True))
    if light_model.ir_version <= READ_IR_VERSION:
        light_model.ir_version = model.ir_version
    return bool(light_model == without_weights(model))


def choose_outputs(model: onnx.ModelProto, names: Sequence[str] | None) -> tuple[str, ...]:
    """In place: keep only the named outputs of the model, in that order; return their names. None keeps all.

    Raises ModelError for a name that the model does not have.
    """
    model_outputs = {value.name: value for value in model.graph.output}
    if wrong_output := next(wrong_outputs(model_outputs, names), None):
        raise ModelError(wrong_output[1])
    output_names = tuple(names or model_outputs)
    set_items(model.graph.output, [model_outputs[name] for name in output_names])
    return output_names


def random_groups(
    specs: Sequence[TensorSpec], dims: Sequence[Dim], tables: Mapping[str, int]
) -> Iterator[dict[str, Array]]:
    """Seeded random inputs at the dims' opt: standard normal floats, indices into the input's table, other integers
    and booleans 0 or 1.

    The first of the latter along the last axis is 1, so that a mask keeps a part of each row.
    tables: by input, the number of rows of the table that it indexes.
    """
    generator = np.random.default_rng(RANDOM_SEED)
    sizes = {dim.name: dim.opt for dim in dims}
    for _ in range(RANDOM_GROUPS):
        group = {}
        for spec in specs:
            shape, kind = spec.at(sizes), np.dtype(spec.dtype).kind
            row_count = min(tables.get(spec.name, 2), np.iinfo(spec.dtype).max) if kind in "iu" else 2
            random_values = generator.standard_normal(shape) if kind == "f" else generator.integers(0, row_count, shape)
            array = np.asarray(random_values, spec.dtype)  # for a shape without axes, numpy returns a number
            if array.ndim and kind in "iub" and spec.name not in tables:
                array[..., :1] = 1
            group[spec.name] = array
        yield group
