"""Inspects a PyTorch model in a separate process: a `.pt2` program, or an entry point whose module is run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from enginesmith.arrays import check_inputs
from enginesmith.core.errors import DataError, InputError, ModelError
from enginesmith.core.types import Dim, Tensors, TensorSpec
from enginesmith.user_code.channel import ArraysOnly
from enginesmith.user_code.describing import EXAMPLES, SeenModel
from enginesmith.user_code.task import LookAtModel, RanOnce, Task
from pipeline.drafts.facts import LARGEST_BATCH, LARGEST_SIZE, FoundDim, FoundModel, model_name, name_axes
from pipeline.drafts.probing import Run, find_dims
from pipeline.drafts.requests import Reading, RequestInput, list_readings, observe_requests, read_samples
from pipeline.sources.onnx_header import format_shape
from pipeline.sources.user_process import start_user_process
from pipeline.spec.source import FILL_IN, Source
from pipeline.spec.source import LARGEST_SIZE as MOST
from validation.data.samples import find_wrong_names

# Names of files and functions that do not describe the model.
_COMMON = frozenset({"model", "models", "net", "network", "main", "__init__", "build", "make", "create", "get_model"})


def look_at_pt2(folder: Path, file: str) -> FoundModel:
    """Facts from a program saved by `torch.export.save`. Sizes that its ranges leave open are guesses.

    folder: the spec's. Raises ModelError for a file that cannot be loaded, StepError if loading ends the process.
    """
    task = Task(LookAtModel("pt2", folder.resolve(), file))
    with start_user_process(task) as process:
        program_facts, _ = process.ask(task, SeenModel)
    inputs, dims_by_name = name_axes(_tensors(program_facts)), dict[str, FoundDim]()
    for program_spec, spec in zip(_tensors(program_facts), inputs, strict=True):
        for program_dim, spec_dim in zip(program_spec.shape, spec.shape, strict=True):
            if isinstance(spec_dim, str):
                dims_by_name.setdefault(spec_dim, _dim(spec_dim, program_facts, str(program_dim)))
    model_facts = _found(program_facts, Path(file).stem, {"pt2": file})
    return replace(model_facts, inputs=inputs, dims=dims_by_name)


def look_at_module(folder: Path, entry: str, requests: Path | None = None) -> FoundModel:
    """Facts from the module of an entry point, and sizes at which it runs.

    folder: the spec's.  entry: as in a spec.  requests: saved requests; if the module runs with them, they determine
    the inputs. Raises InputError for an entry that is malformed or whose file is missing,
    ModelError for code that fails, StepError for code that ends its process.
    """
    try:
        source = Source(torch=entry)
    except ValidationError as error:
        raise InputError(f"{entry!r} {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    file = source.file_in(folder)
    if not (folder / file).is_file():
        raise InputError(f"{entry}: {file} does not exist in {folder.resolve()}, the folder of the spec; use --out")
    request_inputs = observe_requests(requests) if requests else {}
    task = Task(LookAtModel("torch", folder.resolve(), file, source.function, source.module, tuple(request_inputs)))
    with start_user_process(task) as process:
        module_facts, _ = process.ask(task, SeenModel)
        outputs = list[tuple[str, ...]]()

        def run(inputs: Tensors) -> None:
            answer, _ = process.ask(ArraysOnly(), RanOnce, inputs)
            outputs[:] = [answer.outputs]

        model_facts = _found(module_facts, _name(source, folder, file), {"torch": entry})
        notes = (
            *model_facts.notes,
            "weights: `source: {..., weights: weights.pt}` loads them; here they are what build() gives",
        )
        model_facts = replace(model_facts, inputs=name_axes(_tensors(module_facts)), notes=notes)
        reading, sizes, refusal = (
            _read_requests(module_facts, request_inputs, requests, run) if requests else (None, {}, "")
        )
        if reading:
            model_facts = _as_requested(model_facts, reading)
        elif refusal:
            model_facts = replace(model_facts, refused=refusal, notes=(*model_facts.notes, refusal))
        if not model_facts.unknown:
            model_facts = _try_out(model_facts, run, sizes, reading.ranges if reading else {})
    return replace(model_facts, outputs=outputs[0] if outputs else ())


def _read_requests(
    facts: SeenModel, request_inputs: Mapping[str, RequestInput], requests: Path, run: Run
) -> tuple[Reading | None, dict[str, int], str]:
    """The reading of the requests with which the module runs the first one, and that request's sizes; else None, and
    why the likeliest reading fails."""
    refusal = ""
    guesses = [TensorSpec(tensor.name, tensor.dtype, tensor.shape or ()) for tensor in facts.inputs]
    for reading in list_readings(guesses, request_inputs, any(tensor.any_rank for tensor in facts.inputs)):
        named_reading = replace(reading, inputs=name_axes(reading.inputs))
        dims = [Dim(name, 1, 1, MOST) for name in named_reading.ranges]
        try:
            request = next(read_samples(requests, named_reading.inputs, dims, "bytes"))
            run(request)
        except (DataError, ModelError) as error:
            is_model = isinstance(error, ModelError)
            refusal = refusal or (f"the model does not run with the first request: {error}" if is_model else str(error))
            continue
        except StopIteration:
            continue
        return named_reading, check_inputs(named_reading.inputs, request), ""
    wrong_names = (
        find_wrong_names(request_inputs, [spec.name for spec in guesses], requests) if request_inputs else iter(())
    )
    return None, {}, refusal or next(wrong_names, "")


def _as_requested(facts: FoundModel, reading: Reading) -> FoundModel:
    input_notes = [
        f"input {spec.name}: {spec.dtype} {format_shape(spec.shape)}, as in the requests" for spec in reading.inputs
    ]
    prefixes = {f"input {spec.name}:" for spec in reading.inputs}
    other_notes = [note for note in facts.notes if not any(map(note.startswith, prefixes)) and FILL_IN not in note]
    return replace(facts, inputs=reading.inputs, unknown={}, notes=(*input_notes, *other_notes))


def _try_out(
    facts: FoundModel, run: Run, known_sizes: Mapping[str, int], size_ranges: Mapping[str, tuple[int, int]]
) -> FoundModel:
    """The model with the sizes at which it ran. A dim with a single size becomes fixed: torch.export requires ranges.

    known_sizes: at which it runs.  size_ranges: the least and greatest size of each dim in the requests, used if no
    other range was found.
    """
    trial_model = find_dims(facts, lambda: run, known_sizes)
    wide_ranges = {name: pair for name, pair in size_ranges.items() if name in trial_model.dims and pair[0] < pair[1]}
    wide_dims = {
        name: FoundDim(low, dim.opt, high, f"requests have {low} to {high}")
        for name, (low, high) in wide_ranges.items()
        if (dim := trial_model.dims[name]).min == dim.max
    }
    trial_model = replace(trial_model, dims={**trial_model.dims, **wide_dims})
    fixed_dims = {name: dim for name, dim in trial_model.dims.items() if dim.min == dim.max}
    inputs = tuple(
        replace(spec, shape=tuple(fixed_dims[dim].opt if dim in fixed_dims else dim for dim in spec.shape))
        for spec in trial_model.inputs
    )
    notes = [f"{name}: fixed at {dim.opt}: {dim.why}" for name, dim in fixed_dims.items()]
    if guess := next((dim.why for dim in trial_model.dims.values() if dim.why.startswith("a guess")), None):
        notes.append(f"the model did not run: check the inputs. {guess}")
    dims = {name: dim for name, dim in trial_model.dims.items() if name not in fixed_dims}
    return replace(trial_model, inputs=inputs, dims=dims, notes=(*trial_model.notes, *notes))


def _found(facts: SeenModel, name: str, source: dict[str, str]) -> FoundModel:
    unknown_inputs = {tensor.name: tensor.why for tensor in facts.inputs if tensor.shape is None}
    notes = [f"input {tensor.name}: from {tensor.why}" for tensor in facts.inputs if tensor.shape is not None]
    notes += facts.notes
    if unknown_inputs:
        notes.append(
            f"{FILL_IN}: a function {EXAMPLES[0]}() beside the entry point would say it: a dict of tensors by name"
        )
    is_half = any(tensor.dtype == "float16" for tensor in facts.inputs)
    precision_pair = ("fp32", "the model as it is"), ("fp16", "half the size; for GPUs")
    precisions = precision_pair if facts.is_heavy and not is_half else precision_pair[:1]
    return FoundModel(
        model_name(name), source, (), facts.outputs, precisions=precisions, notes=tuple(notes), unknown=unknown_inputs
    )


def _tensors(facts: SeenModel) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(tensor.name, tensor.dtype or "float32", (FILL_IN,) if tensor.shape is None else tensor.shape)
        for tensor in facts.inputs
    )


def _dim(name: str, facts: SeenModel, program_dim: str) -> FoundDim:
    low, high = facts.ranges.get(program_dim, (1, None))
    low = max(low, 1)  # a range may begin at 0, which no engine is built for
    if high is not None:
        return FoundDim(low, min(low, high) if name == "batch" else high, high, "the program's range")
    max_size = max(low, LARGEST_BATCH if name == "batch" else LARGEST_SIZE)
    return FoundDim(
        low, low if name == "batch" else max_size, max_size, f"{max_size} is a guess: the program has no end"
    )


def _name(source: Source, folder: Path, file: str) -> str:
    segments = [source.function, *reversed(Path(file).with_suffix("").parts), folder.resolve().name]
    return next((segment for segment in segments if segment.lower() not in _COMMON), "model")
