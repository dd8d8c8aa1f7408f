"""Seeded traces that differ: two kinds of requests, a heavy tail, sizes that drift by the hour.

    python -m benchmarks.traffic_traces bimodal traffic.jsonl

writes one as traffic of a text encoder with `input_ids` and `attention_mask` of shape [batch, sequence], such as that
of examples/encoder. Sizes are tokens: questions and passages for a re-ranker; log-normal lengths, in bursts; short
queries by day and long texts by night.
"""

import argparse
from pathlib import Path

import numpy as np

from enginesmith.recording.recorder import Recorder
from validation.traffic.trace import Trace

# 2026-03-02 00:00 UTC.
START = 1_772_409_600.0
HOUR_S = 3600.0


def bimodal(requests: int, per_second: float, top: int, seed: int = 0) -> Trace:
    """Three of ten requests are passages of about 0.6 of `top`, seven are questions of about a tenth."""
    rng = np.random.default_rng(seed)
    passages = rng.random(requests) < 0.3
    sizes = np.where(passages, rng.normal(0.58, 0.04, requests), rng.normal(0.09, 0.02, requests)) * top
    return _trace(rng, sizes, np.full(requests, per_second), top)


def heavy_tail(requests: int, per_second: float, top: int, seed: int = 1) -> Trace:
    """Log-normal sizes, half of them up to 0.07 of `top`, one of a hundred about ten times that; in bursts."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(np.log(0.07 * top), 0.9, requests))
    bursts = np.repeat(rng.gamma(1.5, 1 / 1.5, requests // 50 + 1), 50)[:requests]
    return _trace(rng, sizes, per_second * np.maximum(bursts, 0.1), top)


def drifting(requests: int, per_second: float, top: int, seed: int = 2) -> Trace:
    """A day: short queries that come four times as often at noon as at midnight, and long texts at night."""
    rng = np.random.default_rng(seed)
    hour = np.arange(requests) / requests * 24
    day = 0.5 - 0.5 * np.cos(hour / 24 * 2 * np.pi)
    is_long = rng.random(requests) < 0.5 * (1 - day) ** 2
    sizes = np.where(is_long, rng.normal(0.7, 0.05, requests), rng.normal(0.05 + 0.1 * day, 0.02, requests)) * top
    return _trace(rng, sizes, per_second * (0.4 + 1.2 * day), top)


TRACES = {"bimodal": bimodal, "heavy tail": heavy_tail, "drifting": drifting}


def _trace(rng: np.random.Generator, sizes: np.ndarray, rates: np.ndarray, top: int) -> Trace:
    """Requests of one sample whose gaps are exponential with the mean 1 / rate of each."""
    sums = np.cumsum(rng.exponential(1.0, len(sizes)) / rates)
    whole_array = np.clip(np.ceil(sizes), 4, top).astype(np.int64)
    return Trace(sums - sums[0], {"batch": np.ones(len(sizes), np.int64), "sequence": whole_array}, START)


def write_trace(trace: Trace, path: Path, hours: float | None = None, model: str = "") -> None:
    """Write a trace as recorded traffic of a text encoder. hours: that the recording shall span; None: as the trace."""
    stretch = hours * HOUR_S / float(trace.at[-1]) if hours else 1.0
    path.unlink(missing_ok=True)
    rng = np.random.default_rng(0)
    with Recorder(path, model=model, made="benchmarks/traffic_traces.py") as recorder:
        for arrival_s, size in zip(trace.at, trace.sizes["sequence"].tolist(), strict=True):
            ids = rng.integers(1, 257, (1, size), np.int64)
            recorder.append({"input_ids": ids, "attention_mask": np.ones_like(ids)}, trace.start + arrival_s * stretch)


def main() -> None:
    """Write one trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", choices=[*TRACES])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--per-second", type=float, default=100.0)
    parser.add_argument("--top", type=int, default=128, help="greatest size")
    parser.add_argument("--hours", type=float, help="stretch it over so many hours")
    parser.add_argument("--model", default="", help="name of the model, which the file then says")
    chosen = parser.parse_args()
    trace = TRACES[chosen.trace](chosen.requests, chosen.per_second, chosen.top)
    write_trace(trace, chosen.out, chosen.hours, chosen.model)


if __name__ == "__main__":
    main()
