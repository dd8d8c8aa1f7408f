"""The simulation itself: seeds that pass, planted bugs that are found, runs that repeat and get shorter."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import Progress, digest_of_sources
from tests.simulation.choices import Choices, shorten
from tests.simulation.mutants import MUTANTS
from tests.simulation.runs import beginning, run_seed, shortest
from tests.simulation.world import Temper, World

# Planted bugs that few seeds show.
SOON = [
    "the mark of a rollout that runs is removed",
    pytest.param("a channel is written whatever it says by now", marks=pytest.mark.slow),
    pytest.param("marks are not taken away", marks=pytest.mark.slow),
    pytest.param("a rollout begins while another runs", marks=pytest.mark.slow),
    pytest.param("a mark is removed while its rollout begins", marks=pytest.mark.slow),
    pytest.param("snapshots of dead writers are not mended", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("part", range(4))
def test_every_interleaving_keeps_the_rules(part: int) -> None:
    for seed in range(25 * part, 25 * part + 25):
        failure = run_seed(seed)
        assert failure is None, f"seed {seed}: {failure.why}\n" + "\n".join(failure.trace[-60:])


def test_a_trace_has_no_random_names() -> None:
    world = World(Choices(1), Temper())
    world.note("/dev/shm/watched-k3_x9abc/current is not there")
    assert world.trace == ("    0 01. 00:00:00 -            /dev/shm/watched/current is not there",)


@pytest.mark.slow
def test_ten_thousand_interleavings_keep_the_rules() -> None:
    """By the command, on all cores, with seeds that it repeats."""
    command = [sys.executable, "-m", "tests.simulation", "--from", "0", "--to", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of processes that were killed
@pytest.mark.parametrize("name", SOON)
def test_planted_bugs_are_found(name: str) -> None:
    for indexed in (False, True):
        beginning(indexed)
    with MUTANTS[name]():
        failure = next((found for seed in range(400) if (found := run_seed(seed))), None)
        assert failure is not None
        small = shortest(failure)
    gc.collect()
    assert len(small.omitted) >= failure.steps / 2 and len(small.trace) < len(failure.trace)


def test_a_script_gives_the_decisions_that_it_has_and_then_none() -> None:
    choices = Choices(7)
    first = [choices.pick(0.5, 3) for _ in range(50)]
    assert set(first) == {0, 1, 2, 3}
    again = Choices(7, first[:20])
    assert [again.pick(0.5, 3) for _ in range(50)] == first[:20] + [0] * 30


def test_what_does_not_matter_is_left_out() -> None:
    assert shorten([1, 0, 2, 3, 1, 0, 2], lambda script: script[2] == 2 and script[6] == 2) == [0, 0, 2, 0, 0, 0, 2]
    assert shorten([1, 2, 3], lambda _: True) == []


def test_seeds_of_other_sources_do_not_count(tmp_path: Path) -> None:
    state = tmp_path / "build" / "simulation.json"
    for sources, seeds in (("one", 150), ("two", 50)):
        begun = Progress.read(state, sources)
        assert (begun.next, begun.failed) == (0, ())
        Progress(sources, "commit", seeds, (7,), begun.earlier).write(state)
    again = Progress.read(state, "two")
    assert (again.next, again.failed, again.commit) == (50, (7,), "commit")
    assert [(item["sources"], item["next"]) for item in again.earlier] == [("one", 150)]


def test_a_run_that_is_killed_while_it_writes_its_progress_goes_on(tmp_path, monkeypatch):
    state = tmp_path / "simulation.json"
    Progress("one", next=50).write(state)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Progress("one", next=100).write(state)
    assert Progress.read(state, "one").next == 50


def test_the_protocol_is_among_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = digest_of_sources(), Path.read_bytes
    changed = lambda path: read(path) + b"#" * (path.name == "leases.py")  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", changed)
    assert digest_of_sources() != before
