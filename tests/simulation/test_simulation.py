"""The simulation itself: seeds that pass, planted bugs that are found, runs that repeat and get shorter."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import Progress, _read_code, digest_of_sources
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
@pytest.mark.timeout(900)
def test_ten_thousand_interleavings_keep_the_rules() -> None:
    """By the command, on all cores, with seeds that it repeats."""
    command = [sys.executable, "-m", "tests.simulation", "--from", "0", "--to", "10000"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def test_each_planted_bug_can_be_planted() -> None:
    for plant in MUTANTS.values():
        with plant():
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of processes that were killed
@pytest.mark.parametrize("name", SOON)
def test_planted_bugs_are_found(name: str) -> None:
    for is_indexed in (False, True):
        beginning(is_indexed)
    with MUTANTS[name]():
        failure = next((trace for seed in range(400) if (trace := run_seed(seed))), None)
        assert failure is not None
        small_failure = shortest(failure)
    gc.collect()
    assert len(small_failure.omitted) >= failure.steps / 2 and len(small_failure.trace) < len(failure.trace)


def test_a_script_gives_its_decisions_and_then_none() -> None:
    choices = Choices(7)
    first_counts = [choices.pick(0.5, 3) for _ in range(50)]
    assert set(first_counts) == {0, 1, 2, 3}
    second_choices = Choices(7, first_counts[:20])
    assert [second_choices.pick(0.5, 3) for _ in range(50)] == first_counts[:20] + [0] * 30


def test_irrelevant_decisions_are_removed() -> None:
    assert shorten([1, 0, 2, 3, 1, 0, 2], lambda script: script[2] == 2 and script[6] == 2) == [0, 0, 2, 0, 0, 0, 2]
    assert shorten([1, 2, 3], lambda _: True) == []


def test_seeds_of_other_code_do_not_count(tmp_path: Path) -> None:
    state = tmp_path / "build" / "simulation.json"
    for sources, seeds in (("one", 150), ("two", 50)):
        begun_content = Progress.read(state, sources)
        assert (begun_content.next, begun_content.failed) == (0, ())
        Progress(sources, "commit", seeds, (7,), begun_content.earlier).write(state)
    second_content = Progress.read(state, "two")
    assert (second_content.next, second_content.failed, second_content.commit) == (50, (7,), "commit")
    assert [(item["sources"], item["next"]) for item in second_content.earlier] == [("one", 150)]


def test_a_run_killed_while_it_saves_its_progress_continues(tmp_path, monkeypatch):
    state = tmp_path / "simulation.json"
    Progress("one", next=50).write(state)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Progress("one", next=100).write(state)
    assert Progress.read(state, "one").next == 50


def test_the_protocol_is_among_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for changed in ("", "leases.py"):
        monkeypatch.setattr("tests.simulation.__main__._read_code", lambda file, name=changed: f"{file.name == name}")
        digests.append(digest_of_sources())
    assert digests[0] != digests[1]


def test_docstrings_and_comments_are_no_code(tmp_path: Path) -> None:
    texts = ('"""One."""\nA = 1\n', '"""Two."""\n\n# a comment\nA = 1\n', "A = 2\n")
    file = tmp_path / "a.py"
    first_text, second_text, changed_text = (_read_code(file) for text in texts if file.write_text(text))
    assert first_text == second_text != changed_text
