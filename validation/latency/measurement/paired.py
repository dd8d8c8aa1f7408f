"""The paired benchmark of two engines: small blocks of runs of each, in a random order, so that disturbances of the
machine reach both.

The addresses of a session's memory and its threads influence its speed for as long as it is open, by as much as a real
difference (Mytkowicz et al., "Producing wrong data", ASPLOS 2009). So both are opened anew several times, and the
interval includes the differences of the openings (Kalibera & Jones, "Rigorous benchmarking", ISMM 2013).

The runtime's own call is timed where both sessions offer it, else `Session.run` of both.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.latency import PairedTimes, Ratio, Verdict
from enginesmith.core.types import Session, Tensors
from validation.latency.measurement.loop import Opens, latencies, select_inputs, time_call
from validation.statistics.rates import LEAST_BEYOND, POWER, Effect, quantile_effects
from validation.statistics.serial_dependence import NORMAL, t_quantile

Pair = tuple[Array, Array]

OPENINGS = 8
LEVEL = 0.95
REPLICATES = 400
SHOWN = (0.5, 0.99)
# The duration of a block, and the number of runs in it at most.
_BLOCK_S, _BLOCK_RUNS = 1e-3, 32
# The duration of the runs before a block that do not count: threads of the other side stay awake after its block.
_LEAD_S = 0.25e-3
# The share of an opening's time for warm-up.
_WARM = 0.15


def run_interleaved(
    opens: tuple[Opens, Opens], inputs: Tensors, seconds: float, seed: int, openings: int = OPENINGS
) -> list[Pair]:
    """Seconds of each run of both engines, a pair of float64 [runs] for each opening. seed: of the order of blocks.

    Raises what opening and running raise.
    """
    rng = np.random.default_rng(seed)
    return [_run_pair(opens, inputs, seconds / openings, rng) for _ in range(openings)]


def _run_pair(opens: tuple[Opens, Opens], inputs: Tensors, seconds: float, rng: np.random.Generator) -> Pair:
    with ExitStack() as stack:
        sessions: dict[int, Session] = {}
        for side in rng.permutation(2):
            sessions[int(side)] = stack.enter_context(opens[side]())
        pairs = [(session, select_inputs(session, inputs)) for session in (sessions[0], sessions[1])]
        for session, session_inputs in pairs:
            session.run(session_inputs)
        own = [call for session, session_inputs in pairs if (call := session.prepare_call(session_inputs))]
        runs = (
            own
            if len(own) == len(pairs)
            else [partial(session.run, session_inputs) for session, session_inputs in pairs]
        )
        slowest = max(float(np.median(latencies(run, _WARM / 2 * seconds))) for run in runs)
        size, lead = (min(max(1, round(time / slowest)), _BLOCK_RUNS) for time in (_BLOCK_S, _LEAD_S))
        rounds = max(2, round((1 - _WARM) * seconds / (2 * (size + lead) * slowest)))
        run_times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for side in rng.permutation(2):
                for _ in range(lead):
                    runs[side]()
                run_times[side].extend(time_call(runs[side]) for _ in range(size))
    return np.array(run_times[0]), np.array(run_times[1])


def compare_times(pairs: Sequence[Pair], seed: int = 0, replicates: int = REPLICATES) -> PairedTimes:
    """Whether the first engine is faster or slower. pairs: of `run_interleaved`.  seed, replicates: of a bootstrap."""
    both = np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs])
    effects = quantile_effects(both, list(SHOWN), seed, replicates)
    ratios = tuple(_ratio(p, effect, pairs) for p, effect in zip(SHOWN, effects, strict=True))
    first = ratios[0]
    verdict: Verdict = "no difference shown"
    if first.low is not None and first.high is not None:
        verdict = "faster" if first.high < 1.0 else "slower" if first.low > 1.0 else verdict
    medians = float(np.median(both[0])), float(np.median(both[1]))
    return PairedTimes(verdict, ratios, medians, len(both[0]), len(pairs))


def _ratio(p: float, effect: Effect, pairs: Sequence[Pair]) -> Ratio:
    if math.isnan(effect.log_ratio) or effect.beyond < LEAST_BEYOND:
        least, have = math.ceil(LEAST_BEYOND / min(p, 1 - p)), sum(len(pair[0]) for pair in pairs)
        note = f"{have} runs say nothing about it; it takes {least}, or more in bursts"
        return Ratio(p, None, None, None, None, note)
    error, freedom = effect.error * math.sqrt(effect.blocks / (effect.blocks - 1.0)), effect.freedom
    each = [math.log(float(np.quantile(a, p)) / float(np.quantile(b, p))) for a, b in pairs]
    between = float(np.std(each, ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    if between >= error:
        error, freedom = between, min(freedom, len(each) - 1.0)
    factor = t_quantile(1.0 - (1.0 - LEVEL) / 2, freedom)
    low, high = (math.exp(effect.log_ratio + sign * factor * error) for sign in (-1, 1))
    detectable = math.expm1((factor + NORMAL.inv_cdf(POWER)) * error)
    return Ratio(p, math.exp(effect.log_ratio), low, high, detectable)
