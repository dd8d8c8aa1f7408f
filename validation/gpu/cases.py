"""The cases of the GPU kit, and their trials."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginesmith.arrays import Array, stored_arrays
from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import (
    DataError,
    EnginesmithError,
    IntegrityError,
    UnavailableError,
    canonical_json,
    digest_of_file,
    is_digest,
)
from enginesmith.core.golden import golden_prefix
from enginesmith.core.reports.proof import PackedArray, describe
from enginesmith.core.state import State
from enginesmith.core.text import pluralize
from enginesmith.core.types import BuildRequest, Engine, Scalar, Session, Target, Tensors
from enginesmith.ensembles import Ensemble, EnsembleGraph, call_rows
from validation.comparison.sessions import expected_checks, narrow, run
from validation.golden.golden_set import SEQUENCES, Case, CaseName, GoldenSequences, GoldenSet, name_cases, name_tensors
from validation.gpu.devices import BundledEnsemble, RecordingSession, record_answers
from validation.gpu.peers import Peer, TorchSession, make_peer
from validation.gpu.results import (
    BatchLatency,
    DeviceLatency,
    Outcome,
    Peaks,
    PeerComparison,
    TrialOutcome,
    measure_peaks,
)
from validation.latency.machine import SystemLoadMonitor
from validation.latency.measurement.loop import latencies, warm_up
from validation.latency.measurement.paired import compare_times, run_interleaved
from validation.latency.measurement.quantiles import quantiles
from validation.limits.budget import default_budget

# Golden cases as two files that need only numpy: a bare GPU machine has no safetensors.
#
# cases.json     format, the golden set's own digest, (name, kind) of each case, the digest of the other file; of a
#                model with state its states, and the cases of its sequences
# cases.npz      arrays by '00003/in/x' and '00003/out/y', those of sequences after 'sequences/'; no pickles

FORMAT = 1
_BROKEN = (DataError, IntegrityError, OSError, ValueError, EOFError, RecursionError)


@dataclass(frozen=True)
class _SequencesDocument:
    """`GoldenSequences` without arrays."""

    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    cases: tuple[CaseName, ...]
    dim: str


@dataclass(frozen=True)
class _Header:
    digest: str
    cases: tuple[CaseName, ...]
    arrays: str
    sequences: _SequencesDocument | None = None
    format: int = FORMAT


def save_cases(golden: GoldenSet, digest: str, folder: Path) -> None:
    """Write cases.json and cases.npz into a folder. digest: of the golden set in the registry."""
    sequences = None
    if rollouts := golden.sequences:
        sequences = _SequencesDocument(rollouts.states, rollouts.ends, name_cases(rollouts.golden), rollouts.dim)
    path = folder / "cases.npz"
    with path.open("wb") as stream:
        np.savez(stream, **name_tensors(golden))  # type: ignore[arg-type]  # by numpy's types any keyword may be allow_pickle
    header = _Header(digest, name_cases(golden), digest_of_file(path), sequences)
    (folder / "cases.json").write_bytes(canonical_json(encode(header)))


def load_cases(folder: Path) -> tuple[GoldenSet, str]:
    """The golden set that `save_cases` wrote, and its digest. Raises IntegrityError for wrong or damaged files."""
    try:
        header = decode(parsing.load_json((folder / "cases.json").read_bytes()), _Header)
        if header.format != FORMAT or not is_digest(header.digest):
            raise ValueError(f"format {header.format}; this version reads {FORMAT}")
        path = folder / "cases.npz"
        if digest_of_file(path) != header.arrays:
            raise ValueError("cases.npz does not have the digest that cases.json gives")
        arrays = {name: stored_array.whole() for name, stored_array in stored_arrays(path).items()}
        cases, sequences = _cases(header.cases, arrays), None
        if sequence_header := header.sequences:
            steps = GoldenSet(_cases(sequence_header.cases, arrays, SEQUENCES))
            sequences = GoldenSequences(sequence_header.states, sequence_header.ends, steps, dim=sequence_header.dim)
    except _BROKEN as error:
        raise IntegrityError(f"{folder} holds no golden cases ({str(error)[:200]}); copy the folder again") from error
    return GoldenSet(cases, sequences=sequences), header.digest


def _cases(headings: Sequence[CaseName], arrays: Mapping[str, Array], root: str = "") -> tuple[Case, ...]:
    def side(index: int, which: str) -> dict[str, Array]:
        prefix = root + golden_prefix(index, which)
        return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}

    return tuple(
        Case(heading.name, heading.kind, side(index, "in"), side(index, "out"))
        for index, heading in enumerate(headings)
    )


# The tries of the kit, each in its own process (`execution.process`): build, load, prove, time, compare.
#
# If a driver or a compiler crashes, only this try ends. A failure is an outcome with the failed stage and a message.

T = TypeVar("T")
Opens = Callable[[], AbstractContextManager[Session]]
# The number of openings in a paired benchmark; each may compile kernels, which takes seconds.
_OPENINGS = 3
_DEVICE_RUNS = 200


class _Failed(Exception):  # noqa: N818 - an answer, not an error
    def __init__(self, outcome: Outcome, error: EnginesmithError) -> None:
        super().__init__(str(error))
        self.outcome: Outcome = outcome


@dataclass(frozen=True)
class TrialTerms:
    """Settings of a try's measurement. device: 'cuda' or 'cpu'.  seconds: per latency.  peers: PyTorch modes to compare
    the engine with.  caches: the folder of torch.compile's tuning, which all tries share.
    """

    device: str
    seconds: float
    caches: Path
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True)
class TryEngine:
    """Build an engine, open it as an engine for this device (`here`), and run it on the golden cases of a folder."""

    request: BuildRequest
    options: Mapping[str, Scalar]
    here: Target
    model: Path
    cases: Path
    terms: TrialTerms

    def run(self, context: WorkerContext) -> TrialOutcome:
        """The outcome with its times."""
        backend, trial_outcome = discovery.configure(self.request.backend, dict(self.options)), TrialOutcome()
        enter_phase("compiling")
        folder = context.workdir / "build"
        folder.mkdir()
        started_s = time.perf_counter()
        try:
            engine = _attempt("build failed", lambda: backend.build(self.request, self.model, folder))
            build_s = time.perf_counter() - started_s
            trial_outcome = TrialOutcome(build_s=build_s, size_bytes=engine.size_bytes, notes=engine.notes)
            local_engine = replace(engine, request=replace(self.request, target=self.here))
            return _measure(
                lambda: backend.open(local_engine), self.request, self.model, self.cases, self.terms, trial_outcome
            )
        except _Failed as error:
            return replace(trial_outcome, outcome=error.outcome, reason=str(error))


@dataclass(frozen=True)
class TryPeer:
    """Measure PyTorch like an engine, in one of its ways to run the graph (`peer`)."""

    peer: Peer
    request: BuildRequest
    model: Path
    cases: Path
    terms: TrialTerms

    def run(self, context: WorkerContext) -> TrialOutcome:  # noqa: ARG002 - the protocol's
        """The outcome with its times."""
        terms = replace(self.terms, peers=())
        try:
            opener = lambda: nullcontext(_open_peer(self.peer, self.model, self.request, terms))  # noqa: E731
            return _measure(opener, self.request, self.model, self.cases, terms, TrialOutcome())
        except _Failed as error:
            return TrialOutcome(outcome=error.outcome, reason=str(error))


@dataclass(frozen=True)
class ProveBundled:
    """Make the calls of a published engine's proof, and record its answers for judgement on another machine."""

    engine: Engine
    cases: Path
    terms: TrialTerms

    def run(self, context: WorkerContext) -> TrialOutcome:  # noqa: ARG002 - the protocol's
        """Versions, answers and times, or the failure."""
        request, opener = self.engine.request, partial(discovery.open_engine, self.engine)
        backend = discovery.configure(request.backend, dict(request.options))
        golden, _ = load_cases(self.cases)
        answers: dict[str, dict[str, PackedArray]] = {}
        trial_outcome = TrialOutcome(versions=dict(discovery.toolchain_of(backend)), answers=answers)
        try:
            trial_outcome = _record(opener, lambda session: record_answers(session, golden, answers), trial_outcome)
            return _time(opener, golden, self.terms, trial_outcome)
        except _Failed as error:
            return replace(trial_outcome, outcome=error.outcome, reason=str(error))


