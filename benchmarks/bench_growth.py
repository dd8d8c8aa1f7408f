"""How the CPU time of a build's steps grows with samples, layers and units.

    python -m benchmarks.bench_growth [--only samples layers units] [--factors 1 4 16] [--picture FILE.svg]

A synthetic transformer (benchmarks/large_model.py) is built in fp32 and int8, the latter searched, with one of the
three at 1, 4 and 16 times the start. The table has CPU seconds by step, as `enginesmith status RUN` has them, the
command's own, and the power of the factor that each grows by between the last two (1: as its work does, 0: not). The
picture needs `matplotlib`.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.large_model import TOKENS, write_model

GOLDEN = 16
# Targets of which each is a unit in fp32 and one in int8; the engines for GPUs are built and not run.
TARGETS = ("cpu", "t4", "a100", "a10", "l4", "h100", "rtx5090", "b200")
SPEC = """\
model: growth
source: {{onnx: model.onnx}}
inputs: {{x: {{dtype: float32, shape: [batch, {tokens}, {width}]}}}}
dims: {{batch: {{min: 1, opt: 1, max: 8}}}}
precisions: [fp32, int8]
targets: [{targets}]
calibration: {{data: calibration.npz}}
golden: {{data: golden.npz}}
quantization: {{smoothing: {smoothing}}}
validation: {{attribution: "off"}}
"""


@dataclass(frozen=True)
class Size:
    """What is built. layers: of the transformer.  samples: to calibrate with.  units: targets; each gives two units."""

    layers: int = 4
    samples: int = 32
    units: int = 1
    width: int = 64

    def times(self, what: str, factor: int) -> "Size":
        """With one of the three multiplied."""
        return replace(self, **{what: getattr(self, what) * factor})


def write_project(folder: Path, size: Size) -> None:
    """The model, its data and the spec."""
    write_model(folder, size.layers, size.width)
    generator = np.random.default_rng(0)
    for name, count in (("calibration", size.samples), ("golden", GOLDEN)):
        np.savez(folder / f"{name}.npz", x=generator.normal(size=(count, TOKENS, size.width)).astype(np.float32))
    smoothing = "none" if size.units > 1 else "auto"
    targets = ", ".join(TARGETS[: size.units])
    text = SPEC.format(tokens=TOKENS, width=size.width, targets=targets, smoothing=smoothing)
    (folder / "spec.yaml").write_text(text, encoding="utf-8")


def build(folder: Path) -> dict[str, float]:
    """CPU seconds by step of one build, and those of everything that is no step as 'command'."""
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    enginesmith("build", "spec.yaml", "--quiet", folder=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (run,) = json.loads(enginesmith("status", "--json", folder=folder))["runs"]
    spent_times = json.loads(enginesmith("status", run["run"], "--json", folder=folder))["spent"]
    steps = {item["step"]: float(item["cpu_s"]) for item in spent_times}
    whole_total = sum(after[:2]) - sum(usage_before[:2])
    return {**steps, "command": whole_total - sum(steps.values()), "whole": whole_total}


def enginesmith(*words: str, folder: Path) -> str:
    """The output of a command on the folder's registry. Exit code 1 (an engine failed its proof) is none of ours."""
    command = [sys.executable, "-m", "enginesmith", *words, "--registry", "registry"]
    ended_result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended_result.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: {ended_result.stderr[-2000:]}")
    return ended_result.stdout


def power(small: float, large: float, factor: float) -> float:
    """The exponent of `factor` by which a cost grew; not a number where it was too small to tell."""
    return math.log(large / small, factor) if min(small, large) >= 0.05 else math.nan


def show(what: str, factors: Sequence[int], costs: Sequence[Mapping[str, float]]) -> None:
    """Print the table of one of the three."""
    print(f"\n| {what} | {' | '.join(f'x{factor}' for factor in factors)} | grows by |")
    print("|---" * (len(factors) + 2) + "|")
    for step in sorted(costs[-1], key=lambda name: (name == "whole", -costs[-1][name])):
        row = [cost.get(step, 0.0) for cost in costs]
        last = power(row[-2], row[-1], factors[-1] / factors[-2])
        print(f"| {step} | {' | '.join(f'{cost:.2f}' for cost in row)} | {'' if math.isnan(last) else f'{last:.2f}'} |")


def draw(path: Path, found: Mapping[str, Mapping[int, Mapping[str, float]]]) -> None:
    """Write a picture of CPU seconds over the factor, for each of the three; steps below 0.3 s are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 3.6), layout="constrained")
    for axes, (label, costs) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        factors = list(costs)
        for step in sorted({step for cost in costs.values() for step in cost}):
            if (row := [costs[factor].get(step, 0.0) for factor in factors])[-1] >= 0.3:
                axes.loglog(factors, row, marker="o", linewidth=2.5 if step == "whole" else 1, label=step)
        axes.loglog(factors, [costs[factors[0]]["whole"] * factor for factor in factors], "k:", label="its work")
        axes.set(title=label, xlabel="times", ylabel="CPU s", xticks=factors, xticklabels=factors)
        axes.minorticks_off()
        axes.legend(fontsize=6)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print a table for each of the three."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_growth", description="How a build's steps grow.")
    parser.add_argument("--only", nargs="*", default=["samples", "layers", "units"])
    parser.add_argument("--factors", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    results = {label: dict[int, Mapping[str, float]]() for label in options.only}
    for label, costs in results.items():
        for factor in (factor for factor in options.factors if label != "units" or factor <= len(TARGETS)):
            with tempfile.TemporaryDirectory() as name:
                write_project(Path(name), Size().times(label, factor))
                costs[factor] = build(Path(name))
                print(f"{label} x{factor}: {costs[factor]['whole']:.1f} CPU s", file=sys.stderr)
        show(label, list(costs), list(costs.values()))
    if options.picture:
        draw(options.picture, results)


if __name__ == "__main__":
    main()
