"""`enginery record`: requests for a canary, from stdin or generated from samples."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginery.core.text import pluralize
from pipeline.cli.options import number_option, path_option, say

if TYPE_CHECKING:
    from enginery.recording.recorder import Recorder


@click.command()
@click.argument("traffic", type=click.Path(path_type=Path, dir_okay=False))
@number_option("--sampling", click.FloatRange(0, 1, min_open=True), 1.0, "Share of the requests to keep.")
@number_option("--max-mib", click.IntRange(1), 1024, "Largest size of TRAFFIC in MiB.")
@path_option("--samples", "Generate traffic from these samples (.npz, .npy).")
@number_option(
    "--per-second", click.FloatRange(0, min_open=True), None, "With --samples: mean number of requests per second."
)
@number_option("--requests", click.IntRange(1), None, "With --samples: number of requests.", shown="each sample once")
@number_option("--batch", click.IntRange(1), 1, "With --samples: samples per request.")
@number_option("--seed", click.IntRange(0), 0, "Seed of the sampling and the arrivals.")
def record(
    traffic: Path,
    sampling: float,
    max_mib: int,
    samples: Path | None,
    per_second: float | None,
    requests: int | None,
    batch: int,
    seed: int,
) -> None:
    """Append requests from stdin to TRAFFIC, for `enginery canary run`.

    One JSON object per line: {"inputs": {"x": [[0.1, 0.2]]}, "at": 1763640000.5, "latency": 0.01}; without `at`, the
    time of reading; `latency` may be left out: seconds until the answer.
    Serving code in Python uses enginery.Recorder for the same. With --samples the traffic is generated instead: real
    inputs that arrive at random (a Poisson process).
    """
    from enginery.core.errors import InputError
    from enginery.recording.recorder import Recorder

    if (samples is None) != (per_second is None):
        raise InputError("--samples and --per-second go together: what to send, and how often")
    made = f"{samples.name}, Poisson arrivals at {per_second:g} a second, seed {seed}" if samples else ""
    with Recorder(traffic, sampling=sampling, max_bytes=max_mib << 20, seed=seed, made=made) as recorder:
        try:
            if samples and per_second:
                _make_up(recorder, samples, per_second, requests, batch, seed)
            else:
                _from_stdin(recorder)
        finally:
            say(
                f"{traffic}: {pluralize(recorder.kept, 'request')} recorded"
                + (f", {recorder.lost} lost" if recorder.lost else "")
            )
        if recorder.failure or recorder.full:
            raise InputError(recorder.failure or f"{traffic} is full at {max_mib} MiB; raise --max-mib")


def _from_stdin(recorder: "Recorder") -> None:
    from enginery.recording.json_lines import JsonLinesReader, number_in

    lines = JsonLinesReader(Path("/dev/stdin"), 64 << 20)
    for number, found in lines.of(sys.stdin.buffer):
        inputs = found.get("inputs")
        if not isinstance(inputs, dict):
            raise lines.error(number, "inputs is missing, or not an object")
        try:
            at = number_in(found, "at") if "at" in found else None
            latency = number_in(found, "latency", above=0.0) if "latency" in found else None
        except ValueError as error:
            raise lines.error(number, str(error)) from None
        if not recorder.append_json(inputs, at, latency=latency) and recorder.full:
            return


def _make_up(
    recorder: "Recorder", samples: Path, per_second: float, requests: int | None, batch: int, seed: int
) -> None:
    from validation.canary.synthetic import made_up

    for at, inputs in made_up(samples, per_second, requests, batch, seed):
        if not recorder.append(inputs, at) and recorder.full:
            return
