"""Observe and choose in one call, for scripts: the pipeline keeps the two apart, so that it observes only once."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.quantization.ranges import Ranges
from pipeline.quantization.statistics.methods import Activation, Method, MinMax, ranges
from pipeline.quantization.statistics.observe import observe
from validation.data.samples import SampleSource


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
