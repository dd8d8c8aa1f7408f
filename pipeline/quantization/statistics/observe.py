"""One streaming pass over calibration samples: extremes and histograms of the tensors that quantization needs.

The model runs one sample at a time (or its least batch), so memory and result do not depend on a batch size, and a bad
sample can be named. The tensors are outputs of the session. They are measured and dropped before the next sample: their
extremes (which show NaN; onnxruntime's own reductions do not) and counts, block by block in a core's cache. Memory does
not depend on the number of samples: one inference, the measured tensors, and half a megabyte of counts per histogram.
Statistics of parts of the samples can be merged: workers split the data, and an interrupted pass continues after the
finished parts.

onnxruntime optimizes the model first. It computes convolutions in a layout of its own (NCHWc: channels in blocks of a
vector's width) and would copy every measured tensor back. Extremes and histograms do not depend on order, so the
blocked tensor is measured if its channels fill whole blocks, without padding. Weights are in a file beside the model,
which both sessions map: Python's memory never contains them twice, and models over 2 GB work.
"""

import itertools
import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from builders.onnx_graphs.bodies import list_reads, set_items
from builders.onnx_graphs.outline import link_shards
from builders.onnx_graphs.weights import has_external, load_graph
from builders.reference import embed_shapes, open_interpreter, words_of
from enginesmith.arrays import Array, describe_nonfinite
from enginesmith.core.errors import DataError, ModelError, digest_of_file
from enginesmith.core.types import Dim, Tensors, TensorSpec, Untyped
from enginesmith.user_code.task import NextSample, Sample, SampleGenerator, Task
from pipeline.quantization.graph import attribute_of, constants, element_types
from pipeline.quantization.insertion_points import prepare_model, tensors_to_measure
from pipeline.quantization.statistics.histogram import LogHistogram, count_into, empty_counts
from pipeline.quantization.statistics.observations import Observations, TensorStatistics
from pipeline.sources.onnx_model import nonfinite_constants
from pipeline.sources.user_process import start_user_process
from validation.data.generated import GeneratedSamples
from validation.data.samples import Samples, SampleSource

# Width of onnxruntime's widest blocks of channels; a multiple of this width fills narrower blocks too.
BLOCK = 16
EXTERNAL_FROM_BYTES = 1024
_SAVING = {
    "session.disable_prepacking": "1",  # the session that saves never runs
    "session.optimized_model_external_initializers_file_name": "optimized.weights",
    "session.optimized_model_external_initializers_min_size_in_bytes": str(EXTERNAL_FROM_BYTES),
}


@dataclass(frozen=True)
class Tapped:
    """An open session; None if only inputs of the model are measured. places: tensor -> the output of the session or
    the input that is measured for it; several tensors may share one, such as a result and its transpose."""

    session: Untyped
    places: Mapping[str, str]

    def run(self, inputs: Tensors) -> Iterator[tuple[str, Array]]:
        """The tensors in one run, their values in no particular order. Raises ModelError when the model does not run on
        these inputs."""
        session_outputs = self._run(inputs) if self.session else {}
        for name, output_name in self.places.items():
            yield name, session_outputs[output_name] if output_name in session_outputs else inputs[name]

    def _run(self, inputs: Tensors) -> dict[str, Array]:
        session_inputs = {value.name: inputs[value.name] for value in self.session.get_inputs() if value.name in inputs}
        names = [value.name for value in self.session.get_outputs()]
        try:
            return dict(zip(names, self.session.run(names, session_inputs), strict=True))
        except Exception as error:  # onnxruntime's errors share no base class of their own
            raise ModelError(f"the model does not run on its calibration samples: {words_of(error)}") from error


