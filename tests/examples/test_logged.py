"""What `make` shows of pip and of the demo: one line while it works, the log in a file, its end when it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTS = "import sys; print('Collecting torch'); print('warning', file=sys.stderr); sys.exit({code})"


def logged(log: Path, code: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "logged.py"), str(log), sys.executable, "-c", PRINTS.format(code=code)]
    return subprocess.run(command, capture_output=True, text=True)


def test_all_output_of_a_command_is_in_the_shown_log(tmp_path: Path) -> None:
    result = logged(tmp_path / "new" / "pip.log", 0)
    assert result.returncode == 0 and result.stderr == ""
    assert str(tmp_path / "new" / "pip.log") in result.stdout and "Collecting" not in result.stdout.split("log:")[1]
    lines = (tmp_path / "new" / "pip.log").read_text().splitlines()
    assert sorted(lines[1:]) == ["Collecting torch", "warning"] and lines[0].startswith("$ ")


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    result = logged(tmp_path / "pip.log", 3)
    assert result.returncode == 3
    assert "Collecting torch\n" in result.stderr and f"the whole log: {tmp_path / 'pip.log'}" in result.stderr


def test_only_the_last_line_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo
    import logged as module

    shown_items: list[str] = []

    class Recorded(module.Status):
        def __setattr__(self, name: str, value: object) -> None:
            shown_items.extend([value] if name == "text" else [])
            super().__setattr__(name, value)

    monkeypatch.setattr(module, "Status", Recorded)
    lines = [
        "15:35:52.257 | INFO    | Flow run 'compile digits.yaml' - sm_89 fp16 tensorrt-rtx: built in 1.0 s",
        "15:35:52.264 | INFO    | Task run 'build sm_89 fp16 tensorrt-rtx' - Finished in state Completed()",
        "See https://example.org/manual for more",
    ]
    code = f"import sys; print('the table'); print({chr(10).join(lines)!r}, file=sys.stderr)"
    result = module.run_logged([sys.executable, "-c", code], tmp_path / "demo.log", shorten=demo.step_of, capture=True)
    assert result == (0, "the table\n")
    assert shown_items == [Path(sys.executable).name] + ["sm_89 fp16 tensorrt-rtx: built in 1.0 s"] * 3
