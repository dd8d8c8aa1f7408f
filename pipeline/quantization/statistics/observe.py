"""One streaming pass over calibration samples: extremes and histograms of the tensors that quantization needs.

One sample at a time goes through the model (as few as the model takes, when it has a least batch), so that neither
memory nor result depends on a batch size, and a bad sample can be named. Extremes are reduced inside the session, where
they cost least; values leave it only for histograms, and are counted and dropped before the next sample. Memory is that
of one inference and half a megabyte of counts per histogram, whatever the number of samples.

What some of the samples show merges with what others do: workers split the data, and an interrupted pass goes on from
the parts that are done.
"""

import itertools
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from enginery.arrays import describe
from enginery.core.digest import digest_of_file
from enginery.core.errors import DataError
from enginery.core.types import Dim, Tensors, TensorSpec
from enginery.user_code.task import NextSample, Sample, SampleGenerator, Task
from pipeline.quantization.insertion_points import prepare_model, tensors_to_measure
from pipeline.quantization.statistics.histogram import LogHistogram, count_into, empty_counts, holds_nan
from pipeline.quantization.statistics.observations import Observations, TensorStatistics
from pipeline.quantization.statistics.taps import TapValues, open_tapped
from pipeline.sources.onnx_model import nonfinite_constants
from pipeline.sources.user_process import start_user_process
from validation.data.generated import GeneratedSamples
from validation.data.samples import Samples, SampleSource


@contextmanager
def open_source(
    root: Path,
    data: str,
    digest: str,
    inputs: Sequence[TensorSpec],
    dims: Sequence[Dim],
    labels: str | None = None,
) -> Iterator[SampleSource]:
    """The samples of a file or folder below `root`, or of 'file.py:function', which is called inside this context.

    digest: of the samples, where they come from code.  labels: name of an array of stored data that no input takes.
    Raises DataError for stored data that does not fit the inputs, ModelError for an entry point that is missing or
    cannot be imported.
    """
    file, _, function = data.partition(":")
    if not function:
        yield Samples.open(root / file, inputs, dims, (labels,) if labels else ())
        return
    task = Task(SampleGenerator(root, file, function, data))
    with start_user_process(task) as process:
        process.ask(task, Sample)
        passes = itertools.count()

        def generate() -> Iterator[Tensors]:
            number = next(passes)
            while True:
                sample, arrays = process.ask(NextSample(number), Sample)
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
    """What `tensors` of a model file held over the samples; by default those that int8 needs, in any backend's scheme.

    histograms: which of them get one: all, none, or those named.  threads: of the runtime, 0 for all cores.
    span: the samples [start, stop) to see; other workers see the others (`Observations.merge`).

    A tensor that int8 does not need may be infinite by design, as a mask of -inf is. Raises DataError, naming tensor
    and sample, for NaN anywhere and for infinity where int8 computes; ModelError for a model that does not run or lacks
    a named tensor.
    """
    loaded = onnx.load(model)
    constants = [f"{name!r} holds {describe(array)}" for name, array in nonfinite_constants(loaded)]
    graph = prepare_model(loaded)
    del loaded
    needed = tensors_to_measure(graph)
    wanted = needed if tensors is None else tuple(dict.fromkeys(tensors))
    whole = frozenset(wanted if histograms is True else histograms or ()) & set(wanted)
    masks = f"; look at the model's constants first: {', '.join(constants)}" if constants else ""
    counts = {name: empty_counts() for name in whole}
    seen = dict.fromkeys(wanted, TensorStatistics())
    stop = span[0]
    with tempfile.TemporaryDirectory() as folder:
        tapped = open_tapped(graph, wanted, whole, Path(folder), threads) if wanted else None
        del graph
        for end, inputs in samples.runs(stop, span[1]):
            for measured in tapped.run(inputs) if tapped else ():
                name, dense = measured.name, counts.get(measured.name)
                if dense is not None and measured.values is not None:
                    count_into(dense, measured.values)
                if reason := _obstacle(measured, dense, name in needed):
                    which = f"sample {stop} makes" if end == stop + 1 else f"samples {stop} to {end - 1} make"
                    raise DataError(f"{samples.name}: {which} {reason}{masks}")
                seen[name] = seen[name].extend_with(measured.low, measured.high, measured.elements)
            stop = end
    found = {name: replace(seen[name], histogram=LogHistogram.from_dense(dense)) for name, dense in counts.items()}
    return Observations(digest_of_file(model), samples.digest, ((span[0], stop),), seen | found)


def _obstacle(measured: TapValues, counts: NDArray[np.int64] | None, needed: bool) -> str | None:
    """Why a run cannot be used, or None. counts: of all bins so far.  needed: whether int8 computes with the tensor.

    Where there is no histogram, the sum of magnitudes tells whether there is NaN, and only that: sums of large values
    overflow.
    """
    nan = math.isnan(measured.total) if measured.total is not None else counts is not None and holds_nan(counts)
    infinite = needed and measured.elements > 0 and math.inf in (-measured.low, measured.high)
    if not nan and not infinite:
        return None
    return (
        f"tensor {measured.name!r} {'NaN' if nan else 'infinite'} (lowest {measured.low}, highest {measured.high}); "
        "remove those samples, or find the operator that overflows"
    )
