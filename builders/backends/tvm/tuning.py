"""Faster kernels for a CPU by search: TVM's MetaSchedule, for a limited time.

MetaSchedule (Shao et al., "Tensor Program Optimization with Probabilistic Programs", NeurIPS 2022, arXiv:2205.13603)
draws schedules of a kernel, compiles them, measures them on this machine and mutates the best. It takes kernels of
fixed sizes only. Measurements are given from build to build (`TimingCached`), and the search goes on from them.

Candidates are compiled in this process: TVM's own workers each parse the intrinsics of every GPU again for each round,
which takes 20 s of CPU time. They are used for measuring, where a kernel that hangs or crashes ends only its worker.

TVM keeps two files of JSON lines, one of kernels (`[hash, module]`) and one of measurements (`[number of the kernel,
[trace, seconds, target, arguments]]`), and appends to them. A timing cache is one JSON document of both without
repetitions, with at most `_BEST` schedules of a kernel.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from builders.backends.optional_methods import GIVEN, GROWN
from builders.execution.process import enter_phase
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import EnginesmithError, IntegrityError, canonical_json
from enginesmith.core.types import Untyped

# Schedules of a kernel that are measured in one round, and that are drawn for it (TVM's 512 are for long searches).
_ROUND = 8
_POPULATION = 64
_MOST = 100_000
# A candidate that runs longer is given up; the time of the first one includes the start of the measuring process.
_PATIENCE_S = 60.0
# So many rounds are tried after the time is over where no candidate was measured yet.
_LEAST_ROUNDS = 3
FILES = ("database_workload.json", "database_tuning_record.json")
_FORMAT = 1
_BEST = 16
# MetaSchedule's mark of a schedule that did not run, in seconds.
_NEVER = 1e9
# Of a kernel by its number: trace, seconds of each run, target, arguments.
Measured = tuple[int, tuple[object, tuple[float, ...], object, object]]


def schedule_kernels(
    module: Untyped, target: Untyped, workdir: Path, seconds: float
) -> tuple[Untyped, tuple[str, ...]]:
    """The module lowered, its kernels of fixed sizes with the best schedules known after `seconds`; and notes.

    module: Relax, as imported.  target: with num-cores.  The time is checked after every round of measurements; the
    start of the search (about half a minute of CPU time) is part of it.
    """
    from tvm import relax, transform
    from tvm.s_tir.analysis import estimate_tir_flops
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks

    end = time.monotonic() + seconds
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.get_pipeline("zero"),
    ]
    with target:
        lowered = transform.Sequential(passes)(module)
    tasks = extract_tasks(lowered, target, {})
    fixed = sorted(
        (task for task in tasks if _is_fixed(task)),
        key=lambda task: float(estimate_tir_flops(task.dispatched[0])) * float(task.weight),
        reverse=True,
    )
    if not fixed:
        return lowered, (f"not tuned: all {len(tasks)} kernels have open sizes; give the dims one size (min = max)",)
    database, how = _search_schedules(fixed, workdir, end)
    with target, database, transform.PassContext(opt_level=3):
        tuned = relax.transform.MetaScheduleApplyDatabase()(lowered)
    (workdir / GROWN).write_bytes(bundle(workdir / "tuning"))
    tuned_count = sum(database.query_schedule(task.dispatched[0], target, task.task_name) is not None for task in fixed)
    open_note = f"; {len(tasks) - len(fixed)} have open sizes" if len(tasks) > len(fixed) else ""
    return tuned, (f"{tuned_count} of {len(tasks)} kernels tuned {how}{open_note}",)


def _search_schedules(tasks: Sequence[Untyped], workdir: Path, end: float) -> tuple[Untyped, str]:
    """The database after the search, and words on how many measurements were made."""
    from tvm.s_tir import meta_schedule as ms

    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)  # a table of all kernels after each round
    folder = workdir / "tuning"
    folder.mkdir()
    database = _database(workdir / GIVEN, folder)
    enter_phase("compiling: preparing to tune")
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=_POPULATION, init_min_unmeasured=_POPULATION // 2, genetic_num_iters=2, genetic_max_fail_count=2
    )
    contexts, weights = ms.relax_integration.extracted_tasks_to_tune_contexts(
        list(tasks), str(folder), strategy=strategy, num_threads=os.cpu_count() or 1
    )
    clock = _clock(end, len(tasks))
    steps = [ms.measure_callback.AddToDatabase(), ms.measure_callback.RemoveBuildArtifact()]
    steps += [ms.measure_callback.UpdateCostModel(), clock]
    try:
        ms.tune.tune_tasks(
            tasks=contexts,
            task_weights=weights,
            work_dir=str(folder),
            max_trials_global=_MOST,
            max_trials_per_task=_MOST,
            num_trials_per_iter=_ROUND,
            builder=_make_builder(),
            runner=ms.runner.LocalRunner(timeout_sec=_PATIENCE_S),
            database=database,
            cost_model="random",
            measure_callbacks=steps,
        )
    except Exception as error:  # the clock's way to end it goes through C++, which changes its class
        if not clock.is_over():
            raise EnginesmithError(f"TVM failed while tuning: {str(error).strip().splitlines()[-1][:500]}") from error
    if clock.measured or not clock.said:
        return database, f"by {clock.measured} measurements here"
    return database, f"here; no candidate ran: {clock.said.strip().splitlines()[-1][:300]}"


def _database(given: Path, folder: Path) -> Untyped:
    """TVM's database in a folder, with what was measured before; an empty one where that cannot be read."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    files = [folder / name for name in FILES]
    if given.is_file():
        with suppress(Exception):  # whatever TVM says of the lines of a damaged one
            unbundle(given.read_bytes(), folder)
            return JSONDatabase(*map(str, files))
    for path in files:
        path.unlink(missing_ok=True)
    return JSONDatabase(*map(str, files))


