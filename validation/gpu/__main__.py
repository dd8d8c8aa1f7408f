"""`python -m validation.gpu`: runs the kit, or writes its page. Uses argparse, because a bare machine has no click."""

import argparse
import math
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from enginesmith.core.errors import EnginesmithError
from validation.gpu.kit import KitOptions, run_kit
from validation.gpu.models import MODELS, PRECISIONS, SIZES
from validation.gpu.page import page
from validation.gpu.peers import PEERS
from validation.gpu.results import Results

_PASSING = ("passed", "recorded", "done", "skipped")


def main(words: list[str]) -> int:
    """The exit code: 0 if all engines for this device passed, 1 if one did not; after an error, that error's code."""
    try:
        if words[:1] == ["page"]:
            sys.stdout.write(page([Results.load(Path(word)) for word in words[1:]]))
            return 0
        return _run(_parser().parse_args(words))
    except EnginesmithError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was measured so far is kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    """A parser of the options: the fields of `KitOptions`, and `out`."""
    parser = argparse.ArgumentParser("python -m validation.gpu", description=__doc__)
    add, join_names = parser.add_argument, ",".join
    add("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU is for trying the kit out")
    add("--out", type=Path, default=Path("gpu-results.json"), help="where the results go")
    add("--carry", type=Path, action="append", default=[], help="folder of published engines; repeat it")
    add("--model", dest="models", type=_names(MODELS), default=list(MODELS), help="mlp,conv,block; or none")
    add(
        "--precision", dest="precisions", type=_names(PRECISIONS), default=list(PRECISIONS), help=join_names(PRECISIONS)
    )
    help_text = "names, separated by commas; default: all that are registered"
    add("--backend", dest="backends", type=_words, default=[], help=help_text)
    add("--peer", dest="peers", type=_names(PEERS), default=list(PEERS), help=f"{join_names(PEERS)}; or none")
    add("--seconds", type=_seconds, default=2.0, help="for each latency")
    add("--size", choices=SIZES, default="real", help="of the kit's models")
    add("--timeout", dest="timeout_s", metavar="TIMEOUT", type=_seconds, default=1200.0, help="seconds for each try")
    add("--no-peaks", dest="peaks", action="store_false", help="do not measure the roofs")
    return parser


def _names(choices: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated lists of `choices`; 'none' is the empty list."""

    def parse(text: str) -> list[str]:
        names = [] if text == "none" else _words(text)
        if unknown_names := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown_names[0]!r} is not one of {', '.join(choices)}")
        return names

    return parse


def _seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _run(arguments: argparse.Namespace) -> int:
    options = KitOptions(**{name: value for name, value in vars(arguments).items() if name != "out"})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = run_kit(options, lambda line: print(line, file=sys.stderr, flush=True), partial(_keep, arguments.out))
    # Engines for this device must pass; engines for other generations, and PyTorch, are experiments.
    engine_rows = [*(row for row in results.tries if row.kind == "engine"), *results.carried]
    bad_count = sum(row.outcome not in _PASSING for row in engine_rows)
    print(
        f"{arguments.out}: {len(results.tries)} tried, {len(results.skipped)} not, {len(results.carried)} "
        f"carried; {bad_count} bad"
    )
    return 1 if bad_count else 0


def _keep(path: Path, results: Results) -> None:
    """Write the results by replacing the file, which is thus complete at any moment."""
    part_path = path.with_name(f"{path.name}.part")
    part_path.write_bytes(results.to_bytes())
    part_path.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
