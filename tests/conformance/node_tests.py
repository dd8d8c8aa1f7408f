"""The ONNX project's own backend node tests: run through the CPU engine and compared, built only by TensorRT-RTX.

`python -m tests.conformance.node_tests` (`make node-tests`) runs all of them, writes what came out into
docs/reference/conformance.json and from there into docs/reference/conformance.md, and ends with 1 where that is not
what known_failures.json says: a failure that is not in it, or a pass that is.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.conformance.items import node_cases
from tests.conformance.outcomes import Outcome
from tests.conformance.page import record, write_page
from tests.conformance.survey import survey
from tests.conformance.trial import backend_of, target_for

KNOWN = Path(__file__).with_name("known_failures.json")
BACKENDS = ("onnxruntime", "tensorrt-rtx")


def known_failures(backend: str) -> dict[str, str]:
    """The node tests that a backend's runtime fails, each with the reason."""
    return json.loads(KNOWN.read_text()).get(backend, {})


def surprises(cases: Mapping[str, Outcome], notes: Mapping[str, str]) -> list[str]:
    """Failures that are not known, and known ones that are none."""
    texts = [f"{o.name}: {o.kind} at {o.by}: {o.reason}" for o in cases.values() if not o.good and o.name not in notes]
    gone = [f"{name}: known to fail, and it {cases[name].kind}" for name in notes if name in cases and cases[name].good]
    return texts + gone


def explained(outcomes: Mapping[str, Outcome], reasons: Mapping[str, str]) -> dict[str, Outcome]:
    """The outcomes, known failures with the reason that is known."""
    return {name: o if o.good else replace(o, reason=reasons.get(name, o.reason)) for name, o in outcomes.items()}


def main(chosen: Sequence[str]) -> int:
    """Run every node test with these backends; 1 where something surprises."""
    names = sorted(node_cases())
    messages: list[str] = []
    for backend in chosen or BACKENDS:
        target = target_for(backend_of(backend))
        if target is None:
            print(f"{backend}: not installed, left out", file=sys.stderr)
            continue
        with TemporaryDirectory() as folder:
            result = survey(backend, target.name, "nodes", names, Path(folder), listen=_Counter(len(names)))
        known_names = known_failures(backend)
        messages += [f"{backend}: {line}" for line in surprises(result, known_names)]
        record("nodes", backend, target.name, explained(result, known_names))
    write_page()
    print("\n".join(messages), file=sys.stderr)
    return 1 if messages else 0


class _Counter:
    """Says how far it is, once per process that ended."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0

    def __call__(self, outcome: Any) -> None:
        self.done += 1
        if not outcome.good or self.done == self.count:
            print(f"{self.done}/{self.count} {outcome.name}: {outcome.kind}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
