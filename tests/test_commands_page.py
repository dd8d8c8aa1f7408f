"""docs/reference/commands.md is what the command line says of itself (`make docs` writes it)."""

from pathlib import Path

from docs import commands
from enginesmith.cli import GROUPS, SECTIONS

PAGE = Path(__file__).parents[1] / "docs/reference/commands.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == commands.markdown(), "run `make docs`"


def test_the_page_has_every_command_and_option() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for table in SECTIONS.values() for name in table if f"\n### enginesmith {name}\n" not in text] == []
    words = [f"{group} {name}" for group, table in GROUPS.items() for name in table]
    assert [name for name in words if f"\n#### enginesmith {name}\n" not in text] == []
    section = text.partition("#### enginesmith canary run\n")[2].partition("\n#")[0]
    assert "| `--traffic PATH` | File of recorded requests" in section and "[required]" in section
