"""Another toolchain rehearsed over graphs of the zoo: all of them are served in one registry, for one `rehearse`."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.zoo.building import FIRST, init, make_model, write_requests
from benchmarks.zoo.packages import FOLDER, KNOWN

PLACE = FOLDER / "rehearsal"
HEAD = ("graph", "unit", "toolchain", "run", "SQNR, dB", "verdict")


def rehearse(names: Iterable[str], pins: Iterable[str], longest_s: float) -> None:
    """Build the graphs that are not served yet, with what is installed, in the first precision of their specs, in one
    process; then rehearse the versions `pins` with all that are served.

    longest_s: of each `init`; `build --all` and `rehearse` have no limit.

    The result is `rehearsal.json`. Raises SystemExit for an error of `rehearse`.
    """
    for name in names:
        if not (PLACE / "specs" / name).exists():
            print(f"{name}: {_draft(name, longest_s)}", flush=True)
    registry = ["--registry", str(PLACE / "registry")]
    command = [sys.executable, "-m", "enginesmith"]
    subprocess.run([*command, "build", "--all", str(PLACE / "specs"), *registry], check=False)  # some may fail
    words = [*(f"--toolchain={pin}" for pin in pins), *registry, "--json"]
    result = subprocess.run([*command, "rehearse", *words], check=False, stdout=subprocess.PIPE, text=True)
    if result.returncode not in (0, 1):
        raise SystemExit(result.returncode)
    (PLACE / "rehearsal.json").write_text(result.stdout, encoding="utf-8")
    for row in rows(json.loads(result.stdout)):
        print(" | ".join(row), flush=True)


def _draft(name: str, longest_s: float) -> str:
    """Write a graph's spec, with what it names, below `specs`; 'drafted', or why not."""
    graph = KNOWN["graphs"][name]
    try:
        model = make_model(name, graph)
        write_requests(model, graph)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:300]
    draft = init(model, [FIRST], longest_s)
    if draft.get("error"):
        return str(draft["error"])
    copy_narrow(model.parent, PLACE / "specs" / name)
    return "drafted"


def copy_narrow(folder: Path, place: Path) -> None:
    """Copy a drafted spec with what it names; the copy's spec is narrow. `place` is whole or not there."""
    aside = place.parents[1] / "unfinished"  # not below `specs`, all of which are built
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside, ignore=shutil.ignore_patterns("*.json", "*.txt", "registry"))
    spec = narrow((aside / "spec.yaml").read_text(encoding="utf-8"))
    (aside / "spec.yaml").write_text(spec, encoding="utf-8")
    place.parent.mkdir(exist_ok=True)
    aside.rename(place)


def narrow(spec: str) -> str:
    """A drafted spec with its first precision alone, whose engines are timed by the rehearsal alone."""
    return re.sub(r"(\nprecisions: \[[^],]*)[^]]*", r"\1", spec) + "\nvalidation: {latency: off}\n"


def rows(rehearsal: Mapping[str, Any]) -> Iterator[list[str]]:
    """For each unit: its SQNR with both toolchains, the verdict, the ratio of median latencies, the first reason."""
    for unit in rehearsal["units"]:
        old, new_cell, times = unit["old"], unit["new"], unit["times"]
        pins = rehearsal["pins"].items()
        versions = [
            f"{name} {old['toolchain'][name]} -> {version}" for name, version in pins if name in old["toolchain"]
        ]
        levels = ["?" if trial["sqnr_db"] is None else f"{trial['sqnr_db']:.0f}" for trial in (old, new_cell)]
        ratio = f"{times['ratio']:.2f} times the time" if times and times["ratio"] else ""
        verdict = ": ".join(filter(None, (unit["verdict"], ratio, unit["why"].partition(";")[0])))
        run = f"{rehearsal['created_at'][:10]}, {rehearsal['machine']['cpu']}"
        yield [unit["version"].partition("@")[0], unit["unit"], ", ".join(versions), run, " -> ".join(levels), verdict]


def read() -> list[list[str]]:
    """The rows of the last rehearsal; none without one."""
    path = PLACE / "rehearsal.json"
    return list(rows(json.loads(path.read_text(encoding="utf-8")))) if path.is_file() else []
