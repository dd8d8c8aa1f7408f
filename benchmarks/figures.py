"""One table of figures from one run: `python -m benchmarks.figures [NAME ...] [--write]`.

Runs each benchmark of `FIGURES` once, one after the other, and prints a Markdown table with the machine. A figure is
the worst that its pattern finds in what its command prints. NAME: only these benchmarks; the other cells say that they
were not measured in this run. `--write` also puts the table into docs/performance.md, in place of the one before.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
HEADING = "## One run"
NOT_MEASURED = "not measured in this run"


@dataclass(frozen=True)
class Figure:
    """command: a benchmark and its arguments.  pattern: a number in its output; of two numbers, the first over the
    second.  target: the bar.  at_least: whether more is better."""

    what: str
    command: str
    pattern: str
    unit: str
    target: float
    at_least: bool = False

    def cells(self, output: str | None) -> str:
        """'1.36 times | 1.3 times, missed': measured, and the target. output: None if the command did not run, '' where
        it failed."""
        target_text = f"{self.target:g}{self.unit}"
        numbers = [match.groups() for match in re.finditer(self.pattern, output or "")]
        if not numbers:
            return f"{NOT_MEASURED if output is None else 'failed'} | {target_text}"
        values = [float(first_number) / (float(second[0]) if second else 1.0) for first_number, *second in numbers]
        worst_value = min(values) if self.at_least else max(values)
        is_met = worst_value >= self.target if self.at_least else worst_value <= self.target
        return f"{worst_value:.3g}{self.unit} | {target_text}, {'met' if is_met else 'missed'}"


def _build(example: str, key: str) -> str:
    return rf'"{example}": {{[^}}]*"{key}": ([\d.]+)'


PIPELINE, DISPATCH = "bench_pipeline --runs 3", "bench_dispatch --isolated= --in-worker 10000 --mib 1"
FIGURES = (
    Figure("build of digits, over a script", PIPELINE, _build("digits", "pipeline_over_script_cpu"), " times", 1.3),
    Figure("build of encoder, over a script", PIPELINE, _build("encoder", "pipeline_over_script_cpu"), " times", 1.3),
    Figure("build, nothing to do, CPU", PIPELINE, _build("(?:digits|encoder)", "cached_cpu_s"), " s", 0.5),
    Figure("10,000 builds over bare Ray tasks", DISPATCH, r'"enginesmith over bare build": ([\d.]+)', " times", 1.5),
    Figure("added to ONNX Runtime's call", "bench_sessions onnxruntime", r"onnxruntime .*\| (-?[\d.]+) \|", " µs", 10),
    Figure("added by the router", "bench_router", r"\| router[^|]*\| [\d.]+ \| (-?[\d.]+) \|", " µs", 20),
    Figure(
        "drift, one thread, CPU over reading", "bench_drift",
        r'(?s)"read": {\s*"gb_per_cpu_s": ([\d.]+).*?one thread": {\s*"gb_per_cpu_s": ([\d.]+)', " times", 3.2,
    ),
    Figure(
        "int8 ResNet-18 over fp32, batch 1", "bench_cpu_int8 resnet18", r"batch 1  int8 full .* ([\d.]+) x", " times",
        3.5, at_least=True,
    ),
)  # fmt: skip


def table(outputs: Mapping[str, str]) -> str:
    """The section of the page. outputs: command -> what it printed."""
    rows = [f"| {item.what} | {item.cells(outputs.get(item.command))} | `{item.command}` |" for item in FIGURES]
    return "\n".join(["| what | measured | target | `python -m benchmarks.` |", "|---|---|---|---|", *rows])


def machine() -> str:
    """The CPU, cores, load and versions, in a sentence."""
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "torch"))
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip()}, {model[1] if model else platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, {versions}."
    )


def printed(words: list[str]) -> str:
    """The output of a benchmark; '' where it failed. Exit 1 without an error says that it missed a bar of its own."""
    done_result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done_result.returncode in (0, 1) and "Traceback" not in done_result.stderr:
        return done_result.stdout
    print(done_result.stderr, file=sys.stderr)
    return ""


def main() -> None:
    """Run, print, and with --write change the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as bench_router; default: all")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    outputs, machine_text = dict[str, str](), machine()
    with suppress(KeyboardInterrupt):  # what was measured before Ctrl-C is shown
        for command in dict.fromkeys(figure.command for figure in FIGURES):
            if not options.names or command.split()[0] in options.names:
                print(f"python -m benchmarks.{command}", file=sys.stderr, flush=True)
                outputs[command] = printed([sys.executable, "-m", *f"benchmarks.{command}".split()])
                for figure in (figure for figure in FIGURES if figure.command == command):
                    print(f"  {figure.what}: {figure.cells(outputs[command])}", file=sys.stderr, flush=True)
    section = f"{HEADING}\n\n{machine_text}\n\n{table(outputs)}\n"
    print(section)
    if options.write:
        text_before, _, after = PAGE.read_text(encoding="utf-8").partition(f"{HEADING}\n")
        rest = "".join(after.partition("\n## ")[1:]).lstrip("\n")
        PAGE.write_text("\n".join(filter(None, [f"{text_before.rstrip()}\n", section, rest])), encoding="utf-8")


if __name__ == "__main__":
    main()
