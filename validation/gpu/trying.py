"""One try, in a process of its own (`builders.execution.process`): build, load, prove, time, race; what comes out is JSON.

A driver or a compiler that crashes takes down this one try. What goes wrong is an answer: where it went wrong, and in
whose words.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from builders.backends import discovery
from builders.execution.jobs import WorkerContext
from builders.execution.process import enter_phase
from enginery.core.errors import EngineryError, UnavailableError
from enginery.core.proof.report import Check, describe
from enginery.core.text import pluralize
from enginery.core.types import BuildRequest, Engine, Scalar, Session, Target, Tensors
from validation.comparison.sessions import expected_checks, run
from validation.golden.golden_set import GoldenSet
from validation.gpu.cases import load_cases
from validation.gpu.probes import build_for_any_generation
from validation.gpu.recorded import Recorder
from validation.gpu.timing.clocks import DeviceClock
from validation.gpu.timing.peers import Peer, TorchSession, make_peer, open_peer
from validation.latency.measurement.loop import latencies
from validation.latency.measurement.paired import judge as judge_race
from validation.latency.measurement.paired import race
from validation.latency.measurement.quantiles import quantiles
from validation.latency.measurement.system_load import Watch
from validation.latency.measurement.warmup import warm_up
from validation.limits.budget import budgets

Json = dict[str, Any]
Outcome = Literal["passed", "wrong", "build failed", "load failed", "run failed", "crashed", "not finished"]
Opens = Callable[[], AbstractContextManager[Session]]
# Openings of a race: loading compiles kernels, which takes seconds.
_OPENINGS = 3
_DEVICE_RUNS = 200


class _Failed(Exception):  # noqa: N818 - an answer, not an error
    def __init__(self, outcome: Outcome, error: EngineryError) -> None:
        super().__init__(str(error))
        self.outcome: Outcome = outcome


@dataclass(frozen=True)
class Terms:
    """How a try is measured. device: 'cuda' or 'cpu'.  seconds: of each latency.  peers: raced with the engine.

    caches: the folder of what torch.compile tuned, for all tries.
    """

    device: str
    seconds: float
    caches: Path
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True)
class TryEngine:
    """Build an engine and, presented as the device's own (`here`), run it on the golden cases of a folder.

    portable: whether it is built for no generation in particular (`probes`).
    """

    request: BuildRequest
    options: Mapping[str, Scalar]
    here: Target
    model: Path
    cases: Path
    terms: Terms
    portable: bool = False

    def run(self, context: WorkerContext) -> Json:
        """What became of it, with its times."""
        backend = discovery.configure(self.request.backend, dict(self.options))
        found: Json = {}

        def build() -> Engine:
            enter_phase("compiling")
            folder = context.workdir / "build"
            folder.mkdir()
            begun = time.perf_counter()
            built = (build_for_any_generation if self.portable else backend.build)(self.request, self.model, folder)
            found.update(build_s=time.perf_counter() - begun, size_bytes=built.size_bytes, notes=list(built.notes))
            return built

        try:
            engine = _told("build failed", build)
            own = replace(engine, request=replace(self.request, target=self.here))
            found |= _measured(lambda: backend.open(own), self.request, self.model, self.cases, self.terms)
        except _Failed as failed:
            found |= {"outcome": failed.outcome, "reason": str(failed)}
        return found


@dataclass(frozen=True)
class TryPeer:
    """Measure PyTorch's own way to run the graph as an engine is."""

    peer: Peer
    request: BuildRequest
    model: Path
    cases: Path
    terms: Terms

    def run(self, context: WorkerContext) -> Json:  # noqa: ARG002 - the protocol's
        """What became of it, with its times."""
        _share_caches(self.terms)
        try:
            opens = lambda: open_peer(self.peer, self.model, self.request, self.terms.device)  # noqa: E731
            return _measured(opens, self.request, self.model, self.cases, replace(self.terms, peers=()))
        except _Failed as failed:
            return {"outcome": failed.outcome, "reason": str(failed)}


@dataclass(frozen=True)
class ProveCarried:
    """Run an engine that was carried here on its golden cases, and keep its answers for who judges them."""

    request: BuildRequest
    options: Mapping[str, Scalar]
    engine: Path
    digest: str
    cases: Path
    terms: Terms

    def run(self, context: WorkerContext) -> Json:  # noqa: ARG002 - the protocol's
        """Versions, answers and times, or what went wrong."""
        wanted, path = self.request, self.engine
        backend = discovery.configure(wanted.backend, dict(self.options))
        carried = Engine(wanted, path, self.digest, path.stat().st_size, path.suffix)
        golden, _ = load_cases(self.cases)
        found: Json = {"versions": dict(discovery.toolchain_of(backend)), "answers": {}}
        try:
            found |= _loaded(lambda: backend.open(carried), lambda session: _answered(session, golden, wanted, found))
            found |= _timed(lambda: backend.open(carried), golden, self.terms)
        except _Failed as failed:
            found |= {"outcome": failed.outcome, "reason": str(failed)}
        return found


@dataclass(frozen=True)
class MeasurePeaks:
    """Measure the device's roofs."""

    device: str

    def run(self, context: WorkerContext) -> Json:  # noqa: ARG002 - the protocol's
        """`Peaks` as JSON."""
        from validation.gpu.timing.peaks import measure_peaks

        return {"outcome": "done", "peaks": measure_peaks(self.device).to_json()}


