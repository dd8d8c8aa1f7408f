"""The paired benchmark of two engines: small blocks of runs of each, in random order. Disturbances of the machine then
affect both.

The addresses of a session's memory and its threads influence its speed while it is open, as much as a real difference
does (Mytkowicz et al., "Producing wrong data", ASPLOS 2009). Therefore both engines are opened several times, and the
interval includes the differences of the openings (Kalibera & Jones, "Rigorous benchmarking", ISMM 2013).

The runtime's own call is timed if both sessions offer one, else `Session.run` of both. Two engines that need different
versions of one runtime run in two processes (`answer_blocks`), each of which times its own blocks.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TextIO

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.latency import PairedTimes, Ratio, Verdict
from enginesmith.core.types import Session, Tensors
from validation.latency.measurement.loop import Opens, Run, latencies, select_inputs, time_call
from validation.statistics.rates import LEAST_BEYOND, POWER, Effect, quantile_effects
from validation.statistics.serial_dependence import NORMAL, t_quantile

Pair = tuple[Array, Array]
# Called with (lead, size); returns the seconds of each of `size` runs, after `lead` runs that do not count.
TimeBlock = Callable[[int, int], Sequence[float]]
# Sends a request to a process of `answer_blocks`, and returns its answer.
Ask = Callable[[str, Sequence[float]], Any]

# Sessions of each engine; the level of intervals; resamples of the bootstrap; the compared quantiles.
OPENINGS = 8
LEVEL = 0.95
REPLICATES = 400
SHOWN = (0.5, 0.99)
# The seconds of a block, and the most runs in it.
_BLOCK_S, _BLOCK_RUNS = 1e-3, 32
# The seconds of uncounted runs before a block: threads of the other side stay awake after its block.
_LEAD_S = 0.25e-3
# The share of an opening's time for warm-up.
_WARM = 0.15


def run_interleaved(
    session_openers: tuple[Opens, Opens], inputs: Tensors, seconds: float, seed: int, openings: int = OPENINGS
) -> list[Pair]:
    """Time both engines; returns the seconds of each run, a pair of float64 [runs] for each opening.

    seconds: for all openings together.  openings: number for each engine, one after the other.
    Raises the errors of opening and running.
    """
    rng = np.random.default_rng(seed)
    return [_run_pair(session_openers, inputs, seconds / openings, rng) for _ in range(openings)]


def _run_pair(session_openers: tuple[Opens, Opens], inputs: Tensors, seconds: float, rng: np.random.Generator) -> Pair:
    with ExitStack() as exit_stack:
        sessions: dict[int, Session] = {}
        for side_index in rng.permutation(2):
            sessions[int(side_index)] = exit_stack.enter_context(session_openers[side_index]())
        pairs = [(session, select_inputs(session, inputs)) for session in (sessions[0], sessions[1])]
        for session, session_inputs in pairs:
            session.run(session_inputs)
        calls = [call for session, session_inputs in pairs if (call := session.prepare_call(session_inputs))]
        if len(calls) < len(pairs):
            calls = [partial(session.run, session_inputs) for session, session_inputs in pairs]
        warm_medians = [float(np.median(latencies(run, _WARM / 2 * seconds))) for run in calls]
        return _interleave([partial(_time_block, run) for run in calls], max(warm_medians), seconds, rng)


def run_interleaved_apart(asks: tuple[Ask, Ask], seconds: float, openings: int = OPENINGS) -> list[Pair]:
    """`run_interleaved` for engines in two processes of `answer_blocks`. Raises the errors of `asks`."""
    rng, pairs = np.random.default_rng(0), list[Pair]()
    for _ in range(openings):
        warm_medians = [asks[side_index]("open", [_WARM / 2 * seconds / openings]) for side_index in rng.permutation(2)]
        blocks = [lambda *numbers, ask=ask: ask("block", numbers) for ask in asks]
        pairs.append(_interleave(blocks, max(warm_medians), seconds / openings, rng, seconds / openings))
    return pairs


def answer_blocks(opener: Opens, inputs: Tensors, stream: TextIO) -> int:
    """Answer the requests of `run_interleaved_apart` until the stream ends; returns the number of timed blocks.

    Requests and answers are lines of JSON. Raises the errors of opening and running.
    """
    block_count = 0
    with ExitStack() as exit_stack:
        for line in iter(stream.readline, ""):
            command, arguments = json.loads(line)
            if command == "open":
                exit_stack.close()
                session = exit_stack.enter_context(opener())
                session_inputs = select_inputs(session, inputs)
                session.run(session_inputs)
                run = session.prepare_call(session_inputs) or partial(session.run, session_inputs)
                answer: object = float(np.median(latencies(run, *arguments)))
            else:
                answer, block_count = _time_block(run, *arguments), block_count + 1
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    return block_count


def _interleave(
    blocks: Sequence[TimeBlock], slowest: float, seconds: float, rng: np.random.Generator, most_s: float = math.inf
) -> Pair:
    """Time blocks of both sides in random order, enough to fill about `seconds` without other costs.

    slowest: seconds of a run of the slower side.  most_s: seconds after which no more blocks begin.
    """
    size, lead_runs = (min(max(1, round(block_s / slowest)), _BLOCK_RUNS) for block_s in (_BLOCK_S, _LEAD_S))
    round_count = max(2, round((1 - _WARM) * seconds / (2 * (size + lead_runs) * slowest)))
    run_times: tuple[list[float], list[float]] = ([], [])
    start = time.monotonic()
    for count in range(round_count):
        if count > 1 and time.monotonic() - start > most_s:
            break
        for side_index in rng.permutation(2):
            run_times[side_index].extend(blocks[side_index](lead_runs, size))
    return np.array(run_times[0]), np.array(run_times[1])


def _time_block(run: Run, lead: int, size: int) -> list[float]:
    for _ in range(lead):
        run()
    return [time_call(run) for _ in range(size)]


def compare_times(pairs: Sequence[Pair], seed: int = 0, replicates: int = REPLICATES) -> PairedTimes:
    """Compare the first engine with the second. pairs: of `run_interleaved`.  seed, replicates: of a bootstrap."""
    side_times = np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs])
    effects = quantile_effects(side_times, list(SHOWN), seed, replicates)
    ratios = tuple(_ratio(p, effect, pairs) for p, effect in zip(SHOWN, effects, strict=True))
    median_ratio = ratios[0]
    verdict: Verdict = "no difference shown"
    if median_ratio.low is not None and median_ratio.high is not None:
        verdict = "faster" if median_ratio.high < 1.0 else "slower" if median_ratio.low > 1.0 else verdict
    medians = float(np.median(side_times[0])), float(np.median(side_times[1]))
    return PairedTimes(verdict, ratios, medians, len(side_times[0]), len(pairs))


def _ratio(p: float, effect: Effect, pairs: Sequence[Pair]) -> Ratio:
    if math.isnan(effect.log_ratio) or effect.beyond < LEAST_BEYOND:
        least_runs, run_count = math.ceil(LEAST_BEYOND / min(p, 1 - p)), sum(len(pair[0]) for pair in pairs)
        note = f"{run_count} runs say nothing about it; it takes {least_runs}, or more in bursts"
        return Ratio(p, None, None, None, None, note)
    error, freedom = effect.error * math.sqrt(effect.blocks / (effect.blocks - 1.0)), effect.freedom
    log_ratios = [math.log(float(np.quantile(a, p)) / float(np.quantile(b, p))) for a, b in pairs]
    standard_error = float(np.std(log_ratios, ddof=1)) / math.sqrt(len(log_ratios)) if len(log_ratios) > 1 else 0.0
    if standard_error >= error:
        error, freedom = standard_error, min(freedom, len(log_ratios) - 1.0)
    factor = t_quantile(1.0 - (1.0 - LEVEL) / 2, freedom)
    low, high = (math.exp(effect.log_ratio + sign * factor * error) for sign in (-1, 1))
    detectable = math.expm1((factor + NORMAL.inv_cdf(POWER)) * error)
    return Ratio(p, math.exp(effect.log_ratio), low, high, detectable)
