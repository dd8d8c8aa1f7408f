"""Takes graphs of other people's packages the whole way: download, `enginesmith init`, `enginesmith build`, peers, a
page.

    python -m benchmarks.zoo [--only NAME ...] [--backends onnxruntime ...] [--no-peers]
    python -m benchmarks.zoo --write

Packages are downloaded by pip into build/zoo, checked by digest and only their graphs unpacked. What came of a graph is
JSON in its folder there: `result-BACKEND.json`, and `peers.json` for the other quantizers. --write builds nothing and
makes docs/zoo.md of everything that lies there. Other backends come after onnxruntime, in an environment that has them:
`--no-peers --backends iree xla tvm aotinductor tensorrt-rtx`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.zoo import environment
from benchmarks.zoo.building import FIRST, build, prepare
from benchmarks.zoo.packages import FOLDER, KNOWN
from benchmarks.zoo.page import read, write_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"


def main() -> int:
    """Exit code 1 where a build ended in a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description="Build public models and write docs/zoo.md."
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of graphs; default: all")
    parser.add_argument("--backends", nargs="*", default=[FIRST], help="default: %(default)s; none: the peers alone")
    parser.add_argument("--no-peers", action="store_true", help="leave other quantizers out")
    parser.add_argument("--write", action="store_true", help="build nothing, write docs/zoo.md of all results")
    given = parser.parse_args()
    for name, graph in KNOWN["graphs"].items():
        if not given.write and (given.only is None or name in given.only):
            take(name, graph, given.backends, peers=not given.no_peers)
    if given.write:
        write_page(PAGE)
    return int(any(_is_bare(name) for name in KNOWN["graphs"]))


def take(name: str, graph: Mapping[str, Any], backends: list[str], peers: bool) -> None:
    """Build one graph with each backend, and judge it beside the peers; the results are files in its folder."""
    folder = prepare(name, graph, backends)
    for backend in backends:
        print(f"{name} {backend} ...", file=sys.stderr, flush=True)
        found = build(folder, backend)
        (folder / f"result-{backend}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name} {backend}: {'; '.join(summarize(found))}", flush=True)
    if peers:
        (folder / "peers.json").unlink(missing_ok=True)
        try:
            arguments = json.dumps(graph.get("arguments", {}))
            environment.run("benchmarks.zoo.peers", str(folder), arguments, folder=folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{name}: peers: {error}", flush=True)


def summarize(result: Mapping[str, Any]) -> list[str]:
    """A few words for each unit."""
    if "error" in result:
        return [result["error"]]
    units = [f"{unit['target']} {unit['precision']} {unit['status']}" for unit in result["units"]]
    return [*units, f"{result['seconds']} s"]


def _is_bare(name: str) -> bool:
    return any(read(name, path.name).get("bare_error") for path in (FOLDER / name).glob("result-*.json"))


if __name__ == "__main__":
    sys.exit(main())
