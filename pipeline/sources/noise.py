"""Measures the noise floor of an exported model in a separate process with limited time and memory.

The evaluator in float64 runs some operators element by element in Python (a tree ensemble took 527 s and 6.9 GB).
Limits follow from the measured noise; without it the documented limits apply, so no export fails because of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from builders.execution.jobs import Job, ProcessLimits, WorkerContext
from builders.execution.process import Start, run_job, spawn
from builders.onnx_graphs.bodies import has_shards
from enginesmith.core.errors import StepError
from enginesmith.core.types import Dim, TensorSpec
from validation.data.batches import leading_dim
from validation.data.samples import resize, sizes_of
from validation.golden.free_running import FreeRunningSession
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet
from validation.limits.noise_floor import MOST_CASES, DoubleSession, Noise, noise_floor

# Limits of the process: seconds; MiB without weights; memory of the weights, as a multiple of the model's file (weights
# as read, in float64, and in float32 in the session).
MOST_S, BASE_MIB, WEIGHTS = 60.0, 1536, 8


@dataclass(frozen=True)
class MeasureNoise:
    """Compare a model in float64 with itself in float32. model: an ONNX file.  cases: a golden set's file."""

    model: Path
    cases: Path

    def run(self, context: WorkerContext) -> Noise:  # noqa: ARG002 - the protocol's
        """The noise floor; only the reason if the model cannot be run in float64."""
        from builders.reference import ReferenceSession, threads_for

        try:
            double_session = DoubleSession(self.model)
        except ValueError as error:
            return Noise(reason=_first_line(error))
        golden = GoldenSet.load(self.cases)
        threads = threads_for(self.model, bool(golden.sequences))
        with ReferenceSession(self.model, threads=threads, name="the exported model") as single_session:
            if golden.sequences:
                free_session = FreeRunningSession(single_session, golden.sequences)
                double_roll = partial(free_session.roller.roll, double_session.run)
                return noise_floor(
                    double_roll, free_session.run, {"golden": [case.inputs for case in golden.sequences.golden.cases]}
                )
            cases = {kind: [case.inputs for case in golden.of_kind(kind)] for kind in ("golden", "edge")}
            return noise_floor(double_session.run, single_session.run, cases)


def measure_noise(
    model: Path,
    golden: GoldenSet | GoldenSequences,
    inputs: Sequence[TensorSpec],
    dims: Sequence[Dim],
    workdir: Path,
    start: Start = spawn,
) -> Noise:
    """The noise floor of a model's outputs on batches of the least size, because larger batches repeat them. Of the
    edge cases, the smallest and the largest are measured; they bound the loss at all sizes. If `MOST_S` or the memory
    does not suffice, the result has the reason. start: starts the process.
    """
    if has_shards(model):
        return Noise(reason="its weights lie in shards, and are not all held in float64")
    if isinstance(golden, GoldenSequences):
        noise_cases = GoldenSet((), sequences=golden)
    else:
        edges = sorted(golden.of_kind("edge"), key=lambda case: sum(array.size for array in case.inputs.values()))
        edge_cases = [edges[0], edges[-1]] if edges else []
        single_cases = [
            islice(_singles(cases, inputs, dims), MOST_CASES) for cases in (golden.of_kind("golden"), edge_cases)
        ]
        noise_cases = GoldenSet(tuple(chain(*single_cases)))
    limits = ProcessLimits(MOST_S, noise_memory_mib(model))
    with TemporaryDirectory(dir=workdir) as name:
        folder = Path(name).resolve()
        noise_cases.save(folder / "cases.safetensors")
        try:
            request = MeasureNoise(model.resolve(), folder / "cases.safetensors")
            return run_job(Job("the float64 run", request, limits=limits), folder, start=start)
        except StepError as error:
            return Noise(reason=_why_ended(error, limits))


def _why_ended(error: StepError, limits: ProcessLimits) -> str:
    """Why the process left no result, in words that do not depend on the run: they are part of the golden set."""
    if error.kind == "timeout":
        return f"the float64 run was ended after {limits.timeout_s:g} s"
    if error.kind in ("memory", "node-memory"):
        return f"the float64 run needs more than {limits.memory_mib} MiB of memory"
    return _first_line(error)


def noise_memory_mib(model: Path) -> int:
    """The memory limit of the float64 run in MiB: `BASE_MIB`, and `WEIGHTS` times the model's file."""
    return BASE_MIB + WEIGHTS * (model.stat().st_size >> 20)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _singles(cases: Iterable[Case], inputs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[Case]:
    """Cases with the leading dim at its min; of edges, each combination of the other sizes once."""
    batch_dim = next((dim for dim in dims if dim.name == leading_dim(inputs)), None)
    size_keys = set[tuple[tuple[str, int], ...]]()
    for case in cases:
        sizes = sizes_of(case.inputs, inputs) | ({batch_dim.name: batch_dim.min} if batch_dim else {})
        key = tuple(sorted(sizes.items()))
        if key not in size_keys or case.kind == "golden":
            size_keys.add(key)
            yield replace(case, inputs=resize(case.inputs, inputs, sizes), expected={})
