"""What the pipeline costs over the same steps in a straight-line script, and what a run with nothing to do costs.

Both sides run in turn, in fresh processes with fresh folders; wall and CPU time include every child process. Prints
one line per example and a ratio; nothing here is a test. Usage: python -m benchmarks.bench_pipeline [EXAMPLE ...]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("digits", "encoder")


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, its children included."""

    wall: float
    cpu: float


def measure(command: Sequence[object], right: Sequence[int] = (0,)) -> Cost:
    """Run a command to its end; its own output is thrown away. right: exit codes that are no error.

    Modules are compiled once, as those of an installed package are, whatever this environment says.
    """
    compiled_values = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    usage_before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(list(map(str, command)), check=False, capture_output=True, cwd=ROOT, env=compiled_values)
    if result.returncode not in right:
        result.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(time.perf_counter() - start_s, sum(after[:2]) - sum(usage_before[:2]))


def one_round(spec: Path) -> dict[str, Cost]:
    """The script, the pipeline on an empty registry, and the pipeline again."""
    with tempfile.TemporaryDirectory() as folder:
        registry, straight = Path(folder) / "registry", Path(folder) / "straight"
        straight.mkdir()
        build = [sys.executable, "-m", "enginesmith", "build", spec, "--registry", registry, "--runner", "inprocess"]
        return {
            "script": measure([sys.executable, ROOT / "benchmarks" / "straight_line.py", spec, straight]),
            "pipeline": measure(build),
            "cached": measure(build),
        }


def summary(rounds: Sequence[dict[str, Cost]]) -> dict[str, float]:
    """Medians, and the median of the ratios round by round."""

    def median(side: str, what: str) -> float:
        return round(statistics.median(getattr(one_round[side], what) for one_round in rounds), 2)

    def ratio(what: str) -> float:
        return round(statistics.median(getattr(o["pipeline"], what) / getattr(o["script"], what) for o in rounds), 2)

    sides = {f"{side}_{label}_s": median(side, label) for side in rounds[0] for label in ("wall", "cpu")}
    return {**sides, "pipeline_over_script_wall": ratio("wall"), "pipeline_over_script_cpu": ratio("cpu")}


def main() -> None:
    """Run every example and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", default=EXAMPLES, help="default: digits encoder")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    runs, load = options.runs, os.getloadavg()[0]
    specs = {name: ROOT / "examples" / name / f"{name}.yaml" for name in options.examples}
    figures = {name: summary([one_round(spec) for _ in range(runs)]) for name, spec in specs.items()}
    print(json.dumps({"runs": runs, "load_before": round(load, 1), "cpus": os.cpu_count(), **figures}, indent=2))


if __name__ == "__main__":
    main()
