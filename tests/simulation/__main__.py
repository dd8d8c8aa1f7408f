"""Runs seeds of the simulation, side by side, and goes on where an earlier run was stopped.

python -m tests.simulation                     a million seeds; however it is stopped, the next call goes on, and begins
                                               anew if a module that a seed runs has changed
python -m tests.simulation --from 98 --to 99   one seed; prints the shortest trace of a failure
python -m tests.simulation --planted           each planted bug, until a seed shows it
"""

import argparse
import ast
import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path

from tests.one_thread import ROOMS
from tests.simulation.mutants import MUTANTS
from tests.simulation.runs import Failure, beginning, run_seed, shortest

_PART = 50
STATE = Path("build/simulation.json")
# Seconds between two lines of progress where nobody looks on.
_LINE_S = 60.0


@dataclass(frozen=True)
class Progress:
    """How far the seeds are. sources: digest of the modules that a seed runs.  commit: that they were run on, for
    people.  next: the first seed that was not run.  failed: seeds.  earlier: the progress on each other sources."""

    sources: str
    commit: str = ""
    next: int = 0
    failed: tuple[int, ...] = ()
    earlier: tuple[dict[str, object], ...] = ()

    @classmethod
    def read(cls, state: Path, sources: str) -> "Progress":
        """What a file has of these sources; none of them if it has other ones, which then are `earlier`."""
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        fresh_cls = cls(sources, git.stdout.strip())
        if not state.exists():
            return fresh_cls
        document = json.loads(state.read_text())
        if document.get("sources") == sources:
            return cls(**{**document, "failed": tuple(document["failed"]), "earlier": tuple(document["earlier"])})
        earlier_item = document.pop("earlier", ())
        return replace(fresh_cls, earlier=(*earlier_item, document))

    def write(self, state: Path) -> None:
        """Replace the file at once, so that a process that is killed leaves the old one or the new one."""
        state.parent.mkdir(exist_ok=True)
        fresh_path = state.with_suffix(".new")
        fresh_path.write_text(json.dumps(asdict(self), indent=1))
        fresh_path.replace(state)


def digest_of_sources() -> str:
    """Digest of the code, without docstrings and comments, of all modules of this tree that are loaded, which are those
    that a seed runs, without those that only start the seeds or plant bugs."""
    extra_texts = {"__main__", __name__, "tests.simulation.mutants"}
    names = [name for name in sys.modules if name.partition(".")[0] in (*ROOMS, "tests") and name not in extra_texts]
    files = {name: sys.modules[name].__file__ for name in sorted(names)}
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(f"{name}\n{_read_code(Path(file)) if file else ''}\n".encode())
    return digest.hexdigest()[:16]


def _read_code(file: Path) -> str:
    """The syntax tree of a module, without docstrings and comments."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=None)
    parser.add_argument("--to", dest="end", type=int, default=1_000_000)
    parser.add_argument(
        "--planted", nargs="?", const="", metavar="TEXT", help="look for the planted bugs whose names have this text"
    )
    options = parser.parse_args()
    for is_indexed in (False, True):  # before a bug is planted
        beginning(is_indexed)
    if options.planted is not None:
        return find_planted(options.planted, options.first or 0, options.end if options.end != 1_000_000 else 10_000)
    if options.first is not None:
        return run_seeds(Progress("", next=options.first), options.end, None)
    content = Progress.read(STATE, digest_of_sources())
    if content.earlier and not content.next:
        print(f"other sources passed earlier, which does not count for these: {content.earlier[-1]}")
    print(f"seeds {content.next} to {options.end} on sources {content.sources}, commit {content.commit}", flush=True)
    return run_seeds(content, options.end, STATE)


def run_seeds(begun: Progress, end: int, state: Path | None) -> int:
    """Run seeds on all cores, and print each failure; 1 if there was one, in this call or before."""
    done, start_s, rate_text = begun, time.monotonic(), 0.0
    with _pool() as pool:
        parts = ((start, min(start + _PART, end)) for start in range(begun.next, end, _PART))
        for last, failures in pool.imap(_run_part, parts):
            for failure in failures:
                show(failure)
            done = replace(done, next=last, failed=(*done.failed, *(failure.seed for failure in failures)))
            if state is not None:
                done.write(state)
            passed_s = time.monotonic() - start_s
            if sys.stderr.isatty() or passed_s > rate_text + _LINE_S:
                rate_text, rate = passed_s, (last - begun.next) / passed_s
                line = f"{last} seeds, {len(done.failed)} failed, {rate:.0f} per second, {(end - last) / rate:.0f} s"
                start, stop = ("\r", " left ") if sys.stderr.isatty() else ("", " left\n")
                print(f"{start}{line}", end=stop, file=sys.stderr, flush=True)
    total = end - begun.next if state is None else done.next
    print(f"\n{total - len(done.failed)} passed, {len(done.failed)} failed", *done.failed)
    return min(len(done.failed), 1)


def _pool() -> Pool:
    """A process for each core. What they share is left out of their collections of reference cycles."""
    gc.collect()
    gc.freeze()
    gc.disable()  # a seed leaves hardly any cycle
    return multiprocessing.get_context("fork").Pool(os.cpu_count(), _end_with_parent)


def _end_with_parent() -> None:
    """Have a process of the pool end when its parent is killed, where the system can do that."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run_part(part: tuple[int, int]) -> tuple[int, list[Failure]]:
    gc.collect()
    return part[1], [failure for seed in range(*part) if (failure := run_seed(seed))]


def show(failure: Failure) -> None:
    """Print why a seed failed, and later the shortest run that fails in the same way."""
    print(f"\nseed {failure.seed}: {failure.why}", flush=True)
    print("\n".join(shortest(failure).trace), flush=True)


def find_planted(text: str, first: int, end: int) -> int:
    """Look for each planted bug whose name has a text, seed by seed; 1 if one is not found."""
    planted_names = [(name, first, end) for name in MUTANTS if text in name]
    missed_number = 0
    with _pool() as pool:
        for name, seed in pool.imap_unordered(_find_one, planted_names):
            missed_number += seed is None
            print(f"{'not found' if seed is None else f'seed {seed}':>10}  {name}", flush=True)
    return min(missed_number, 1)


def _find_one(state: tuple[str, int, int]) -> tuple[str, int | None]:
    """A planted bug's name, and the first seed that shows it."""
    name, first_item, end = state
    for seed in range(first_item, end):
        if seed % _PART == 0:
            gc.collect()
        with MUTANTS[name]():
            trace = run_seed(seed)
        # A program that is wrong in itself shows nothing, nor does a bug that nobody planted.
        if trace and not re.search(r"(Type|Attribute|Name|Recursion)Error", trace.why) and not run_seed(seed):
            return name, seed
    return name, None


if __name__ == "__main__":
    sys.exit(main())
