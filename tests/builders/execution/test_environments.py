import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from builders.execution import environments
from builders.execution.environments import make_environment, parse_pins
from enginesmith.core.errors import InputError, UnavailableError


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_the_pinned_package_precedes_the_local_ones(tmp_path: Path, monkeypatch) -> None:
    write_wheel(tmp_path, "junitparser", "99.0")  # this environment has another
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    notes: list[str] = []
    python = make_environment({"junitparser": "99.0"}, tmp_path / "environments", notes.append)
    assert any(re.fullmatch(r"environment with .*==99.0: Installing .* junitparser \(\d+ s\)", note) for note in notes)
    shown_text = "import click, enginesmith, junitparser; print(junitparser.version)"
    assert subprocess.run([python, "-c", shown_text], capture_output=True, text=True, check=True).stdout == "99.0\n"
    monkeypatch.setattr(subprocess, "Popen", None)  # the second time nothing is installed
    assert make_environment({"junitparser": "99.0"}, tmp_path / "environments") == python


@pytest.mark.slow
def test_a_failed_pip_leaves_no_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UnavailableError, match=r"pip cannot install absent-package==1: .*--python"):
        make_environment({"absent-package": "1"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('<pip._vendor.X object "
            "at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/a/\n"
            "ERROR: No matching distribution found for a==1",
            "the package index cannot be reached ([Errno 111] Connection refused); install it yourself",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement a==1 (from versions: 2, 3, 4, 5)\n"
            "ERROR: No matching distribution found for a==1",
            "there is no such version; the newest that pip finds are 3, 4, 5; install it yourself",
        ),
        ("ERROR: no room", "ERROR: no room; install it yourself"),
    ],
)
def test_pips_real_reason_comes_first(tmp_path: Path, monkeypatch, output: str, words: str) -> None:
    (tmp_path / "pip").write_text(f"#!/bin/sh\ncat <<'END' >&2\n{output}\nEND\nexit 1\n")
    (tmp_path / "pip").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "pip"))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(UnavailableError, match=re.escape(f"pip cannot install a==1: {words}")):
        environments._install(tmp_path, [], {"a": "1"}, str)


def test_pip_is_killed_on_interruption(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "pip").write_text(f"#!/bin/sh\necho Collecting a\nsleep 20\ntouch {tmp_path}/ended\n")
    (tmp_path / "pip").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "pip"))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(SystemExit):
        environments._install(tmp_path, [], {"a": "1"}, lambda note: "Collecting" in note and sys.exit())
    assert not (tmp_path / "ended").exists()


@pytest.mark.slow
def test_a_partial_environment_of_a_killed_process_is_rebuilt(tmp_path: Path, monkeypatch) -> None:
    write_wheel(tmp_path, "junitparser", "99.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "environments"
    with monkeypatch.context() as killed_context, pytest.raises(KeyboardInterrupt):
        killed_context.setattr(environments, "_install", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        killed_context.setattr(shutil, "rmtree", lambda *_, **__: None)  # as after SIGKILL
        make_environment({"junitparser": "99.0"}, folder)
    (part,) = folder.glob("*.part")
    (part / "stale").touch()
    python = make_environment({"junitparser": "99.0"}, folder)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", python.parents[1].name]
    assert not (python.parents[1] / "stale").exists()


@pytest.mark.parametrize("texts", [["onnxruntime"], ["--pre==1"], ["a==1 --pre"], ["a_b==1", "a-b==2"], ["a>=1"]])
def test_a_toolchain_is_packages_with_one_version_each(texts: list[str]) -> None:
    with pytest.raises(InputError, match=r"as in onnxruntime==1\.32\.0"):
        parse_pins(texts)