def _measured(opens: Opens, request: BuildRequest, model: Path, cases: Path, terms: Terms) -> Json:
    golden, _ = load_cases(cases)
    enter_phase("proving")
    found = _loaded(opens, lambda session: _judged(expected_checks("engine", session, golden, _budget(request))))
    if found["outcome"] != "passed":
        return found
    enter_phase("timing")
    found |= _timed(opens, golden, terms)
    enter_phase("racing")
    return found | {"races": [_raced(opens, peer, request, model, golden, terms) for peer in terms.peers]}


def _loaded(opens: Opens, use: Callable[[Session], Json]) -> Json:
    """Load for the first time, which compiles kernels with some backends, and use the session."""
    begun = time.perf_counter()
    with _opened(opens) as session:
        load_s = time.perf_counter() - begun
        return {"load_s": load_s, **_told("run failed", lambda: use(session))}


def _answered(session: Session, golden: GoldenSet, request: BuildRequest, found: Json) -> Json:
    recorder = Recorder(session)
    found["answers"] = recorder.answers
    return _judged(expected_checks("engine", recorder, golden, _budget(request)))


def _judged(checks: tuple[Check, ...]) -> Json:
    failed = [check for check in checks if not check.passed]
    broke = [check for check in failed if check.name == "runs"]
    outcome: Outcome = "run failed" if broke else "wrong" if failed else "passed"
    reason = describe((broke or failed)[0]) if failed else f"{pluralize(len(checks), 'check')} passed"
    return {"outcome": outcome, "reason": reason, "checks": [check.to_json() for check in checks]}


def _budget(request: BuildRequest) -> Any:
    """What the whole way from the float32 model may cost: the cases expect what that gives."""
    return budgets("quantization", request.precision, None)


def _timed(opens: Opens, golden: GoldenSet, terms: Terms) -> Json:
    """Latency at each size of the cases, copies included, and the device's own time where the session tells it."""
    begun = time.perf_counter()
    with _opened(opens) as session:
        again_s = time.perf_counter() - begun
        rows = [
            _told("run failed", lambda inputs=inputs: _row(session, inputs, terms))  # type: ignore[misc]  # called at once
            for inputs in _sizes(session, golden)
        ]
    return {"load_again_s": again_s, "latency": rows}


def _sizes(session: Session, golden: GoldenSet) -> list[Tensors]:
    """Inputs of each size that the cases have, once, smallest first."""
    found: dict[tuple[Any, ...], Tensors] = {}
    for case in golden.cases:
        given = _narrowed(session, case.inputs)
        found.setdefault(tuple(array.shape for array in given.values()), given)
    return [found[key] for key in sorted(found)]


def _narrowed(session: Session, inputs: Tensors) -> dict[str, Any]:
    """As `comparison.sessions.run` gives inputs to a session that takes fp16."""
    halves = {spec.name for spec in session.inputs if spec.dtype == "float16"}
    return {name: array.astype(np.float16) if name in halves else array for name, array in inputs.items()}


def _row(session: Session, inputs: Tensors, terms: Terms) -> Json:
    run(session, inputs)
    watch = Watch()
    series = latencies(lambda: session.run(inputs), terms.seconds)
    surroundings = watch.stop().to_json()
    discarded, steady = warm_up(series)
    kept = series[discarded:]
    shape = {name: list(array.shape) for name, array in inputs.items()}
    found = {
        "batch": next(iter(inputs.values())).shape[0],
        "shapes": shape,
        "runs": len(kept),
        "steady": steady,
        "median_s": float(np.median(kept)),
        "quantiles": [item.to_json() for item in quantiles(kept)],
        "busy": surroundings["busy"],
        "device": None,
    }
    if isinstance(session, DeviceClock):
        device = np.array(session.device_seconds(inputs, _DEVICE_RUNS if terms.device == "cuda" else 10))
        found["device"] = {
            "runs": len(device),
            "median_s": float(np.median(device)),
            "low_s": float(np.quantile(device, 0.1)),
            "high_s": float(np.quantile(device, 0.9)),
        }
    return found


def _raced(opens: Opens, peer: Peer, request: BuildRequest, model: Path, golden: GoldenSet, terms: Terms) -> Json:
    """The engine against PyTorch, in turns, at the size that it is tuned for. Whatever PyTorch raises is an answer: its
    compiler has classes of its own, and the engine's numbers must not go with them."""
    _share_caches(terms)
    try:
        session = TorchSession(request, make_peer(peer, model, request, terms.device), terms.device)
        inputs = _narrowed(session, next(golden.of_kind("golden")).inputs)
        session.run(inputs)
        # Opened once: what it compiled stays compiled.
        pairs = race((opens, lambda: _held(session)), inputs, terms.seconds * 2 * _OPENINGS, 0, _OPENINGS)
    except Exception as error:
        return {"peer": peer, "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {"peer": peer, "batch": next(iter(inputs.values())).shape[0], **judge_race(pairs).to_json()}


@contextmanager
def _held(session: Session) -> Iterator[Session]:
    yield session


@contextmanager
def _opened(opens: Opens) -> Iterator[Session]:
    """An opened session; an error while it opens is told from one of what is done with it."""
    manager = _told("load failed", opens)
    session = _told("load failed", manager.__enter__)
    try:
        yield session
    finally:
        manager.__exit__(None, None, None)


def _told(outcome: Outcome, step: Callable[[], Any]) -> Any:
    try:
        return step()
    except UnavailableError:  # says nothing about the engine
        raise
    except EngineryError as error:
        raise _Failed(outcome, error) from error


def _share_caches(terms: Terms) -> None:
    """torch.compile keeps what it tuned where all tries find it, and not in this one's folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(terms.caches)
