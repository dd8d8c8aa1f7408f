"""What the proof catches and what it cries wolf at: `python -m benchmarks.bench_proof`, or `make proof`.

Every fault of tests/faults/plants.py and sessions.py in every family of networks (tests/faults/families.py), precision
and seed where it has a place; engines that are right but not equal over other seeds; the canary's cells; and the faults
of `python -m tests.faults`. `--write` puts the tables into docs/reference/faults.md.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.campaign import Alarms, Outcome, alarms, outcomes
from tests.faults.families import FAMILIES
from tests.faults.proof_table import PAGE, Honest, alarm_rows, fault_rows, missed, with_tables


def quietly(
    work: Callable[[Path, str, int], Iterator[Outcome] | Iterator[Alarms]], item: tuple[str, int]
) -> list[object]:
    """One model's part of the campaign, in a folder of its own; what jobs print is dropped."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return list(work(Path(folder) / "model", *item))


def spread(
    work: Callable[..., Iterator[object]], families: Sequence[str], seeds: Iterable[int], workers: int
) -> Iterator[object]:
    """All parts over processes, in order; progress on stderr."""
    items = [(family, seed) for seed in seeds for family in families]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for index, outcome in enumerate(pool.map(partial(quietly, work), items), 1):
            print(f"\r{work.__name__}: {index} of {len(items)} models", end="", file=sys.stderr, flush=True)
            yield from outcome
    print(file=sys.stderr)


def main() -> None:
    """Plant, count, print; exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="of each family, with faults")
    parser.add_argument("--clean", type=int, default=100, help="seeds of each family without one")
    parser.add_argument("--family", action="append", choices=[*FAMILIES], help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="the tables into docs/reference/faults.md")
    chosen = parser.parse_args()
    families = chosen.family or [*FAMILIES]
    outcomes_found = list(spread(outcomes, families, range(chosen.seeds), chosen.workers))
    clean_spread = list(spread(alarms, families, range(5000, 5000 + chosen.clean), chosen.workers))
    tables = fault_rows(outcomes_found, Honest(clean_spread)), alarm_rows(clean_spread)
    print("\n".join(tables))
    if chosen.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), *tables), encoding="utf-8")
    if missed_names := missed(outcomes_found, clean_spread):
        sys.exit("\n".join(missed_names))


if __name__ == "__main__":
    main()
