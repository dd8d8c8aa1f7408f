"""Changes the product in 80 places, one at a time, and says which changes no test notices: `python -m tests.mutation`.

The places exist today and in the commit `BEGUN`, whose first digits are the seed. A copy of the tree below
build/mutation holds all changes; the variable MUTANT turns one on. One run of the tests that are not slow, or of those
that are named, tries each test on the changes that it reaches (`recorder`). What lives then is tried in a process of
its own on its mirrored test files and the nearest tests that reach it. Results are stored in build/mutation.json, so
that a run that was stopped goes on; `--again` tries what lives on today's tests.

`python -m tests.mutation PATH...` changes these product files and folders in 20 places instead, tries the changes on
the mirrored test files, or on the tests of their folder, and stores nothing; `--seed` and `--places` draw others.
"""

import argparse
import ast
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.mutation.sites import NEW_NAME, OLD_NAME, QUOTAS, Site, choose, find, plant
from tests.mutation.switch import NO_MUTANT

ROOT = Path(__file__).parents[2]
BEGUN = "04fcb370"
SEED = int(BEGUN, 16)
# On their way out while this was written.
LEFT_OUT = (
    "pipeline/cache_server/", "validation/load/", "validation/plots/", "feed", "notifications", "grammar",
    "sampler",
)  # fmt: skip
# Tests of one mutant in a process of its own, and how much slower than on record is stuck.
MOST_TESTS, STUCK = 100, 10.0


