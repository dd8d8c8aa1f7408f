"""`enginesmith traffic record`: requests for a canary, from stdin or generated from samples."""

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from enginesmith.cli.options import number_option, path_option, say
from enginesmith.core.text import pluralize

# Inputs as JSON; the time of arrival in seconds since the epoch and the seconds until the answer, where known.
_Request = tuple[Mapping[str, object], float | None, float | None]


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
@click.option("--model", default="", metavar="NAME", help="Name of the model that is asked, which TRAFFIC then says.")
def record(
    traffic: Path,
    sampling: float,
    max_mib: int,
    samples: Path | None,
    per_second: float | None,
    requests: int | None,
    batch: int,
    seed: int,
    model: str,
) -> None:
    """Append requests from stdin to TRAFFIC, for `enginesmith canary run`, `traffic show` and `traffic buckets`.

    One JSON object per line: {"inputs": {"x": [[0.1, 0.2]]}, "at": 1763640000.5, "latency": 0.01}; without `at`, the
    time of reading; `latency` may be left out: seconds until the answer.
    Serving code in Python uses enginesmith.Recorder for the same. With --samples the traffic is generated instead: real
    inputs that arrive at random (a Poisson process).
    """
    from enginesmith.core.errors import InputError
    from enginesmith.recording.recorder import Recorder

    if (samples is None) != (per_second is None):
        raise InputError("--samples and --per-second go together: what to send, and how often")
    made = f"{samples.name}, Poisson arrivals at {per_second:g} a second, seed {seed}" if samples else ""
    found = _make_up(samples, per_second, requests, batch, seed) if samples and per_second else _from_stdin()
    first = [*itertools.islice(found, 1)]  # a mistake in it leaves no file behind
    with Recorder(traffic, sampling=sampling, max_bytes=max_mib << 20, seed=seed, made=made, model=model) as recorder:
        try:
            for inputs, at, latency in itertools.chain(first, found):
                if not recorder.append_json(inputs, at, latency=latency) and recorder.full:
                    break
        finally:
            say(
                f"{traffic}: {pluralize(recorder.kept, 'request')} recorded"
                + (f", {recorder.lost} lost" if recorder.lost else "")
            )
        if recorder.failure or recorder.full:
            raise InputError(recorder.failure or f"{traffic} is full at {max_mib} MiB; raise --max-mib")


def _from_stdin() -> Iterator[_Request]:
    """The requests of stdin. Raises DataError that names the line."""
    from enginesmith.recording.json_lines import JsonLinesReader, number_in

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
        yield inputs, at, latency


def _make_up(samples: Path, per_second: float, requests: int | None, batch: int, seed: int) -> Iterator[_Request]:
    """Requests of stored samples. Raises DataError as `made_up` and `encode_inputs`."""
    from enginesmith.recording.traffic import encode_inputs
    from validation.canary.synthetic import made_up

    return ((encode_inputs(inputs), at, None) for at, inputs in made_up(samples, per_second, requests, batch, seed))
