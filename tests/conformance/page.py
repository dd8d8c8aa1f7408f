"""docs/reference/conformance.json, what was found, and the tables that docs/reference/conformance.md shows of it.

`python -m tests.conformance.page [BACKEND]...` tries the torture set on what is installed and writes both; with
`--found FOLDER` (`make conformance`) it takes what the suite has just found there, which is the same.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from builders.backends import discovery
from tests.conformance.outcomes import Outcome
from tests.conformance.survey import survey
from tests.conformance.torture import GRAPHS
from tests.conformance.trial import backend_of, target_for

DOCS = Path(__file__).parents[2] / "docs/reference"
FOUND, PAGE = DOCS / "conformance.json", DOCS / "conformance.md"
_SHORT = 150
_KINDS = ("passed", "built", "refused", "wrong", "broke", "crashed", "hung")


def record(suite: str, backend: str, target: str, outcomes: Mapping[str, Outcome]) -> None:
    """Keep what was found with a backend, in place of what was found before."""
    known_results = stored()
    known_results.setdefault(suite, {})[backend] = {
        "target": target,
        "versions": backend_of(backend).versions(),
        "counts": counts_of(outcomes.values()),
        "others": grouped(o for o in outcomes.values() if o.kind not in ("passed", "built")),
    }
    known_results[suite] = dict(sorted(known_results[suite].items()))
    FOUND.write_text(json.dumps(known_results, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def grouped(outcomes: Iterable[Outcome]) -> list[list[str]]:
    """[kind, by, reason, names] of those that have one reason but for names and numbers; that of the first."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.name):
        groups.setdefault((outcome.kind, outcome.by, _pattern(outcome.reason)), []).append(outcome)
    largest = sorted(groups.items(), key=lambda group: (group[0][0] == "refused", -len(group[1]), group[0]))
    return [[kind, by, _short(item[0].reason), " ".join(o.name for o in item)] for (kind, by, _), item in largest]


def others(item: Mapping[str, Any]) -> dict[str, str]:
    """The kind of each of a backend's items that neither passed nor were built, by name."""
    return {name: kind for kind, _, _, names in item["others"] for name in names.split()}


def stored() -> dict[str, Any]:
    """What was found, by suite and backend."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def counts_of(outcomes: Any) -> dict[str, int]:
    """How many of each kind, in the order of `_KINDS`."""
    counts = Counter(outcome.kind for outcome in outcomes)
    return {kind: counts[kind] for kind in _KINDS if counts[kind]}


def write_page() -> None:
    """Bring the tables of the page up to what is stored."""
    PAGE.write_text(with_tables(PAGE.read_text(), stored()))


def with_tables(page: str, results: Mapping[str, Any]) -> str:
    """The page with its tables between '<!-- NAME -->' and '<!-- /NAME -->' made anew."""
    parts = {
        "torture": _summary("graphs", results.get("torture", {})),
        "nodes": _summary("tests", results.get("nodes", {})),
    }
    parts["torture-refused"] = _by_graph(results.get("torture", {}))
    parts["nodes-refused"] = _by_reason(results.get("nodes", {}))
    for name, lines in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        body = "\n".join(lines) + "\n"
        page = pattern.sub(lambda match, body=body: match[1] + body + match[2], page)
    return page


def _summary(what: str, results: Mapping[str, Any]) -> Iterator[str]:
    yield f"| backend | target | versions | {what} | passed | built | refused | failed |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, item in results.items():
        counts = item["counts"]
        failed = sum(count for kind, count in counts.items() if kind not in ("passed", "built", "refused"))
        versions = ", ".join(f"{package} {version}" for package, version in _main(item["versions"]))
        texts = [str(counts.get(kind, 0)) for kind in ("passed", "built", "refused")]
        yield f"| `{name}` | {item['target']} | {versions} | {sum(counts.values())} | {' | '.join(texts)} | {failed} |"


def _main(versions: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Without the parts of one distribution that is named already."""
    names = sorted(versions)
    return [(name, versions[name]) for name in names if not any(name.startswith(f"{other}-") for other in names)]


def _by_graph(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| backend | graph | outcome | reason |"
    yield "|---|---|---|---|"
    for backend, item in results.items():
        for kind, by, reason, names in item["others"]:
            yield f"| `{backend}` | {', '.join(names.split())} | {kind} ({by}) | {_cell(reason)} |"


def _by_reason(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| backend | outcome | tests | reason, and a test it is from |"
    yield "|---|---|---|---|"
    for backend, item in results.items():
        for kind, by, reason, names in item["others"]:
            tests = names.split()
            yield f"| `{backend}` | {kind} ({by}) | {len(tests)} | {_cell(reason)} (`{tests[0]}`) |"


def _pattern(reason: str) -> str:
    """A reason without what differs from test to test: names, numbers and shapes."""
    return re.sub(r"'[^']*'|\d+|\([^)]*\)|\[[^]]*\]", "_", reason)[:60]


def _short(reason: str) -> str:
    words = re.sub(r"/\S*/", "", " ".join(reason.split()))
    return words if len(words) <= _SHORT else f"{words[:_SHORT]} ..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def keep(folder: Path, backend: str, outcomes: Mapping[str, Outcome]) -> None:
    """Leave what was found with a backend for `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{backend}.json").write_text(json.dumps([outcome.to_json() for outcome in outcomes.values()]))


def kept(folder: Path) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """What was left there, by backend."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem, {item["name"]: Outcome(**item) for item in json.loads(path.read_text())}


def main(arguments: Sequence[str]) -> int:
    """Write down what is told, or try the torture set on these backends or all; 1 where one breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*")
    parser.add_argument("--found", type=Path)
    names = parser.parse_args(arguments)
    bad_names = []
    for name, target, outcomes in _given(names.found) if names.found else _tried(names.backends or discovery.names()):
        if ":" not in name:  # what has no entry point yet is not what this project shows
            record("torture", name, target, outcomes)
        print(f"{name} {target}: {counts_of(outcomes.values())}", file=sys.stderr)
        bad_names += [f"{name}: {o.name}: {o.kind} at {o.by}: {o.reason}" for o in outcomes.values() if not o.good]
    write_page()
    print("\n".join(bad_names), file=sys.stderr)
    return 1 if bad_names else 0


def _given(folder: Path) -> Iterator[tuple[str, str, dict[str, Outcome]]]:
    for name, result in kept(folder):
        target = target_for(backend_of(name))
        assert target is not None, name
        yield name, target.name, result


def _tried(names: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Outcome]]]:
    for name in names:
        target = target_for(backend_of(name)) if backend_of(name).versions() else None
        if target is None:
            print(f"{name}: not installed, left out", file=sys.stderr)
            continue
        with TemporaryDirectory() as folder:
            result = survey(name, target.name, "torture", list(GRAPHS), Path(folder))
        yield name, target.name, result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