@dataclass(frozen=True)
class Place:
    """A planted tree, and the folder of what its tests recorded."""

    tree: Path
    record: Path
    switch: str

    def pytest(self, folder: Path, words: Iterable[str], limit_s: float, mutant: int | str = "") -> int:
        """The exit code of one run of pytest in the tree, which records into `folder`; 124: it took too long."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "arguments").write_text("\n".join(words))
        variables = {
            "PYTHONPATH": str(self.tree), "MUTATION_RECORD": str(folder), "MUTATION_SWITCH": self.switch,
            "MUTANT": str(mutant), "MUTANT_FIXTURES": str(mutant),
        }  # fmt: skip
        options = ["-p", "tests.mutation.recorder", "-p", "no:cacheprovider", "-q", f"--basetemp={folder / 'tmp'}"]
        command = [sys.executable, "-m", "pytest", *options, f"@{folder / 'arguments'}"]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.tree, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                shutil.rmtree(folder / "tmp", ignore_errors=True)


@dataclass
class Record:
    """Which contexts (a test, a fixture, an import) reach which site, what each test was like, and what killed whom."""

    reached: dict[int, set[str]] = field(default_factory=dict)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    killed: dict[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        record = cls()
        for line in _lines(folder, "sites"):
            number, _, context = line.partition("\t")
            record.reached.setdefault(int(number), set()).add(context)
        record.tests = {test["test"]: test for test in map(json.loads, _lines(folder, "tests"))}
        record.killed = {int(line.partition("\t")[0]): line.partition("\t")[2] for line in _lines(folder, "killed")}
        return record

    def reaching(self, number: int) -> list[str]:
        """The tests that reach a site, and pass without its mutant."""
        contexts = self.reached.get(number, set())
        files = {context.partition(" ")[2] for context in contexts if context.startswith("import ")}
        return [
            name for name, test in self.tests.items() if test["result"] == "passed"
            and (name in contexts or name.partition("::")[0] in files or contexts & {*test["fixtures"]})
        ]  # fmt: skip

    def seconds(self, name: str) -> float:
        """How long the tests of a file, or one, took."""
        return sum((test["seconds"] for site, test in self.tests.items() if site.startswith(name)), 0.0)


def _lines(folder: Path, kind: str) -> list[str]:
    return [line for path in sorted(folder.rglob(f"{kind}-*")) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Trial:
    """One mutant, in processes of its own."""

    place: Place
    record: Record
    number: int
    site: Site

    def run(self) -> dict[str, object]:
        """What became of the mutant: the test that fails with it, again fails with it, and passes without."""
        tests, files = self.record.reaching(self.number), mirrored(self.site.path, self.place.tree)
        other_tests = sorted((test for test in tests if test.partition("::")[0] not in files), key=self._distance)
        words = [*files, *other_tests[:MOST_TESTS]]
        failing_names = [name for name, test in self.record.tests.items() if test["result"] == "failed"]
        while words and (name := self._first_failed(words, failing_names)):
            if self._fails([name], self.number) and not self._fails([name], None):
                return {"is": "killed", "by": name}
            if name in failing_names:
                break
            failing_names.append(name)
        return {"is": "survived" if tests else "not reached", "tests": len(tests)}

    def _distance(self, test: str) -> tuple[int, float]:
        pairs = zip(Path(test).parts[1:], Path(self.site.module).parts, strict=False)
        return -len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]), self.record.seconds(test)

    def _first_failed(self, words: Sequence[str], left_out: Sequence[str]) -> str:
        if not self._fails([*words, *(f"--deselect={name}" for name in left_out)], self.number):
            return ""
        names = [name for name, test in Record.read(self._folder).tests.items() if test["result"] == "failed"]
        current_path = self._folder / "current-alone"
        return next(iter(names), "") or (current_path.read_text() if current_path.exists() else "") or words[0]

    @property
    def _folder(self) -> Path:
        return self.place.tree.parent / f"mutant-{self.number}"

    def _fails(self, words: Sequence[str], mutant: int | None) -> bool:
        limit_s = 300.0 + STUCK * sum(map(self.record.seconds, words))
        options = ["-x", "-n0", f"--timeout={limit_s / 2:.0f}"]
        return self.place.pytest(
            self._folder, [*options, *words], limit_s, NO_MUTANT if mutant is None else mutant
        ) not in (0, 5)


def mirrored(module: str, tree: Path) -> list[str]:
    path = Path(module)
    folder, name = tree / "tests" / path.parent, path.parent.name if path.stem == "__init__" else path.stem
    files = [*folder.glob(f"test_{name}.py"), *folder.glob(f"test_{name}_*.py"), *(folder / name).glob("test_*.py")]
    return [str(file.relative_to(tree)) for file in sorted(files)]


def packages() -> list[str]:
    return [NEW_NAME if (ROOT / NEW_NAME).exists() else OLD_NAME, "builders", "validation", "pipeline"]


def chosen() -> dict[int, Site]:
    """The sites by number, as they are in today's tree: one that goes leaves the others their numbers."""
    today_texts = {
        str(path.relative_to(ROOT)): path.read_text() for name in packages() for path in (ROOT / name).rglob("*.py")
    }
    command = ["git", "archive", BEGUN, OLD_NAME, "builders", "validation", "pipeline"]
    packed_stdout = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed_stdout)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.name.endswith(".py")}
        begun_values = {name: file.read().decode() for name, file in files.items() if file}
    later_sites, current_sites = (
        [
            site
            for path, text in texts.items()
            if not any(part in path for part in LEFT_OUT)
            for site in find(text, path)
        ]
        for texts in (begun_values, today_texts)
    )
    known_sites = {*later_sites}
    return {site.number(SEED): site for site in choose([site for site in current_sites if site in known_sites], SEED)}