@dataclass(frozen=True)
class ProveBundledEnsemble:
    """Run a published ensemble from end to end, and record the answers of each of its engines. engines: by graph.

    The answers are not judged here, because the fp32 graphs for comparison are in the registry.
    """

    ensemble: BundledEnsemble
    engines: Mapping[str, Engine]
    cases: Path
    terms: TrialTerms

    def run(self, context: WorkerContext) -> TrialOutcome:  # noqa: ARG002 - the protocol's
        """Versions, answers and times, or the failure."""
        golden, _ = load_cases(self.cases)
        answers: dict[str, dict[str, PackedArray]] = {}
        versions = {name: text for engine in self.engines.values() for name, text in engine.request.toolchain}
        trial_outcome = TrialOutcome(versions=versions, answers=answers)

        def ask(session: Session) -> None:
            for case in golden.cases:
                run(session, case.inputs)

        try:
            trial_outcome = _record(partial(self._open, answers), ask, trial_outcome)
            return _time(self._open, golden, self.terms, trial_outcome)
        except _Failed as error:
            return replace(trial_outcome, outcome=error.outcome, reason=str(error))

    @contextmanager
    def _open(self, answers: dict[str, dict[str, PackedArray]] | None = None) -> Iterator[Ensemble]:
        """The engines as one session. answers: receives the answers of each engine."""
        nodes: dict[str, EnsembleGraph] = {}
        with ExitStack() as exit_stack:
            for node in self.ensemble.nodes:
                engine = self.engines[node.name]
                request, engine_run = engine.request, exit_stack.enter_context(discovery.open_engine(engine))
                session = engine_run if answers is None else RecordingSession(engine_run, answers, scope=node.name)
                rows = call_rows(request.inputs, request.outputs, request.profiles)
                nodes[node.name] = EnsembleGraph(session.run, session.inputs, node.sources, session.outputs, rows)
            yield Ensemble(nodes, self.ensemble.inputs, self.ensemble.outputs)


