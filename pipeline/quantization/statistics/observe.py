"""Opens the calibration data that a spec names: stored samples, or a generator in the spec's own folder.

One streaming pass over the samples: extremes and histograms of the tensors that quantization needs.

One sample at a time goes through the model (as few as the model takes, when it has a least batch), so that neither
memory nor result depends on a batch size, and a bad sample can be named. Extremes are reduced inside the session, where
they cost least; values leave it only for histograms, and are counted and dropped before the next sample. Memory is that
of one inference and half a megabyte of counts per histogram, whatever the number of samples.

The result of some of the samples is a value that merges with that of others: workers split the data, and an interrupted
pass goes on from its checkpoint.

Observe and choose in one call, for scripts: the pipeline keeps the two apart, so that it observes only once.
"""

import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from enginery.arrays import describe_nonfinite
from enginery.core.digest import digest_of_file
from enginery.core.errors import DataError
from enginery.core.types import Dim, Tensors, TensorSpec
from enginery.user_code.task import NextSample, Sample, SampleGenerator, Task
from pipeline.quantization.insertion_points import prepare_model, tensors_to_measure
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.statistics.histogram import LogHistogram, count_into, holds_nan
from pipeline.quantization.statistics.methods import Activation, Method, MinMax, ranges
from pipeline.quantization.statistics.observations import Observations, TensorStatistics
from pipeline.quantization.statistics.taps import TapValues, open_tapped
from pipeline.sources.onnx_model import nonfinite_constants
from pipeline.sources.user_process import UserProcess, start_user_process
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

    digest: what the samples are known by, where they come from code.  labels: an array of stored data that no input
    takes. Raises DataError for stored data that does not
    fit the inputs, ModelError for an entry point that is missing or cannot be imported.
    """
    file, _, function = data.partition(":")
    if not function:
        yield Samples.open(root / file, inputs, dims, (labels,) if labels else ())
        return
    task = Task(SampleGenerator(root, file, function, data))
    with start_user_process(task) as process:
        process.ask(task, Sample)
        numbers = count()
        yield GeneratedSamples(lambda: _pass(process, next(numbers)), data, digest, tuple(inputs), tuple(dims))


def _pass(process: UserProcess, number: int) -> Iterator[Tensors]:
    while True:
        sample, arrays = process.ask(NextSample(number), Sample)
        if sample.is_end:
            return
        yield arrays


def observe(
    model: Path,
    samples: SampleSource,
    tensors: Sequence[str] | None = None,
    *,
    histograms: bool | Collection[str] = True,
    threads: int = 0,
    span: tuple[int, int | None] = (0, None),
) -> Observations:
    """Observe `tensors` over the samples; by default those that int8 needs, in any backend's scheme.

    histograms: which of them get one: all, none, or those named.  threads: of the runtime, 0 for all cores.
    span: the samples [start, stop) to see; other workers see the others (`Observations.merge`).

    A tensor beyond those that int8 needs may be infinite by design, as a mask of -inf is. Raises DataError, naming
    tensor and sample, for NaN anywhere and for infinity where int8 computes; ModelError for a model that does not run
    or lacks a named tensor.
    """
    loaded = onnx.load(model)
    constants = [f"{name!r} holds {describe_nonfinite(array)}" for name, array in nonfinite_constants(loaded)]
    graph = prepare_model(loaded)
    del loaded
    needed = tensors_to_measure(graph)
    wanted = needed if tensors is None else tuple(dict.fromkeys(tensors))
    whole = frozenset(wanted if histograms is True else histograms or ()) & set(wanted)
    empty = {
        name: TensorStatistics(histogram=LogHistogram.of(np.empty(0)) if name in whole else None) for name in wanted
    }
    fresh = Observations(digest_of_file(model), samples.digest, ((span[0], span[0]),), empty)
    tally = _Tally(fresh, frozenset(needed), samples.name, constants)
    with tempfile.TemporaryDirectory() as folder:
        tapped = open_tapped(graph, wanted, whole, Path(folder), threads) if wanted else None
        del graph
        for stop, inputs in samples.runs(tally.stop, span[1]):
            tally.add(tapped.run(inputs) if tapped else (), stop)
    return tally.observations()


class _Tally:
    """Observations on their way: scalars, and the counts of every bin."""

    def __init__(self, before: Observations, needed: frozenset[str], where: str, constants: Sequence[str] = ()) -> None:
        self._before, self._needed, self._where = before, needed, where
        # They may be masks, or what spoils the tensor.
        self._told = f"; look at the model's constants first: {', '.join(constants)}" if constants else ""
        self._seen = dict(before.tensors)
        self._counts = {name: item.histogram.dense() for name, item in self._seen.items() if item.histogram}
        self.start, self.stop = before.spans[0]

    def add(self, run: Iterable[TapValues], stop: int) -> None:
        """Take one run in; it was made of the samples up to `stop`."""
        for measured in run:
            counts = self._counts.get(measured.name)
            if counts is not None and measured.values is not None:
                count_into(counts, measured.values)
            if reason := _obstacle(measured, counts, measured.name in self._needed):
                raise DataError(f"{self._samples(stop)} {reason}{self._told}")
            self._seen[measured.name] = self._seen[measured.name].extend_with(
                measured.low, measured.high, measured.elements
            )
        self.stop = stop

    def observations(self) -> Observations:
        """What was seen so far."""
        found = {name: LogHistogram.from_dense(counts) for name, counts in self._counts.items()}
        tensors = {name: replace(seen, histogram=found.get(name)) for name, seen in self._seen.items()}
        return replace(self._before, spans=((self.start, self.stop),), tensors=tensors)

    def _samples(self, stop: int) -> str:
        last = stop - 1
        return (
            f"{self._where}: sample {last} makes"
            if last == self.stop
            else f"{self._where}: samples {self.stop} to {last} make"
        )


def _obstacle(measured: TapValues, counts: NDArray[np.int64] | None, needed: bool) -> str | None:
    """Why a run cannot be used, or None. Only NaN counts in the sum, since sums of large values overflow."""
    nan = math.isnan(measured.total) if measured.total is not None else counts is not None and holds_nan(counts)
    infinite = needed and measured.elements > 0 and math.inf in (-measured.low, measured.high)
    if not nan and not infinite:
        return None
    return (
        f"tensor {measured.name!r} {'NaN' if nan else 'infinite'} (lowest {measured.low}, highest {measured.high}); "
        "remove those samples, or find the operator that overflows"
    )


def calibrate(
    model: Path,
    samples: SampleSource,
    tensors: Sequence[str] | None = None,
    *,
    method: Method | None = None,
    activation: Activation = "int8",
    threads: int = 0,
) -> Ranges:
    """Ranges of `tensors` over all samples; by default MinMax, and those tensors that int8 needs in any scheme.

    Raises what `observe` raises.
    """
    chosen = method or MinMax()
    seen = observe(model, samples, tensors, histograms=chosen.needs_histogram, threads=threads)
    return ranges(seen, chosen, activation)