@contextmanager
def open_source(
    root: Path, data: str, digest: str, inputs: Sequence[TensorSpec], dims: Sequence[Dim], columns: Sequence[str] = ()
) -> Iterator[SampleSource]:
    """The samples of a file or folder below `root`, or of 'file.py:function', which is called inside this context.

    digest: of the samples, if they come from code.  columns: names of arrays of stored data that are not inputs.
    Raises DataError for stored data that does not fit the inputs, ModelError for an entry point that is missing or
    cannot be imported.
    """
    file, _, function = data.partition(":")
    if not function:
        yield Samples.open(root / file, inputs, dims, columns)
        return
    task = Task(SampleGenerator(root, file, function, data))
    with start_user_process(task) as process:
        process.ask(task, Sample)
        counter = itertools.count()

        def generate() -> Iterator[Tensors]:
            pass_number = next(counter)
            while True:
                sample, arrays = process.ask(NextSample(pass_number), Sample)
                if sample.is_end:
                    return
                yield arrays

        yield GeneratedSamples(generate, data, digest, tuple(inputs), tuple(dims))


def observe(
    model: Path,
    samples: SampleSource,
    tensors: Sequence[str] | None = None,
    *,
    histograms: bool | Collection[str] = True,
    threads: int = 0,
    span: tuple[int, int | None] = (0, None),
) -> Observations:
    """Statistics of `tensors` of a model file over the samples; None: of the tensors that int8 needs in any scheme.

    histograms: which tensors get one: all, none, or the named ones.  threads: of the runtime, 0 for all cores.
    span: the samples [start, stop) to run; other workers run the rest (`Observations.merge`).

    A tensor that int8 does not need may contain infinities or NaN by design, such as a mask of -inf or marks of missing
    values: it then counts as infinite. Raises DataError, with tensor and sample, for infinities or NaN in a tensor that
    int8 needs; ModelError for a model that does not run or lacks a named tensor."""
    loaded_model = load_graph(model)
    mask_texts = [f"{name!r} holds {describe_nonfinite(array)}" for name, array in nonfinite_constants(loaded_model)]
    remedy = f"; look at the model's constants first: {', '.join(mask_texts)}" if mask_texts else ""
    graph = prepare_model(loaded_model)
    del loaded_model
    needed_names = tensors_to_measure(graph)
    tensor_names = needed_names if tensors is None else tuple(dict.fromkeys(tensors))
    histogram_names = frozenset(tensor_names if histograms is True else histograms or ()) & set(tensor_names)
    counts = {name: empty_counts() for name in histogram_names}
    tensor_statistics = dict.fromkeys(tensor_names, TensorStatistics())
    stop = span[0]
    with tempfile.TemporaryDirectory() as folder:
        tapped_session = open_tapped(graph, tensor_names, Path(folder), threads) if tensor_names else None
        del graph
        for end, inputs in samples.runs(stop, span[1]):
            if reason := _count_run(
                tapped_session.run(inputs) if tapped_session else (), tensor_statistics, counts, needed_names
            ):
                sample_text = f"sample {stop} makes" if end == stop + 1 else f"samples {stop} to {end - 1} make"
                raise DataError(f"{samples.name}: {sample_text} {reason}{remedy}")
            stop = end
    full_statistics = {
        name: replace(tensor_statistics[name], histogram=LogHistogram.from_dense(dense_counts))
        for name, dense_counts in counts.items()
    }
    return Observations(digest_of_file(model), samples.digest, ((span[0], stop),), tensor_statistics | full_statistics)


def _count_run(
    run: Iterable[tuple[str, Array]],
    statistics: dict[str, TensorStatistics],
    counts: Mapping[str, NDArray[np.int64]],
    needed_names: Collection[str],
) -> str | None:
    """Add a run to the statistics and the counts, in place; return why the run cannot be used, or None."""
    for name, values in run:
        low, high = count_into(counts.get(name), values)
        is_nan, is_empty = math.isnan(low), low > high
        if name in needed_names and (is_nan or (not is_empty and math.inf in (-low, high))):
            return (
                f"tensor {name!r} {'NaN' if is_nan else 'infinite'} (lowest {low}, highest {high}); "
                "remove those samples, or find the operator that overflows"
            )
        extremes = (-math.inf, math.inf) if is_nan else (low, high)
        statistics[name] = statistics[name].extend_with(*extremes, values.size)
    return None