def of_files(paths: Iterable[Path], seed: int, places: int) -> dict[int, Site]:
    """About so many sites of the named product files and folders by number, as many of each kind as of the stored."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    sites = [site for file in files for site in find(file.read_text(), str(file.resolve().relative_to(ROOT)))]
    quotas = {kind: round(places * quota / sum(QUOTAS.values())) for kind, quota in QUOTAS.items()}
    return {site.number(seed): site for site in choose(sites, seed, quotas)}


def planted(sites: Mapping[int, Site], home: Path = ROOT / "build" / "mutation", seed: int = SEED) -> Place:
    """A copy of the work tree below `home` that holds every mutant."""
    package = packages()[0]
    place = Place(home / "tree", home / "record", f"{package}.mutant_switch")
    result = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in result.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (place.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place.tree / name)
    shutil.copy(Path(__file__).with_name("switch.py"), place.tree / package / "mutant_switch.py")
    for module in {site.module for site in sites.values()}:
        local_sites = [site for site in sites.values() if site.module == module]
        path = local_sites[0].path
        (place.tree / path).write_text(plant((ROOT / path).read_text(), local_sites, seed, place.switch))
    return place


def table(sites: Mapping[int, Site], results: Mapping[str, Mapping[str, object]], seed: int = SEED) -> str:
    """What became of the mutants of each package, and those that no test noticed."""
    states = ("killed", "survived", "not reached", "open")
    results_by_number = {number: results.get(repr(site), {"is": "open"}) for number, site in sites.items()}
    counts = Counter((site.path.partition("/")[0], results_by_number[number]["is"]) for number, site in sites.items())
    names = sorted({name for name, _ in counts})
    rows = [("", *states), *((name, *(counts[name, state] for state in states)) for name in names)]
    rows.append(("all", *(sum(counts[name, state] for name in names) for state in states)))
    lines = ["".join(f"{cell!s:>13}" for cell in row) for row in rows]
    for number, site in sites.items():
        if results_by_number[number]["is"] != "killed":
            change = f"{ast.unparse(site.node)}  ->  {ast.unparse(site.mutant(seed))}"
            lines.append(f"{number} {site.path}:{site.line} {results_by_number[number]}: {change}")
    return "\n".join(lines)


def tried(
    place: Place, record: Record, sites: Mapping[int, Site], results: Mapping[str, Mapping[str, object]],
    over: Sequence[str], jobs: int,
) -> Iterator[tuple[int, dict[str, object]]]:  # fmt: skip
    """Each mutant whose result is not `over` yet, tried in processes of its own: its number and result as it ends."""
    open_sites = [at for at, site in sites.items() if results.get(repr(site), {}).get("is") not in over]
    with ThreadPoolExecutor(jobs) as pool:
        trials = {pool.submit(Trial(place, record, at, sites[at]).run): at for at in open_sites}
        for trial in as_completed(trials):
            print(trials[trial], sites[trials[trial]].path, trial.result(), flush=True)
            yield trials[trial], trial.result()


def try_files(sites: Mapping[int, Site], home: Path, jobs: int, seed: int) -> None:
    """Plants the sites in a copy of the tree, runs the tests that mirror their modules, and prints the table."""
    modules = {site.path for site in sites.values()}
    tests = sorted({test for module in modules for test in mirrored(module, ROOT) or [f"tests/{Path(module).parent}"]})
    if not sites:
        raise SystemExit("nothing to change")
    place = planted(sites, home, seed)
    place.pytest(place.record / "all", [f"-n{jobs}", *tests], 3600.0)
    record = Record.read(place.record)
    results: dict[str, dict[str, object]] = {
        repr(sites[number]): {"is": "killed", "by": value} for number, value in record.killed.items()
    }
    results |= {
        repr(sites[number]): result for number, result in tried(place, record, sites, results, ("killed",), jobs)
    }
    print(table(sites, results, seed))


def main() -> None:
    """Plant, run the tests, try what lives in processes of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="product files or folders to change, and not the 80 places")
    parser.add_argument("--seed", type=int, default=SEED, help="of the places in the paths")
    parser.add_argument("--places", type=int, default=20, help="how many in the paths")
    parser.add_argument("--again", action="store_true", help="forget what survived; run no tests first")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.paths:
        with tempfile.TemporaryDirectory() as home:
            sites = of_files(options.paths, options.seed, options.places)
            try_files(sites, Path(home), options.jobs, options.seed)
        return
    sites, stored_path = chosen(), ROOT / "build" / "mutation.json"
    place = planted(sites)
    if not (options.again or (place.record / "all").exists()):
        place.pytest(place.record / "all", [f"-n{options.jobs}", "--timeout=1500"], 4 * 3600.0)
    record = Record.read(place.record)
    results = json.loads(stored_path.read_text()) if stored_path.exists() else {}
    results |= {repr(sites[number]): {"is": "killed", "by": value} for number, value in record.killed.items()}
    excess_names = ("killed",) if options.again else ("killed", "survived", "not reached")
    for number, result in tried(place, record, sites, results, excess_names, options.jobs):
        results[repr(sites[number])] = result
        stored_path.write_text(json.dumps(results, indent=1))
    stored_path.write_text(json.dumps(results, indent=1))
    print(table(sites, results))


if __name__ == "__main__":
    main()
