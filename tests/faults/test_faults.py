from pathlib import Path

import pytest

from tests.faults.faults import FAULTS
from tests.faults.table import PAGE, Fault, differences, markdown, table_in, with_table
from tests.scheduling import slow_after_first

HEAD, RULE, *ROWS = table_in(PAGE.read_text(encoding="utf-8")).splitlines()


@pytest.mark.parametrize("fault", slow_after_first(FAULTS, 3), ids=lambda fault: fault.name)
def test_a_fault_is_caught_by_its_check_and_located(fault: Fault, tmp_path: Path) -> None:
    message = fault.plant(tmp_path / "fault")
    assert (message.check, message.place) == (fault.check, fault.place) and message.also == fault.also
    written_rows = [row for row in ROWS if row.startswith(f"| {fault.name} |")]
    changed_names = differences("\n".join([HEAD, RULE, *written_rows]), markdown([(fault, message)]))
    assert not changed_names, "run `python -m tests.faults --write`: " + "; ".join(changed_names)


def test_the_documentation_lists_all_faults_in_order() -> None:
    assert [row.split("|")[1].strip() for row in ROWS] == [fault.name for fault in FAULTS]


def test_a_wrong_table_is_noticed() -> None:
    row = "| x | `engine sqnr_db` | node a | 60 dB | at least 80 dB |\n"
    assert differences(row, row.replace("60 dB", "61 dB")) == []
    for other in (row.replace("60", "30"), row.replace("node a", "node b"), row.replace(" dB |", " |"), row + row, ""):
        assert differences(row, other)
    assert table_in(with_table("a" + with_table("", "old"), row)) == row
