"""How often the canary's judge is wrong, on simulated canaries: `python -m benchmarks.bench_canary [--write]`.

For each cell of `tests.validation.canary.cells`, in percent. What is named wrong may be at most 5: a candidate exactly
at a margin, or beyond it, that passes, judged by that criterion alone; an equal one that fails, with all criteria. How
often an equal one passes depends on how much data there is. Then logs that end, or are of other hours
(`simulated_logs`): how many of them got a verdict that is not right. `--write` puts the tables into
docs/concepts/canary-statistics.md. `--rows FILE` keeps each row there once it is counted, and counts none again that is there: for
parts, and for a run that was ended. Rows of another judge do not belong there: delete the file when the judge changes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tests.faults.proof_table import with_tables
from tests.validation.canary.cells import CELLS, errors_of
from tests.validation.canary.simulated_logs import LIMITS, SIMULATIONS
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of
from validation.statistics.rates import lower

PAGE = Path(__file__).parents[1] / "docs/concepts/canary-statistics.md"
START, END = "<!-- cells: written by `python -m benchmarks.bench_canary --write` -->\n\n", "\n<!-- end of cells -->\n"
BAR, SURE = 0.05, 0.01
# Another seed than the judge was made with.
SEED = 23
LOG_REQUESTS, LOG_SIMULATIONS = 4000, 100
# How the names of cells end that compare unpaired requests.
UNPAIRED = ", unpaired"
Row = tuple[str, int, dict[str, float]]


def cell_row(seed: int, simulations: int, item: tuple[str, int]) -> Row:
    """A cell with a number of requests, and its rates."""
    return (*item, errors_of(*item, simulations, seed))


def kept_rows(path: Path | None, simulations: int, seed: int) -> dict[tuple[str, int], Row]:
    """Rows of a file that were counted with these simulations and this seed, by cell and number of requests."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    found = [json.loads(line) for line in lines]
    return {
        (cell, count): (cell, count, rates)
        for of, start, cell, count, rates in found
        if (of, start) == (simulations, seed)
    }


def log_row(seed: int, name: str) -> Row:
    """Logs that end or are of other hours, and the share whose verdict is not right."""
    wrong = 0
    for index in range(LOG_SIMULATIONS):
        logs = SIMULATIONS[name](np.random.default_rng((seed, index)), LOG_REQUESTS)
        evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
        wrong += judge(evidence, LIMITS, seed=index, replicates=200).verdict not in logs.right
    return name, LOG_REQUESTS, {"wrong": wrong / LOG_SIMULATIONS}


def tables(rows: Sequence[Row], simulations: int) -> str:
    """One table for each set of columns, in percent: of wrong verdicts the highest rate of a kind, of the others those
    with the most requests, paired and unpaired."""
    found = []
    for columns in dict.fromkeys(tuple(rates) for _, _, rates in rows):
        mine = [row for row in rows if tuple(row[2]) == columns]
        found.append(_log_table(mine) if columns == ("wrong",) else _kind_table(mine))
    return f"{simulations} canaries a row, {LOG_SIMULATIONS} of logs; in percent.\n\n" + "\n".join(found)


def _kind_table(rows: Sequence[Row]) -> str:
    wrong = [name for name in rows[0][2] if name.startswith("wrong")]
    most = max(count for _, count, _ in rows)
    head = ("kind", *wrong, f"PASS, equal, {most:,} pairs", "unpaired")
    lines = [head, ("---",) * len(head)]
    for kind in dict.fromkeys(name.removesuffix(UNPAIRED) for name, _, _ in rows):
        rates = {(name, count): of for name, count, of in rows if name.removesuffix(UNPAIRED) == kind}
        passed = [rates[name, most]["PASS, equal"] if (name, most) in rates else None for name in (kind, kind + UNPAIRED)]
        highest = [max(of[name] for of in rates.values()) for name in wrong]
        lines.append((kind, *("" if rate is None else f"{100 * rate:.1f}" for rate in (*highest, *passed))))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _log_table(rows: Sequence[Row]) -> str:
    some = [(name, f"{100 * rates['wrong']:.1f}") for name, _, rates in rows if rates["wrong"]]
    lines = [("logs", "wrong verdict"), ("---", "---"), *some, (f"the other {len(rows) - len(some)} kinds", "0.0")]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def over(rows: Sequence[Row], simulations: int) -> list[str]:
    """Rates of wrong verdicts that are over the bar by more than chance would explain."""
    return [
        f"over {100 * BAR:.0f} %: {cell}, {count:,} requests, {name}: {100 * rate:.1f} %"
        for cell, count, rates in rows
        for name, rate in rates.items()
        if name.startswith("wrong") and lower(rate * simulations, simulations, SURE) > BAR
    ]


def main() -> None:
    """Count and print; exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--requests", type=int, nargs="+", default=[2000, 5000])
    parser.add_argument("--cells", nargs="+", choices=CELLS, metavar="CELL", default=list(CELLS))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="JSON lines that keep each row")
    parser.add_argument("--write", action="store_true", help="the tables into docs/concepts/canary-statistics.md")
    chosen = parser.parse_args()
    items = [(cell, count) for cell in chosen.cells for count in chosen.requests]
    kept = kept_rows(chosen.rows, chosen.simulations, chosen.seed)
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        left = [item for item in items if item not in kept]
        for row in pool.map(partial(cell_row, chosen.seed, chosen.simulations), left):
            kept[row[0], row[1]] = row
            print(f"{len(kept)} of {len(items)}: {row}", file=sys.stderr, flush=True)
            if chosen.rows:
                with chosen.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([chosen.simulations, chosen.seed, *row]) + "\n")
        rows = [kept[item] for item in items]
        logs = list(pool.map(partial(log_row, chosen.seed), SIMULATIONS))
    told = tables([*rows, *logs], chosen.simulations)
    print(told)
    if chosen.write:
        page = with_tables(PAGE.read_text(encoding="utf-8"), told, ends=(START, END))
        PAGE.write_text(page, encoding="utf-8")
    if wrong := [*over(rows, chosen.simulations), *over(logs, LOG_SIMULATIONS)]:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
