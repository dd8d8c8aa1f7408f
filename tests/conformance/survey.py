"""Many items through one backend, in processes of their own: one that crashes or hangs costs itself, not the rest."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from builders.execution.jobs import ProcessLimits
from builders.execution.process import run_job
from enginesmith.core.errors import StepError
from enginesmith.core.hardware.machine import parse_targets
from tests.calls import call_job
from tests.conformance.outcomes import Outcome

# An item that takes longer hangs. The slowest compilers take seconds for graphs of this size.
PATIENCE_S = 300.0
# Until the first item: importing a compiler, on a machine that is busy.
_STARTING_S = 120.0


def survey(
    backend: str,
    target: str,
    suite: str,
    names: Sequence[str],
    workdir: Path,
    *,
    patience_s: float = PATIENCE_S,
    listen: Callable[[Outcome], object] = lambda _: None,
) -> dict[str, Outcome]:
    """The outcome of each item, by name. listen: hears of what each process did, when it ended.

    A process tries one item after the other; where it dies, the item that it was at has crashed, and a new process
    takes up the rest.
    """
    outcomes: dict[str, Outcome] = {}
    remaining_names = list(names)
    while remaining_names:
        folder = workdir / f"process{len(outcomes)}"
        folder.mkdir()
        ended_error = _run_some(backend, target, suite, remaining_names, folder, patience_s)
        fresh_rows = _read(folder / "outcomes.jsonl")
        if not fresh_rows or all(item in outcomes for item in fresh_rows):
            raise ended_error or RuntimeError(f"{backend}: the process at {remaining_names[0]} left nothing")
        for name, outcome in fresh_rows.items():
            outcomes[name] = outcome or _dead(name, ended_error)
            listen(outcomes[name])
        remaining_names = [name for name in remaining_names if name not in outcomes]
    return outcomes


def _run_some(
    backend: str, target: str, suite: str, names: Sequence[str], folder: Path, patience_s: float
) -> StepError | None:
    """Run one process until it ends; None when it ended by itself."""
    lines = folder / "outcomes.jsonl"
    begun_time_s = time.time()

    def stuck() -> bool:
        if not lines.exists():
            return time.time() - begun_time_s > patience_s + _STARTING_S
        return time.time() - lines.stat().st_mtime > patience_s

    arguments = {"backend": backend, "target": target, "suite": suite, "names": list(names), "out": str(lines)}
    job = call_job("survey", "tests.conformance.survey:examine", arguments, limits=ProcessLimits(86_400, 16_384))
    try:
        run_job(job, folder, stuck)
    except StepError as error:
        return error
    return None


def examine(backend: str, target: str, suite: str, names: Sequence[str], out: str, workdir: Path) -> None:
    """The process's own side: tries each item and writes a line when it begins one and when it is done with it."""
    from tests.conformance.items import maker_of
    from tests.conformance.trial import attempt, backend_of

    tool, (hardware,), item_of = backend_of(backend), parse_targets(target), maker_of(suite)
    for name in names:
        _write(Path(out), {"began": name})
        _write(Path(out), attempt(tool, hardware, item_of(name), workdir).to_json())


def node_names(modules: Sequence[str], workdir: Path) -> list[str]:
    """The node tests of these modules; asked in a process of its own, since whoever imported all before sees all."""
    from tests.conformance.items import node_cases

    return sorted(name for module in modules for name in node_cases(module))


def behave(backend: str, target: str, workdir: Path) -> list[str]:
    """What sessions and openings of a backend are to be blamed for; for a process of its own."""
    from tests.conformance.manners import built, complaints
    from tests.conformance.openings import open_complaints
    from tests.conformance.trial import backend_of

    tool, (hardware,) = backend_of(backend), parse_targets(target)
    actual = list(open_complaints(tool, hardware, built(tool, hardware, workdir), workdir))
    return actual if tool.runs(hardware) else [*actual, *complaints(tool, hardware, workdir)]


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(value) + "\n")


def _read(path: Path) -> dict[str, Outcome | None]:
    """Outcomes by name; None of the one that was begun and not ended."""
    entries: dict[str, Outcome | None] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        value = json.loads(line)
        if "began" in value:
            entries[value["began"]] = None
        else:
            entries[value["name"]] = Outcome(**value)
    return entries


def _dead(name: str, error: StepError | None) -> Outcome:
    kind = "hung" if error is not None and error.kind == "cancelled" else "crashed"
    output = "" if error is None else f"{error}; it said: {' | '.join(error.log.splitlines()[-5:])}"
    return Outcome(name, kind, output[:1000])
