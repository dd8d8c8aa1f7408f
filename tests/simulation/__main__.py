"""Runs seeds of the simulation, side by side, and goes on where an earlier run was stopped.

python -m tests.simulation                     a million seeds; Ctrl-C keeps how far it came
python -m tests.simulation --from 98 --to 99   one seed; prints the shortest trace of a failure
python -m tests.simulation --planted           each planted bug, until a seed shows it
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.pool import Pool
from pathlib import Path

from tests.simulation.mutants import MUTANTS
from tests.simulation.runs import Failure, beginning, run_seed, shortest

_PART = 50
STATE = Path("build/simulation.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=None)
    parser.add_argument("--to", dest="end", type=int, default=1_000_000)
    parser.add_argument(
        "--planted", nargs="?", const="", metavar="TEXT", help="look for the planted bugs whose names have this text"
    )
    given = parser.parse_args()
    beginning()
    if given.planted is not None:
        return find_planted(given.planted, given.first or 0, given.end if given.end != 1_000_000 else 10_000)
    resumes = given.first is None
    first = json.loads(STATE.read_text())["next"] if resumes and STATE.exists() else given.first or 0
    return run_seeds(first, given.end, STATE if resumes else None)


def run_seeds(first: int, end: int, state: Path | None) -> int:
    """Run seeds on all cores, and print each failure; 1 if there was one."""
    began, failed = time.monotonic(), 0
    with _pool() as pool:
        parts = ((start, min(start + _PART, end)) for start in range(first, end, _PART))
        for last, failures in pool.imap(_run_part, parts):
            for failure in failures:
                failed += 1
                show(failure)
            if state is not None:
                state.parent.mkdir(exist_ok=True)
                state.write_text(json.dumps({"next": last}))
            if sys.stderr.isatty():
                rate = (last - first) / (time.monotonic() - began)
                print(f"\r{last} seeds, {failed} failed, {rate:.0f} a second ", end="", file=sys.stderr, flush=True)
    print(f"\n{end - first - failed} passed, {failed} failed")
    return min(failed, 1)


def _pool() -> Pool:
    """A process for each core. What they share is left out of their collections of reference cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    return multiprocessing.get_context("fork").Pool(os.cpu_count())


def _run_part(part: tuple[int, int]) -> tuple[int, list[Failure]]:
    return part[1], [failure for seed in range(*part) if (failure := run_seed(seed))]


def show(failure: Failure) -> None:
    """Print the shortest run that fails in the same way."""
    small = shortest(failure)
    print(f"\nseed {failure.seed}: {small.why}")
    print("\n".join(small.trace))


def find_planted(text: str, first: int, end: int) -> int:
    """Look for each planted bug whose name has a text, seed by seed; 1 if one is not found."""
    wanted = [(name, first, end) for name in MUTANTS if text in name]
    missed = 0
    with _pool() as pool:
        for name, seed, lines in pool.imap_unordered(_find_one, wanted):
            missed += seed is None
            print(f"{'not found' if seed is None else f'seed {seed}, {lines} lines':>22}  {name}", flush=True)
    return min(missed, 1)


def _find_one(wanted: tuple[str, int, int]) -> tuple[str, int | None, int]:
    """The first seed that shows a planted bug, and how many lines its shortest trace has."""
    name, first, end = wanted
    for seed in range(first, end):
        with MUTANTS[name]():
            found = run_seed(seed)
        if found and "TypeError" not in found.why and not run_seed(seed):  # else it is a bug that nobody planted
            with MUTANTS[name]():
                return name, seed, len(shortest(found).trace)
    return name, None, 0


def _same_order_of_sets() -> None:
    """Start anew with the hashes that make a seed the same run everywhere: the product iterates over sets of texts."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )


if __name__ == "__main__":
    _same_order_of_sets()
    sys.exit(main())
