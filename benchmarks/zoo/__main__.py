"""Takes graphs of other people's packages the whole way: download, `enginesmith init`, `enginesmith build`, peers, a
page.

    python -m benchmarks.zoo [--only NAME ...] [--again] [--backends onnxruntime ...] [--no-peers] [--longest 300]
    python -m benchmarks.zoo --rehearse onnxruntime==1.32.0 [--only NAME ...]
    python -m benchmarks.zoo --write

Packages are downloaded by pip into build/zoo, checked by digest, and only their graphs unpacked. Small ones come first.
What came of a graph is JSON in its folder there: `result-BACKEND.json`, and `peers.json` of engines and other
quantizers on unseen inputs. A graph that has a result is left out but with --again. --write builds nothing: docs/zoo.md
gets a row for each result, and keeps those of its rows that have none here. Other backends come after onnxruntime, in
an environment that has them: `--no-peers --backends iree xla tvm aotinductor tensorrt-rtx`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.zoo import environment
from benchmarks.zoo.building import FIRST, build, init, make_model, write_requests
from benchmarks.zoo.packages import FOLDER, KNOWN
from benchmarks.zoo.page import read, write_page
from benchmarks.zoo.rehearsal import rehearse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"


def main() -> int:
    """Exit code 1 where a command ended in a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description="Build public models and write docs/zoo.md."
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of graphs; default: all")
    parser.add_argument("--again", action="store_true", help="also graphs that have a result")
    parser.add_argument("--backends", nargs="*", default=[FIRST], help="default: %(default)s; none: the peers alone")
    parser.add_argument("--no-peers", action="store_true", help="leave other quantizers out")
    limit_text = "seconds that a command may take; with --rehearse, that each `init` may take: the rest has no limit"
    parser.add_argument("--longest", type=float, default=1800, help=limit_text)
    parser.add_argument(
        "--rehearse", nargs="+", metavar="NAME==VERSION", help="serve the graphs, and rehearse these versions"
    )
    parser.add_argument("--write", action="store_true", help="build nothing, write docs/zoo.md of all results")
    options = parser.parse_args()
    if options.write:
        write_page(PAGE)
        return 0
    names = _in_order(KNOWN["graphs"].keys() if options.only is None else options.only)
    if options.rehearse:
        rehearse(names, options.rehearse, options.longest)
    else:
        for name in names:
            take(name, KNOWN["graphs"][name], options.backends, not options.no_peers, options.again, options.longest)
    return int(any(_has_traceback(name) for name in KNOWN["graphs"]))


def _in_order(names: Iterator[str]) -> list[str]:
    """The smallest file first; one that is not made yet is small."""
    sizes = dict.fromkeys(names, 0)
    for name in sizes:
        graph = KNOWN["graphs"][name]
        if "package" in graph:
            with suppress(Exception, SystemExit):  # `take` says why
                sizes[name] = make_model(name, graph).stat().st_size
    return sorted(sizes, key=lambda name: sizes[name])


def take(name: str, graph: Mapping[str, Any], backends: list[str], peers: bool, again: bool, longest_s: float) -> None:
    """Build one graph with each backend, and judge it beside the peers; the results are files in its folder."""
    folder = FOLDER / name
    backends = [backend for backend in backends if again or not (folder / f"result-{backend}.json").exists()]
    peers = peers and (again or not read(name, "peers.json").get("onnxruntime int8"))
    if not backends and not peers:
        return
    draft = {}
    if backends:
        try:
            model = make_model(name, graph)
            write_requests(model, graph)
            draft = init(model, backends, longest_s)
        except (Exception, SystemExit) as error:
            draft = {"error": f"{type(error).__name__}: {error}"[:600], "code": 1}
    for backend in backends:
        result = draft if draft.get("error") else build(folder, backend, longest_s)
        result = {**result, "init": draft, "date": time.strftime("%Y-%m-%d")}
        (folder / f"result-{backend}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{name} {backend}: {'; '.join(summarize(result))}", flush=True)
    try:
        environment.run("benchmarks.zoo.peers", str(folder), *(["peers"] if peers else []), folder=folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: peers: {error}", flush=True)


def summarize(result: Mapping[str, Any]) -> list[str]:
    """A few words for each unit."""
    if "error" in result and not result.get("units"):
        return [result["error"]]
    units = [f"{unit['target']} {unit['precision']} {unit['status']}" for unit in result["units"]]
    return [*units, f"{result['seconds']} s"]


def _has_traceback(name: str) -> bool:
    results = [read(name, path.name) for path in (FOLDER / name).glob("result-*.json")]
    return any(result.get("traceback") or result.get("init", {}).get("traceback") for result in results)


if __name__ == "__main__":
    sys.exit(main())
