import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.pipeline.held import hold
from tests.pipeline.projects import Project, weights, write_model
from tests.waiting import PATIENCE_S, stopped, text_of

ROOT = Path(__file__).parents[3]
DONE = re.compile(r"] (?!verdict)(.+?): (?:done|built in .*)$", re.MULTILINE)
CACHED = re.compile(r"] (.+?): cached$", re.MULTILINE)


def start(project: Project, *words: str, home: Path | None = None, stop_at: str = "") -> subprocess.Popen[str]:
    return start_command(project, "build", project.spec, "--jobs", "1", *words, home=home, stop_at=stop_at)


def start_command(
    project: Project, *words: object, home: Path | None = None, stop_at: str = ""
) -> subprocess.Popen[str]:
    """stop_at: what a line holds at which it stops, for `interrupt`; '' goes on."""
    module = ("tests.pipeline.stopping", stop_at) if stop_at else ("enginesmith",)
    command = [sys.executable, "-m", *module, *words, "--registry", project.registry]
    return subprocess.Popen(
        [*map(str, command)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PREFECT_HOME": str(home or project.folder.parent / "prefect")},
        process_group=0,
    )


def interrupt(process: subprocess.Popen[str], at: str, number: signal.Signals) -> str:
    """Send a signal when a line holds `at`; all that was printed until the end."""
    assert process.stderr is not None
    seen_text = ""
    with process.stderr as lines:
        for line in lines:
            seen_text += line
            if at in line:
                stopped(process)
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)
                break
        return seen_text + lines.read()


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
def test_the_same_command_finishes_a_run_killed_in_any_step(project: Project) -> None:
    project.change_spec(targets=["cpu"])
    finished_names: set[str] = set()
    for text in ("export ...", "calibrate ...", "write int8", "check int8", "cpu int8", "prove cpu int8"):
        process = start(project, stop_at=text)
        seen_interrupt = interrupt(process, text, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert project.run("list", "--json").json == [], "no half version"
        assert not finished_names & set(DONE.findall(seen_interrupt)), "what was finished is not done again"
        finished_names |= set(DONE.findall(seen_interrupt))
    second_build = project.build()
    assert second_build.code == 0, second_build.err
    assert len(finished_names) > 5 and finished_names <= set(CACHED.findall(second_build.err))
    assert project.run("registry", "fsck", "--json").code == 0


@pytest.mark.slow
def test_ctrl_c_stops_the_compilers_and_says_what_is_kept(project: Project) -> None:
    project.change_spec(targets=["sm_89"], precisions=["fp32"])
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(project, stop_at="sm_89 fp32")
        seen_interrupt = interrupt(process, "sm_89 fp32", number)
        assert process.wait(PATIENCE_S) == 130
        assert "what was finished is kept" in seen_interrupt
        assert "Traceback" not in seen_interrupt
    assert project.build().code == 0


@pytest.mark.slow
def test_ctrl_c_in_a_check_keeps_what_was_built_and_publishes_nothing(built: Project) -> None:
    built.change_spec(targets=["cpu"], precisions=["fp32"])
    write_model(built.folder / "tiny.onnx", {name: value * 1.01 for name, value in weights().items()})
    process = start_command(built, "check", built.spec, "--seconds", 30)
    seen_interrupt = interrupt(process, "times of cpu fp32", signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert "what was finished is kept" in seen_interrupt and "Traceback" not in seen_interrupt
    assert built.run("list", "--json").json[0]["versions"] == ["1"], "no version is made"
    second_result = built.run("check", built.spec, "--seconds", 0.05)
    assert {"export", "prove cpu fp32 onnxruntime"} <= set(CACHED.findall(second_result.err)), second_result.err


@pytest.mark.slow
def test_ctrl_c_without_kept_results_mentions_none(built: Project) -> None:
    process = start_command(built, "profile", "tiny", "--target", "cpu", "--seconds", 30)
    seen_interrupt = interrupt(process, "profile cpu fp32", signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert seen_interrupt.endswith("interrupted\n") and "kept" not in seen_interrupt


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_behind(project: Project, tmp_path: Path) -> None:
    hold(project, tmp_path)
    process = start(project)
    step = int(text_of(tmp_path / "pid"))
    family = children(process)
    assert step in {child.pid for child in family}
    process.kill()
    process.communicate()
    _gone, alive_processes = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive_processes == []


def start_with_prefect(project: Project, home: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A run in the middle of its flow, and the processes that it has started."""
    process = start(project, "--runner", "prefect", home=home)
    assert process.stderr is not None
    for line in process.stderr:
        if "export: done" in line:
            break
    return process, children(process)


@pytest.mark.server
@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_a_prefect_run_and_its_server(project: Project, home: Path) -> None:
    """A terminal sends Ctrl-C to all processes of the foreground, Prefect's server among them."""
    process, family = start_with_prefect(project, home)
    os.killpg(process.pid, signal.SIGINT)
    _out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "what was finished is kept" in err
    assert "Error logging to API" not in err
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


@pytest.mark.server
@pytest.mark.slow
def test_a_killed_prefect_run_leaves_no_server_behind(project: Project, home: Path) -> None:
    process, family = start_with_prefect(project, home)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_same_command_finishes(project: Project, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes every write past the limit fail, as a full disk does."""
    project.change_spec(targets=["cpu"], precisions=["fp32"], calibration=None)
    code = (
        "import resource, signal, sys\nfrom enginesmith.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "build", project.spec, "--registry", project.registry]
    # Python would keep the first 4 KiB of what it compiles, and stumble over them ever after.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert result.returncode in (1, 3), result.stderr
    assert "Traceback" not in result.stderr
    assert project.run("list", "--json").json == []
    assert project.build().code == 0
    assert project.run("registry", "fsck", "--json").code == 0


def test_an_interruption_that_python_drops_is_repeated() -> None:
    """As in importlib's callback when its lock is freed: what is raised there does not leave it."""
    script = (
        "import signal, threading, weakref\nfrom enginesmith import __main__, cli\n"
        "def drop(*_):\n"
        "    one = threading.Event()\n"
        "    weak = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "    del one\n"
        f"    threading.Event().wait({PATIENCE_S})\n"
        "cli._call = drop\n__main__.main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (
        130,
        "interrupted; what was finished is kept, and is not done again\n",
    )
