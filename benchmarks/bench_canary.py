"""How often the canary's judge is wrong, on simulated canaries: `python -m benchmarks.bench_canary [--write]`.

One row for each cell of `tests.validation.canary.cells`, and the logs of `simulated_logs` that end or are of other
hours in one row. At most 17 of 200 canaries of a cell may get a wrong verdict. `--write` puts the table into
docs/concepts/canary-statistics.md. `--rows FILE` keeps each row there and counts none again; delete that file when the
judge changes.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tests.faults.proof_table import with_tables
from tests.validation.canary.cells import CELLS, WRONG, count_verdicts
from tests.validation.canary.simulated_logs import LIMITS, SIMULATIONS
from validation.canary.judging.judge import judge
from validation.canary.judging.pairing import evidence_of

PAGE = Path(__file__).parents[1] / "docs/concepts/canary-statistics.md"
START, END = "<!-- cells: written by `python -m benchmarks.bench_canary --write` -->\n\n", "\n<!-- end of cells -->\n"
# The share of wrong verdicts of 200 that 5 % explain, chance aside; and of PASS that is asked of some equal candidates.
BAR, PASSES = 17 / 200, 0.9
# Another seed than the judge was made with.
SEED = 71993
LOG_REQUESTS, LOG_SIMULATIONS = 4000, 10
Verdicts = dict[str, int]


def row_of(seed: int, simulations: int, name: str) -> tuple[str, Verdicts]:
    """A cell, and how often each verdict came."""
    return name, count_verdicts(name, simulations, seed)


def wrong_logs(seed: int, name: str) -> int:
    """How many logs that end or are of other hours got a verdict that is not right."""
    wrong_number = 0
    for index in range(LOG_SIMULATIONS):
        logs = SIMULATIONS[name](np.random.default_rng((seed, index)), LOG_REQUESTS)
        evidence, _ = evidence_of(logs.candidate, logs.baseline, 15.0)
        wrong_number += judge(evidence, LIMITS, seed=index, replicates=200).verdict not in logs.right
    return wrong_number


def count_wrong(name: str, found: Verdicts) -> int:
    """How many verdicts of a cell are wrong."""
    return sum(found[verdict] for verdict in WRONG[CELLS[name].truth])


def table(rows: dict[str, Verdicts], wrong: int) -> str:
    """The rows as Markdown. wrong: how many logs got a wrong verdict."""
    columns = ("candidate", "truth", "PASS", "FAIL", "wrong")
    lines: list[tuple[str, ...]] = [
        (
            name,
            CELLS[name].truth,
            *(str(of[one_name]) for one_name in ("PASS", "FAIL")),
            str(count_wrong(name, of)),
        )
        for name, of in rows.items()
    ]
    count = len(SIMULATIONS) * LOG_SIMULATIONS
    logs = f"Of {count} simulated canaries of production logs, {wrong} got a wrong verdict."
    simulations = max(sum(of.values()) for of in rows.values())
    requests = next(iter(CELLS.values())).count
    head = f"Each row counts {simulations} canaries of {requests:,} requests; the rest is INSUFFICIENT.\n\n"
    head += f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{logs}\n"


def missed(rows: dict[str, Verdicts]) -> list[str]:
    """Cells that miss a bar, in words."""
    missed_seeds = []
    for name, of in rows.items():
        total = sum(of.values())
        if count_wrong(name, of) > BAR * total:
            missed_seeds.append(f"{name}: {count_wrong(name, of)} of {total} are wrong")
        if CELLS[name].passes and of["PASS"] < PASSES * total:
            missed_seeds.append(f"{name}: only {of['PASS']} of {total} PASS")
    return missed_seeds


def main() -> None:
    """Count and print; exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=200)
    parser.add_argument("--cells", nargs="+", choices=CELLS, metavar="CELL", default=list(CELLS))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="JSON lines that keep each row")
    parser.add_argument("--write", action="store_true", help="the table into docs/concepts/canary-statistics.md")
    chosen = parser.parse_args()
    lines = chosen.rows.read_text(encoding="utf-8").splitlines() if chosen.rows and chosen.rows.exists() else []
    finished_cells: dict[str, Verdicts] = dict(json.loads(line) for line in lines)
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        open_cells = [name for name in chosen.cells if name not in finished_cells]
        for name, row in pool.map(partial(row_of, chosen.seed, chosen.simulations), open_cells):
            finished_cells[name] = row
            print(f"{len(finished_cells)} of {len(chosen.cells)}: {name}: {row}", file=sys.stderr, flush=True)
            if chosen.rows:
                with chosen.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([name, row]) + "\n")
        wrong_total = sum(pool.map(partial(wrong_logs, chosen.seed), SIMULATIONS))
    rows = {name: finished_cells[name] for name in chosen.cells}
    text = table(rows, wrong_total)
    print(text)
    if chosen.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), text, ends=(START, END)), encoding="utf-8")
    if problems := missed(rows):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
