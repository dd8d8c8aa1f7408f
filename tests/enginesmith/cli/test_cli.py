import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from enginesmith import cli
from enginesmith.cli import SECTIONS
from enginesmith.cli.tables import print_table
from enginesmith.core.errors import EnginesmithError


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom enginesmith.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'onnx', 'ray', 'prefect', 'numpy', 'pydantic', 'yaml', 'rich', 'boto3'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"
    for name in (name for table in SECTIONS.values() for name in table):
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["build"], 2, "give SPEC or --all LOCATION"),
        (["build", "gone.yaml"], 2, "gone.yaml: no such file"),
        (["show", "digits", "--registry", "gone"], 3, "gone"),
        (["list", "--registry", "s3://bucket/prefix"], 3, "s3://"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "enginesmith", *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_further_lines_of_an_error_are_indented(monkeypatch, capsys):
    monkeypatch.setattr(
        cli, "enginesmith", Mock(side_effect=EnginesmithError("nothing fits:\n  a: too large\nb: too old"))
    )
    with pytest.raises(SystemExit):
        cli.main(["list"])
    assert capsys.readouterr().err == "error: nothing fits:\n  a: too large\n  b: too old\n"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("torch.nn", "needs torch, which is not installed: pip install '.[export]' in a clone"),
        ("pydantic", "pip install '.[build]' in a clone"),
        ("ray", "pip install '.[ray]' in a clone"),
        ("aiohttp.web", "needs aiohttp, which is not installed: pip install './enginesmith[serve]' in a clone"),
        ("google.cloud.storage", "pip install './enginesmith[gcs]' in a clone"),
        ("google.protobuf", "pip install '.[build]' in a clone"),
        ("transformers", "pip install transformers\n"),
    ],
)
def test_an_optional_package_is_named_with_its_extra(missing, message, monkeypatch, capsys):
    monkeypatch.setattr(
        cli, "enginesmith", Mock(side_effect=ModuleNotFoundError(f"No module named '{missing}'", name=missing))
    )
    with pytest.raises(SystemExit) as error:
        cli.main([])
    assert error.value.code == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "bug",
    [
        ModuleNotFoundError("No module named 'x'", name="pipeline.gone"),
        OSError(28, "No space left on device", "elsewhere"),
    ],
)
def test_a_missing_own_module_and_a_foreign_file_error_stay_bugs(bug, monkeypatch):
    monkeypatch.setattr(cli, "enginesmith", Mock(side_effect=bug))
    with pytest.raises(type(bug)) as error_info:
        cli.main([])
    assert error_info.value is bug


def test_a_table_escapes_control_characters_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["cpu", "failed", "[red]x[/red]\x1b[2J"], ["sm_89", "proven", "y"]]
    print_table(("unit", "status", "why"), rows, title="tiny\x1b@1", note="below", styles={"failed": "red"}, red=[1])
    lines = capsys.readouterr().out.splitlines()
    reason = r"[red]x[/red]\x1b[2J"
    assert lines == [r"tiny\x1b@1", "unit   status  why", f"cpu    failed  {reason}", "sm_89  proven  y", "below"]
    print_table(("", ""), [["ok", "python"]])
    assert capsys.readouterr().out.split() == ["ok", "python"], "no headings, no line for them"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_can_be_read_at_every_width(width, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    reason = "no CUDA GPU of capability 89 on this machine: libcuda is not installed"
    rows = [["sm_89", "fp16", "unproven", "37.6 µs (24.1 to 39.7)", reason], ["sm_90", "fp16", "unproven", "", reason]]
    print_table(("target", "precision", "status", "p50", "why"), rows, title="t" * 50)
    text = re.sub("\x1b[^m]*m", "", capsys.readouterr().out)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    words = text.split()
    assert all(words.count(word) == 2 for word in ("unproven", "fp16", *reason.split())), "no word is broken or cut"
    if width >= 80:
        assert [line.split() for line in lines if "target" in line] == [["target", "precision", "status", "p50", "why"]]
        print_table(("bucket", *["quantile"] * 4), [["batch=8", *["37.6 µs (24.1 to 39.7)"] * 4]])
        assert ("37.6 µs (24.1 to 39.7)" in capsys.readouterr().out) == (width == 120), "a bracket has its own line"
    else:
        assert "target     sm_89" in lines and "target     sm_90" in lines and "" in lines
        assert sum(line.startswith("p50") for line in lines) == 1, "what is empty is left out"


def test_commands_write_in_one_place() -> None:
    """Each with a way of its own to escape, to be wide and to look was how control characters got through."""
    files = {path.name: path.read_text() for path in Path(cli.__file__).parent.rglob("*.py")}
    assert {name for name, text in files.items() if "rich.table" in text} == {"tables.py"}
    writing_names = {name for name, text in files.items() if re.search(r"click\.echo|\W(?<!console\.)print\(", text)}
    assert writing_names == {"tables.py", "streams.py"}