@dataclass(frozen=True)
class MeasurePeaks:
    """Measure the peak rates of the device."""

    device: str

    def run(self, context: WorkerContext) -> Peaks:  # noqa: ARG002 - the protocol's
        """The peak rates."""
        return measure_peaks(self.device)


def _measure(
    opener: Opens, request: BuildRequest, model: Path, cases: Path, terms: TrialTerms, trial: TrialOutcome
) -> TrialOutcome:
    golden, _ = load_cases(cases)
    enter_phase("proving")
    limits = default_budget("engine", request.precision)
    started_s = time.perf_counter()
    with _open(opener) as session:
        load_s = time.perf_counter() - started_s
        checks = _attempt("run failed", lambda: expected_checks("engine", session, golden, limits))
    failures = [check for check in checks if not check.passed]
    run_failures = [check for check in failures if check.name == "runs"]
    outcome: Outcome = "run failed" if run_failures else "wrong" if failures else "passed"
    reason = describe((run_failures or failures)[0]) if failures else f"{pluralize(len(checks), 'check')} passed"
    trial = replace(trial, load_s=load_s, outcome=outcome, reason=reason, checks=checks)
    if trial.outcome != "passed":
        return trial
    enter_phase("timing")
    trial = _time(opener, golden, terms, trial)
    enter_phase("racing")
    return replace(trial, races=tuple(_compare(opener, peer, request, model, golden, terms) for peer in terms.peers))


def _record(opener: Opens, ask: Callable[[Session], None], trial: TrialOutcome) -> TrialOutcome:
    """Open a published engine for the first time and make the calls of its proof. `CheckEngine` judges the answers on
    a machine with the registry."""
    started_s = time.perf_counter()
    with _open(opener) as session:
        load_s = time.perf_counter() - started_s
        _attempt("run failed", lambda: ask(session))
    reason = "`enginesmith validate --import` judges the answers"
    return replace(trial, load_s=load_s, outcome="recorded", reason=reason)


