"""Functions that the process, local and dispatch tests run in processes of their own."""

import ctypes
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from builders.execution.fork_server import fork_here
from builders.execution.process import run_job
from enginesmith.core import errors
from tests.calls import call_job
from tests.waiting import until


def add(a: int, b: int) -> int:
    return a + b


def where(workdir: Path) -> dict[str, object]:
    (workdir / "dropping").write_text("x")
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "workdir": str(workdir),
        "cwd": str(Path.cwd()),
        "tmp": tempfile.gettempdir(),
        "session": os.getsid(0),
        "core_bytes": resource.getrlimit(resource.RLIMIT_CORE)[0],
    }


def variables() -> dict[str, str]:
    return dict(os.environ)


def imported(names: list[str]) -> list[str]:
    """Those of some modules that were imported when this process was forked, or by its own request."""
    return [name for name in names if name in sys.modules]


def mark(path: str) -> None:
    """Leave a file, so that a test sees that the job ran."""
    Path(path).write_text(str(os.getpid()))


def boom() -> None:
    print("about to fail")
    raise ValueError("seven is not prime enough")


def refuse(cls: str, arguments: list[object]) -> None:
    raise getattr(errors, cls)(*arguments)


class OutsideError(errors.ModelError):
    """A subclass that the caller does not know, with a constructor of its own."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.both = (first, second)

    def __reduce__(self):
        return (OutsideError, self.both)


def refuse_from_outside() -> None:
    raise OutsideError(1, 2)


def crash() -> None:
    print("reading address zero", flush=True)
    ctypes.string_at(0)


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def leave(status: int) -> None:
    sys.exit(status)


def unencodable() -> object:
    return object()


def hang(path: str | None = None) -> None:
    if path:
        mark(path)
    time.sleep(600)


def hold_the_gil(path: str) -> None:
    mark(path)
    ctypes.PyDLL(None).sleep(600)


def spawn(path: str, wait: bool) -> None:
    """Start a grandchild that outlives its parent, and write its pid."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    if wait:
        time.sleep(600)


def eat(mib: int) -> None:
    block = bytearray(mib * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(600)


def eat_in_a_child(mib: int) -> None:
    code = f"import time; b = bytearray({mib} * 2**20); b[::4096] = b'x' * len(b[::4096]); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], check=True)


def chatter(lines: int) -> None:
    for line in range(lines):
        print(f"line {line}")
    raise RuntimeError("enough")


def stay(path: str, go: str) -> None:
    """Leave a file, and stay until the test makes another."""
    mark(path)
    until(Path(go).exists)


def raylet() -> int:
    """The pid of the raylet whose worker started this process: which node it runs on."""
    return int(os.environ["RAY_RAYLET_PID"])


def kill_worker(path: str) -> None:
    """Note the node, and kill the Ray worker that this process works for, which may not be its parent."""
    with Path(path).open("a") as marks:
        marks.write(f"{raylet()}\n")
    next(parent for parent in psutil.Process().parents() if parent.cmdline()[0].startswith("ray::")).kill()
    time.sleep(600)


def spawn_and_kill_parent(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Path(path).open("a") as marks:
        marks.write(f"{child.pid}\n")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def say_and_hang(path: str) -> None:
    mark(path)
    print("here", flush=True)
    time.sleep(600)


def meet(mine: str, other: str, folder: str) -> str:
    """Wait until the other is there too."""
    mark(str(Path(folder) / mine))
    until((Path(folder) / other).exists)
    return "met"


def children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children()]


def hold(mib: int, limit_mib: int) -> int:
    """Hold memory: where it is over the limit, until that is seen."""
    block = bytearray(mib * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    if mib > limit_mib:
        time.sleep(600)
    return mib


def unit(index: int, fate: str, folder: str) -> int:
    """A unit of a simulated fleet: crashes always, the first time, or never; notes that it was built."""
    first_path = Path(folder) / f"{index}.tried"
    if fate == "crash" or (fate == "crash once" and not first_path.exists()):
        mark(str(first_path))
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "error":
        raise errors.ModelError(f"unit {index} is refused")
    with (Path(folder) / f"{index}.built").open("a") as built_file:
        built_file.write("x")
    return index


def chatter_and_crash(lines: int) -> None:
    for line in range(lines):
        print(f"line {line}")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def phases(names: list[str], folder: str) -> None:
    """Print one phase after another, and stay in each until a watch has left a file of its name in the folder."""
    from builders.execution.process import enter_phase

    for name in names:
        enter_phase(name)
        print(f"now {name} \N{GREEK SMALL LETTER MU}", flush=True)
        until((Path(folder) / name).exists)


def sleep_once(path: str) -> str:
    if not Path(path).exists():
        mark(path)
        time.sleep(600)
    return "elsewhere"


def end_when_asked(after_s: float, workdir: Path) -> None:
    from builders.execution.process import heed_stop

    stop_event = heed_stop()
    (workdir / "begun").write_text("it heeds")
    until(stop_event)
    time.sleep(after_s)
    (workdir / "kept").write_text("what it learnt")


def within(
    workdir: Path, function: str, arguments: dict[str, object] | None = None, threads: int = 0
) -> dict[str, object]:
    """Run a function of this module in a process within this one, which has imported `colorsys` before."""
    importlib.import_module("colorsys")
    for _ in range(threads):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    with fork_here() as start:
        job = call_job("within", f"tests.builders.jobs:{function}", arguments)
        (folder := workdir / "within").mkdir()
        result = run_job(job, folder, start=start)
    return {"pid": os.getpid(), "children": [child.pid for child in psutil.Process().children()], "found": result}
