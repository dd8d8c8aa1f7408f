from pathlib import Path

import pytest

from tests.mutation import __main__ as mutation
from tests.mutation.sites import choose, find, plant

MODULE = '''
LEAST = 2
def is_many(items: "list[int]", least: int = 0) -> bool:
    """Whether there are 3."""
    print("looked", 7)
    return len(items) > LEAST or least != 0
def first(items):
    return items[0] if len(items) >= 1 and items else None
'''
TESTS = """
from small.numbers import first, is_many
def test_many():
    assert is_many([1, 2, 3]) and not is_many([1, 2])
def test_first():
    assert first([5]) == 5 and first([]) is None
"""


def test_sites_have_a_meaning_and_keep_their_names_when_lines_move() -> None:
    result = find(MODULE, "small/numbers.py")
    texts = [(site.kind, site.text) for site in result]
    assert texts == [
        ("constant", "2"),
        ("constant", "0"),
        ("and, or, not", "len(items) > least or least != 0"),
        ("comparison", "len(items) > least"),
        ("comparison", "least != 0"),
        ("constant", "0"),
        ("and, or, not", "len(items) >= 1 and items"),
        ("comparison", "len(items) >= 1"),
        ("constant", "1"),
        ("constant", "0"),
    ]
    assert {*find(f"import os\n{MODULE}", "small/numbers.py")} == {*result}
    assert choose(result, 1, {"comparison": 2}) == choose(reversed(result), 1, {"comparison": 2})


@pytest.mark.slow
def test_detected_mutants_are_killed_and_equivalent_ones_survive(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    package, tests, parent = tree / "small", tree / "tests", Path(mutation.__file__).parent
    package.mkdir(parents=True)
    result = find(MODULE, "small/numbers.py")
    sites = [result[0], result[3], result[6]]
    (package / "__init__.py").touch()
    (package / "numbers.py").write_text(plant(MODULE, sites, 1, "small.switch"))
    (package / "switch.py").write_bytes((parent / "switch.py").read_bytes())
    (tests / "mutation").mkdir(parents=True)
    for name in ("__init__.py", "recorder.py"):
        (tests / "mutation" / name).write_bytes((parent / name).read_bytes())
    (tests / "test_numbers.py").write_text(TESTS)
    place = mutation.Place(tree, tmp_path / "record", "small.switch")
    assert place.pytest(place.record / "all", ["-n0", "tests"], 60.0) == 0
    record = mutation.Record.read(place.record)
    at_import, noticed_number, unnoticed_number = (site.number(1) for site in sites)
    many_text, first_text = "tests/test_numbers.py::test_many", "tests/test_numbers.py::test_first"
    assert record.killed == {noticed_number: many_text} and record.reaching(unnoticed_number) == [first_text]
    # What Python evaluates while it imports takes a process of its own.
    assert record.reaching(at_import) == [many_text, first_text]
    assert mutation.Trial(place, record, at_import, sites[0]).run() == {"is": "killed", "by": many_text}
