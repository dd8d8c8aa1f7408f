"""Opens the calibration data that a spec names: stored samples, or a generator in the spec's own folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from enginery.core.types import Dim, Tensors, TensorSpec
from enginery.user_code.samples import NextSample, Sample, SampleGenerator
from enginery.user_code.task import Task
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