def _clock(end: float, count: int) -> Untyped:
    """A measure callback that counts measurements, tells the phase, and ends the search when its time is up."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    begun = time.monotonic()

    @derived_object
    class BudgetClock(PyMeasureCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.measured = self._rounds = 0
            self.said = ""

        def apply(self, *told: Untyped) -> None:
            ran: Sequence[Untyped] = told[-1]
            self._rounds += 1
            self.measured += sum(result.run_secs is not None for result in ran)
            self.said = next((str(result.error_msg) for result in ran if result.error_msg), self.said)
            spent, whole = time.monotonic() - begun, end - begun
            enter_phase(f"compiling: tuning {count} kernels, {self.measured} measured, {spent:.0f} of {whole:.0f} s")
            if self.is_over():
                raise RuntimeError("the time for tuning is over")

        def is_over(self) -> bool:
            return time.monotonic() >= end and (self.measured > 0 or self._rounds >= _LEAST_ROUNDS)

    return BudgetClock()


def _make_builder() -> Untyped:
    """A builder for MetaSchedule that compiles candidates in this process, one after the other."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import PyBuilder

    @derived_object
    class Builder(PyBuilder):  # type: ignore[misc]
        def build(self, build_inputs: Sequence[Untyped]) -> list[Untyped]:
            return [_build_candidate(item) for item in build_inputs]

    return Builder()


def _build_candidate(item: Untyped) -> Untyped:
    """The `BuilderResult` of a candidate: its file, or the error."""
    from tvm import tirx
    from tvm.s_tir.meta_schedule.builder import BuilderResult
    from tvm.s_tir.meta_schedule.builder.local_builder import default_export
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    try:
        module = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(item.mod)
        return BuilderResult(default_export(tirx.build(module, target=item.target)), None)
    except Exception as error:  # a schedule that does not compile is one of many
        return BuilderResult(None, str(error))


def _is_fixed(task: Untyped) -> bool:
    """Whether a kernel's sizes are all numbers."""
    from tvm.tirx import IntImm

    function = task.dispatched[0]["main"]
    sizes = [size for parameter in function.params for size in getattr(parameter.ty, "shape", ())]
    return all(isinstance(size, int | IntImm) for size in sizes)


@dataclass(frozen=True)
class TuningRecords:
    """kernels: [hash, module] of each.  measured: by the place of its kernel in `kernels`."""

    kernels: tuple[list[object], ...]
    measured: tuple[Measured, ...]
    format: int = _FORMAT


def bundle(folder: Path) -> bytes:
    """The two files of a folder as one document. Raises IntegrityError for other content."""
    kernels, measured = (_lines(folder / name) for name in FILES)
    return _shorten(decode({"kernels": kernels, "measured": measured}, TuningRecords))


def unbundle(data: bytes, folder: Path) -> None:
    """Write a document as the two files of `folder`. Raises EnginesmithError when `data` is no such document."""
    tuning_records = _parse(data)
    for name, items in zip(FILES, (tuning_records.kernels, tuning_records.measured), strict=True):
        (folder / name).write_text("".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items))


def merge(older: bytes, newer: bytes) -> bytes:
    """One document with the content of both. Raises EnginesmithError when one of them is no such document."""
    first, second = _parse(older), _parse(newer)
    moved = ((len(first.kernels) + at, rest) for at, rest in second.measured)
    return _shorten(TuningRecords((*first.kernels, *second.kernels), (*first.measured, *moved)))


def _shorten(found: TuningRecords) -> bytes:
    """The document, each kernel and measurement once, and of each kernel the quickest measurements."""
    numbers: dict[bytes, int] = {}
    kernels: list[list[object]] = []
    new: list[int] = []
    for kernel in found.kernels:
        text = canonical_json(kernel)
        if text not in numbers:
            numbers[text] = len(kernels)
            kernels.append(kernel)
        new.append(numbers[text])
    ran = {canonical_json(item): item for at, rest in found.measured if _seconds(item := (new[at], rest)) < _NEVER}
    best = sorted(ran.values(), key=lambda item: (item[0], _seconds(item), canonical_json(item[1])))
    best_records = [item for _, same in groupby(best, key=lambda item: item[0]) for item in islice(same, _BEST)]
    return canonical_json(encode(TuningRecords(tuple(kernels), tuple(best_records))))


def _seconds(item: Measured) -> float:
    runs = item[1][1]
    return sum(runs) / len(runs) if runs else _NEVER


def _lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _parse(data: bytes) -> TuningRecords:
    try:
        records = decode(json.loads(data), TuningRecords)
    except (ValueError, RecursionError, IntegrityError) as error:
        raise EnginesmithError(f"no records of TVM's tuning: {error}") from error
    fine = all(0 <= at < len(records.kernels) and all(run >= 0.0 for run in rest[1]) for at, rest in records.measured)
    if records.format != _FORMAT or not fine:
        raise EnginesmithError("no records of TVM's tuning; they are begun anew")
    return records
