"""A plugin of pytest: writes which sites each test reaches, and runs it again with each mutant there that lives.

What happens while a fixture of more than one test is made counts for every test that uses it. The test runs again in a
fork: nothing of the mutant stays. It kills the mutant if it fails, passes in another fork without, and fails again.
"""

import importlib
import json
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

_FOLDER, _WORKER = Path(os.environ["MUTATION_RECORD"]), os.environ.get("PYTEST_XDIST_WORKER", "alone")
_switch = importlib.import_module(os.environ["MUTATION_SWITCH"])
# Tests of a worker that try one mutant; seconds that a fork may take beside ten times what the test took.
MOST_TRIES, _LEAST_S = 25, 20.0
_read = 0
_tries: dict[int, int] = {}
_unfit: set[Path] = set()


@contextmanager
def _current(name: str) -> Iterator[None]:
    place_before, _switch.here = _switch.here, name
    (_FOLDER / f"current-{_WORKER}").write_text(name)
    try:
        yield
    finally:
        _switch.here = place_before
        (_FOLDER / f"current-{_WORKER}").write_text(place_before)


def _name(definition: pytest.FixtureDef[object]) -> str:
    return f"fixture {definition.baseid} {definition.argname}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the files in the order in which they were named, the nearest first."""
    places = {name: place for place, name in reversed([*enumerate(config.args)])}
    items.sort(key=lambda item: places.get(item.nodeid, places.get(item.nodeid.partition("::")[0], 0)))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    with _current(f"import {collector.nodeid}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    with _current(_name(fixturedef)):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    values = item._request._fixture_defs.values()  # type: ignore[attr-defined]  # those that it asked for by name, too
    item.stash[_USED] = [_name(value) for value in values if value.scope != "function"]


_USED = pytest.StashKey[list[str]]()


class _Sibling:
    """Stands for the next test, so that nothing but the fixtures of this one ends."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item

    def listchain(self) -> list[object]:
        return [*self.item.listchain()[:-1]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    with _current(item.nodeid):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=_Sibling(item))  # type: ignore[arg-type]
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        seconds = sum(report.duration for report in reports)
        result = next((report.outcome for report in reports if report.outcome != "passed"), "passed")
        test = {"test": item.nodeid, "seconds": seconds, "result": result, "fixtures": item.stash.get(_USED, [])}
        _write("tests", json.dumps(test))
        if result == "passed" and _switch.mutant < 0:
            _try_mutants(item, seconds)
        item.session._setupstate.teardown_exact(nextitem)
    return True


def _write(name: str, line: str) -> None:
    with (_FOLDER / f"{name}-{_WORKER}").open("a") as file:
        file.write(f"{line}\n")


def _try_mutants(item: pytest.Item, seconds: float) -> None:
    for site in sorted(_reached(item.nodeid) - _killed()):
        _tries[site] = _tries.get(site, 0) + 1
        if _tries[site] > MOST_TRIES or item.path in _unfit or not _fails(item, site, seconds):
            continue
        if _fails(item, _switch.NO_MUTANT, seconds):
            _unfit.add(item.path)
        elif _fails(item, site, seconds):
            _write("killed", f"{site}\t{item.nodeid}")


def _reached(name: str) -> set[int]:
    global _read
    path = _FOLDER / f"sites-{_WORKER}"
    if not path.exists():
        return set()
    with path.open() as file:
        file.seek(_read)
        lines = [line.rstrip("\n").split("\t", 1) for line in file.readlines()]
        _read = file.tell()
    return {int(site) for site, context in lines if context == name}


def _killed() -> set[int]:
    files = _FOLDER.parent.glob("*/killed-*")
    return {int(line.partition("\t")[0]) for file in files for line in file.read_text().splitlines()}


def _fails(item: pytest.Item, mutant: int, seconds: float) -> bool:
    """Whether the test fails, crashes or does not end in a fork of this process."""
    child = os.fork()
    if not child:
        os.setsid()
        is_failed = True
        try:
            _switch.mutant = mutant
            os.environ["MUTANT"] = str(mutant)
            is_failed = any(report.failed for report in runtestprotocol(item, log=False, nextitem=_Sibling(item)))  # type: ignore[arg-type]
        finally:
            os._exit(is_failed)
    deadline_s = time.monotonic() + _LEAST_S + 10 * seconds
    while time.monotonic() < deadline_s:
        ended_pid, status = os.waitpid(child, os.WNOHANG)
        if ended_pid:
            return status != 0
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True
