import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from enginesmith.__main__ import main
from enginesmith.registry.store.base import open_store

ENGINESMITH = f"{sys.executable} -m enginesmith"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    open_store(tmp_path / "registry", create=True)
    return tmp_path / "registry"


@pytest.mark.parametrize("buffered", ["", "PYTHONUNBUFFERED=1 "])
@pytest.mark.parametrize("command", ["list", "list --json", "--help", "--version"])
def test_a_full_stdout_is_one_message_and_exit_code_3(registry: Path, command: str, buffered: str) -> None:
    place = f"--registry {registry}" if command.startswith("list") else ""
    result = shell(f"{buffered}{ENGINESMITH} {command} {place} > /dev/full")
    assert result.returncode == 3
    assert result.stderr.splitlines() == [
        "error: stdout cannot be written: No space left on device; send the output elsewhere and run again"
    ]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(registry: Path, closed: str) -> None:
    result = shell(f"{ENGINESMITH} list --json --registry {registry} {closed}")
    assert (result.returncode, result.stderr) == (0, "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os, sys; from enginesmith.cli.streams import prepare_streams; prepare_streams(); "
        f"print(os.open({str(tmp_path)!r}, os.O_RDONLY), file=open({str(tmp_path / 'number')!r}, 'w'))"
    )
    assert shell(f'{sys.executable} -c "{code}" <&- >&- 2>&-').returncode == 0
    assert int((tmp_path / "number").read_text()) > 2


def test_a_full_stderr_leaves_the_exit_code(registry: Path) -> None:
    assert shell(f"{ENGINESMITH} list --registry {registry}/gone 2> /dev/full").returncode == 3
    assert shell(f"{ENGINESMITH} nonsense 2> /dev/full").returncode == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cd $(mktemp -d) && rmdir $PWD && {} list", "the current folder was deleted"),
        ("{} registry history $'m\\xff' --registry $(mktemp -d)", r"'m\udcff' is not UTF-8"),
    ],
)
def test_stream_errors_are_one_line_messages(line: str, message: str) -> None:
    result = shell(line.format(ENGINESMITH))
    assert result.returncode == 2 and result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_line_is_imported_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        main()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_table_and_json_are_written_in_any_locale(encoding: str) -> None:
    code = "from enginesmith.cli import options, streams, tables; streams.prepare_streams(); "
    code += "tables.print_table(['time'], [['5 \u03bcs']]); options.emit_json('\u2603')"
    result = shell(f'PYTHONIOENCODING={encoding} {sys.executable} -c "{code}"')
    assert result.returncode == 0 and json.loads(result.stdout.splitlines()[-1]) == "\u2603"


@pytest.mark.parametrize("command", ["debug schema", "--help"])
def test_a_reader_that_goes_early_is_no_error(command: str) -> None:
    result = shell(f"{ENGINESMITH} {command} | true")  # has ended before anything is written
    assert (result.returncode, result.stderr) == (0, "")


def test_a_command_does_its_work_after_its_reader_has_gone(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from enginesmith.cli.streams import leave, prepare_streams; prepare_streams(); "
        f"print(1, flush=True); print(2, flush=True); Path({str(tmp_path / 'done')!r}).touch(); leave(4)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (4, "") and (tmp_path / "done").exists()
