import io
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from enginesmith.cli.tables import _columns, download_bar
from enginesmith.client.pull import silent


@pytest.mark.parametrize("width", [8, 20, 27, 40, 44, 60, 80, 200])
@pytest.mark.parametrize(
    ("there", "whole"), [(None, None), (0, 1023 << 20), (999 << 20, 1023 << 20), (3 << 40, 3 << 40)]
)
def test_the_bar_is_one_line_at_any_width(width: int, there: int | None, whole: int | None) -> None:
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    bar = Progress(*_columns(width), console=console, auto_refresh=False)
    task = bar.add_task("", total=None)
    if there is not None:
        bar.update(task, completed=there, total=whole)
    lines = console.render_lines(bar.get_renderable())
    text = "".join(segment.text for segment in lines[0])
    assert len(lines) == 1 and len(text) <= width
    if there == 999 << 20 and width >= 27:
        assert "999.0/1,023.0 MiB" in text
    if there and width >= 60:
        assert "━" in text and "…" not in text


def test_a_terminal_that_is_made_narrower_meanwhile() -> None:
    console = Console(width=24, force_terminal=True, file=io.StringIO())
    bar = Progress(*_columns(80), console=console, auto_refresh=False)
    bar.update(bar.add_task("", total=None), completed=999 << 20, total=1023 << 20)
    assert len(console.render_lines(bar.get_renderable())) == 1


def test_the_speed_is_shown_during_and_after_the_download() -> None:
    console, current_values = Console(width=80, force_terminal=True, file=io.StringIO()), [0.0]
    bar = Progress(*_columns(80), console=console, auto_refresh=False, get_time=lambda: current_values[0])
    task = bar.add_task("", total=6 << 20)
    for seconds, speed in enumerate(("", "", "2.0 MiB/s", "2.0 MiB/s")):
        current_values[0] = float(seconds)
        bar.update(task, completed=seconds << 21)
        (line,) = console.render_lines(bar.get_renderable())
        assert speed in "".join(segment.text for segment in line)


def test_no_bar_without_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with download_bar() as progress:
        assert progress is silent
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with download_bar(quiet=True) as progress:
        assert progress is silent
    assert capsys.readouterr() == ("", "")
