"""Runs seeds of the simulation, side by side, and goes on where an earlier run was stopped.

python -m tests.simulation                     a million seeds; Ctrl-C keeps how far it came
python -m tests.simulation --from 98 --to 99   one seed; prints the shortest trace of a failure
python -m tests.simulation --planted           each planted bug, until a seed shows it
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

from tests.simulation.mutants import MUTANTS
from tests.simulation.runs import Failure, beginning, run_seed, shortest

_PART = 50
STATE = Path("build/simulation.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=None)
    parser.add_argument("--to", dest="end", type=int, default=1_000_000)
    parser.add_argument("--planted", action="store_true", help="look for the planted bugs, in place of real ones")
    given = parser.parse_args()
    beginning()
    if given.planted:
        return find_planted(given.end if given.end != 1_000_000 else 10_000)
    resumes = given.first is None
    first = json.loads(STATE.read_text())["next"] if resumes and STATE.exists() else given.first or 0
    return run_seeds(first, given.end, STATE if resumes else None)


def run_seeds(first: int, end: int, state: Path | None) -> int:
    """Run seeds on all cores, and print each failure; 1 if there was one."""
    began, failed = time.monotonic(), 0
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        parts = ((start, min(start + _PART, end)) for start in range(first, end, _PART))
        for last, failures in pool.imap(_run_part, parts):
            for failure in failures:
                failed += 1
                show(failure)
            if state is not None:
                state.parent.mkdir(exist_ok=True)
                state.write_text(json.dumps({"next": last}))
            rate = (last - first) / (time.monotonic() - began)
            print(f"\r{last} seeds, {failed} failed, {rate:.0f} a second ", end="", file=sys.stderr, flush=True)
    print(f"\n{end - first - failed} passed, {failed} failed")
    return min(failed, 1)


def _run_part(part: tuple[int, int]) -> tuple[int, list[Failure]]:
    return part[1], [failure for seed in range(*part) if (failure := run_seed(seed))]


def show(failure: Failure) -> None:
    """Print the shortest run that fails in the same way."""
    small = shortest(failure)
    print(f"\nseed {failure.seed}: {small.why}")
    print("\n".join(small.trace))


def find_planted(most: int) -> int:
    """Look for each planted bug in at most so many seeds; 1 if one is not found."""
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        found = dict(pool.imap_unordered(_find_one, ((name, most) for name in MUTANTS)))
    for name, seed in found.items():
        print(f"{'not found' if seed is None else f'seed {seed}':>12}  {name}")
    return int(None in found.values())


def _find_one(wanted: tuple[str, int]) -> tuple[str, int | None]:
    name, most = wanted
    with MUTANTS[name]():
        return name, next((seed for seed in range(most) if run_seed(seed)), None)


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
