"""How often the canary's judge is wrong, on simulated canaries: `python -m benchmarks.bench_canary [--simulations N]`.

For each cell of `tests.validation.canary.cells`, in percent. What is named wrong may be at most 5: a candidate exactly
at a margin, or beyond it, that passes, judged by that criterion alone; an equal one that fails, with all criteria. How
often an equal one passes depends on how much data there is.
"""

import argparse

from tests.validation.canary.cells import CELLS, errors_of


def main() -> None:
    """Count and print, one line per cell and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--requests", type=int, nargs="+", default=[5000])
    parser.add_argument("--cells", nargs="+", choices=CELLS, metavar="CELL", default=list(CELLS))
    chosen = parser.parse_args()
    print(f"{chosen.simulations} canaries per cell and number of requests, in percent")
    for cell in chosen.cells:
        for count in chosen.requests:
            rates = errors_of(cell, count, chosen.simulations)
            shown = " | ".join(f"{name} {100 * rate:.1f}" for name, rate in rates.items())
            print(f"{cell}, {count} requests: {shown}", flush=True)


if __name__ == "__main__":
    main()