def _time(opener: Opens, golden: GoldenSet, terms: TrialTerms, trial: TrialOutcome) -> TrialOutcome:
    """The outcome with the latency at each size, copies included, and the device's own time if it is measured."""
    started_s = time.perf_counter()
    with _open(opener) as session:
        repeat_s = time.perf_counter() - started_s
        # Inputs of each distinct size of the cases, smallest first.
        sizes: dict[tuple[tuple[int, ...], ...], Tensors] = {}
        for case in golden.cases:
            session_inputs = narrow(session, case.inputs)
            sizes.setdefault(tuple(array.shape for array in session_inputs.values()), session_inputs)
        rows = _attempt("run failed", lambda: tuple(_row(session, sizes[key], terms) for key in sorted(sizes)))
    return replace(trial, load_again_s=repeat_s, latency=rows)


def _row(session: Session, inputs: Tensors, terms: TrialTerms) -> BatchLatency:
    run(session, inputs)
    monitor = SystemLoadMonitor()
    series = latencies(lambda: session.run(inputs), terms.seconds)
    busy_shares = monitor.stop().busy
    warm_count, is_steady = warm_up(series)
    steady_series, device = series[warm_count:], None
    if device_times := session.device_seconds(inputs, _DEVICE_RUNS if terms.device == "cuda" else 10):
        low, median, high = (float(np.quantile(device_times, share)) for share in (0.1, 0.5, 0.9))
        device = DeviceLatency(len(device_times), median, low, high)
    return BatchLatency(
        batch=_batch(inputs),
        shapes={name: array.shape for name, array in inputs.items()},
        runs=len(steady_series),
        steady=is_steady,
        median_s=float(np.median(steady_series)),
        quantiles=quantiles(steady_series),
        busy=tuple(busy_shares),
        device=device,
    )


def _batch(inputs: Tensors) -> int:
    return int(next((array.shape[0] for array in inputs.values() if array.ndim), 1))


def _compare(
    opener: Opens, peer: Peer, request: BuildRequest, model: Path, golden: GoldenSet, terms: TrialTerms
) -> PeerComparison:
    """A paired benchmark of an engine and PyTorch, at the size for which the engine is tuned.

    An error of PyTorch becomes the result's reason; the engine's own results are thus not lost.
    """
    try:
        session = _open_peer(peer, model, request, terms)
        inputs = narrow(session, next(golden.of_kind("golden")).inputs)
        session.run(inputs)
        # One session for all openings: it compiles once.
        openers = opener, lambda: nullcontext(session)
        pairs = run_interleaved(openers, inputs, terms.seconds * 2 * _OPENINGS, 0, _OPENINGS)
        benchmark = compare_times(pairs)
    except Exception as error:
        return PeerComparison(peer, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return PeerComparison(peer, batch=_batch(inputs), **vars(benchmark))


@contextmanager
def _open(opener: Opens) -> Iterator[Session]:
    """An opened session. Raises _Failed with 'load failed' if opening fails; later errors pass unchanged."""
    session_context = _attempt("load failed", opener)
    session = _attempt("load failed", session_context.__enter__)
    try:
        yield session
    finally:
        session_context.__exit__(None, None, None)


def _attempt(outcome: Outcome, step: Callable[[], T]) -> T:
    """The result of `step`. Raises _Failed with `outcome` for an EnginesmithError, except for an UnavailableError."""
    try:
        return step()
    except UnavailableError:  # not a fault of the engine
        raise
    except EnginesmithError as error:
        raise _Failed(outcome, error) from error


def _open_peer(peer: Peer, model: Path, request: BuildRequest, terms: TrialTerms) -> TorchSession:
    # torch.compile stores its tuning in the folder that all tries share.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(terms.caches)
    return TorchSession(request, make_peer(peer, model, request, terms.device), terms.device)
