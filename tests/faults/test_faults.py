"""Each planted fault is caught by the check that is meant for it, attributed to its place, and by nothing unrelated."""

from pathlib import Path

import pytest

from tests.faults.faults import FAULTS
from tests.faults.table import PAGE, Fault, differences, markdown, table_in, with_table

HEAD, RULE, *ROWS = table_in(PAGE.read_text(encoding="utf-8")).splitlines()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_by_what_is_meant_for_it_where_it_is(fault: Fault, tmp_path: Path) -> None:
    message = fault.plant(tmp_path / "fault")
    assert (message.check, message.place) == (fault.check, fault.place) and message.also == fault.also
    written = [row for row in ROWS if row.startswith(f"| {fault.name} |")]
    changed = differences("\n".join([HEAD, RULE, *written]), markdown([(fault, message)]))
    assert not changed, "run `python -m tests.faults --write`: " + "; ".join(changed)


def test_the_table_of_the_documentation_holds_them_all_in_order() -> None:
    assert [row.split("|")[1].strip() for row in ROWS] == [fault.name for fault in FAULTS]


def test_a_table_that_says_something_else_is_noticed() -> None:
    row = "| x | `engine sqnr_db` | node a | 60 dB | at least 80 dB |\n"
    assert differences(row, row.replace("60 dB", "61 dB")) == []
    for other in (row.replace("60", "30"), row.replace("node a", "node b"), row.replace(" dB |", " |"), row + row, ""):
        assert differences(row, other)
    assert table_in(with_table("a" + with_table("", "old"), row)) == row


@pytest.mark.parametrize(
    "word",
    ["weight", "flipped scale", "transposed", "fp16 overflow", "epsilon", "stale golden", "off-by-one bucket",
     "nondeterministic", "NaN at one position", "another version", "3 % slower", "0.5 % errors"],
)  # fmt: skip
def test_the_twelve_that_were_asked_for_are_there(word: str) -> None:
    names = [fault.name for fault in FAULTS]
    assert any(word in name for name in names) and len(set(names)) == len(names)