def open_tapped(model: ModelProto, tensors: Sequence[str], workdir: Path, threads: int = 0) -> Tapped:
    """Open a prepared model for measuring.

    The model's weights are moved to files in `workdir`, which the caller removes after use: the model is not usable
    afterwards.

    tensors: those to measure.  threads: of a run; 0 for the runtime's own number.
    Raises ModelError for a name that is no float32 activation, and for a model that does not load.
    """
    input_names = {value.name for value in model.graph.input}
    inner_names = [name for name in tensors if name not in input_names]
    optimized_model, new_names = _optimize(model, tensors, inner_names, workdir, threads)
    output_names = {name: new_names.get(name, name) for name in tensors}
    if not inner_names:
        return Tapped(None, output_names)
    _drop_unneeded(optimized_model, {*output_names.values()})
    tapped_names = dict.fromkeys(output_names[name] for name in inner_names)
    optimized_model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in tapped_names
    )
    onnx.save(optimized_model, workdir / "tapped.onnx")
    return Tapped(_open(workdir / "tapped.onnx", threads, {}, optimized=False), output_names)


def _open(model: Path, threads: int, entries: Mapping[str, str], *, optimized: bool, save: str = "") -> Untyped:
    session_entries = {"session.intra_op.allow_spinning": "0", **entries}
    return open_interpreter(
        model, "the model for calibration", optimized=optimized, threads=threads, entries=session_entries, save=save
    )


def _check_tensors(model: ModelProto, tensors: Sequence[str]) -> None:
    types, initializers = element_types(model), constants(model.graph)
    for name in tensors:
        if name not in types or name in initializers:
            raise ModelError(f"tensor {name!r} is not an activation of the model; measure names that the graph has")
        if types[name] != TensorProto.FLOAT:
            type_name = TensorProto.DataType.Name(types[name])
            raise ModelError(f"tensor {name!r} is {type_name}; only float32 activations have ranges")


def _optimize(
    model: ModelProto, tensors: Sequence[str], inner_names: Sequence[str], workdir: Path, threads: int
) -> tuple[ModelProto, dict[str, str]]:
    """The graph as onnxruntime runs it with outputs `inner_names`; for some outputs, the blocked tensor to measure."""
    graph, source_path = model.graph, workdir / "source.onnx"
    if has_external(model):
        link_shards(model, workdir)
    else:
        onnx.save(
            model,
            source_path,
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location="source.weights",
            size_threshold=EXTERNAL_FROM_BYTES,
        )
    embed_shapes(model, workdir)
    _check_tensors(model, tensors)  # only now: the weights are in files
    if not inner_names:
        return model, {}
    set_items(graph.output, [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inner_names])
    onnx.save(model, source_path)
    _open(source_path, threads, _SAVING, optimized=True, save=str(workdir / "optimized.onnx"))
    optimized_model = onnx.load(workdir / "optimized.onnx", load_external_data=False)
    embed_shapes(optimized_model, workdir)
    source_names = {}
    for node in optimized_model.graph.node:
        channels = attribute_of(node, "channels", 0) if node.op_type == "ReorderOutput" else 0
        if channels and channels % BLOCK == 0:  # a copy back to plain layout, of blocks that hold no padding
            source_names[node.output[0]] = node.input[0]
    return optimized_model, {name: source_names[name] for name in inner_names if name in source_names}


def _drop_unneeded(model: ModelProto, places: set[str]) -> None:
    """Remove parts that no measurement reads, in place: copies to plain layout, and inputs that only they read."""
    graph = model.graph
    del graph.output[:]
    operand_names = {name for node in graph.node for name in list_reads(node)} | places
    read_nodes = [node for node in graph.node if node.op_type != "ReorderOutput" or node.output[0] in operand_names]
    set_items(graph.node, read_nodes)
    operand_names = {name for node in graph.node for name in list_reads(node)} | places
    set_items(graph.input, [value for value in graph.input if value.name in operand_names])
