"""The child's side of `process`: `python -m builders.execution.child WORKDIR LIFELINE PARENT` runs WORKDIR/job.json."""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from builders.execution.jobs import ChildTask, WorkerContext, decode_request
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import EnginesmithError, error_to_json

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
# Reads from the parent, which never writes: when the parent is gone, `read` ends and the process group is killed.
_GUARD = "read _; kill -KILL 0"


def main(workdir: Path, lifeline: int, parent: int) -> None:
    """Run WORKDIR/job.json, write WORKDIR/result.json, and end at once.

    lifeline: file descriptor of a pipe that closes when the caller ends.  parent: pid. The process ends by `os._exit`:
    the result is on disk, and a compiler's own teardown may hang or crash.
    """
    task = decode(json.loads((workdir / "job.json").read_text()), ChildTask)
    die_with_parent(parent)
    # `die_with_parent` ends only this process; the guard also ends processes that a compiler has started. Without a
    # shell there is no guard, and those processes live on.
    guard_pid = None
    with suppress(OSError):
        null_actions = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
        redirections = [(os.POSIX_SPAWN_DUP2, lifeline, 0), *null_actions]
        guard_pid = os.posix_spawn("/bin/sh", ["sh", "-c", _GUARD], {}, file_actions=redirections)
    os.close(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    part_path = workdir / "result.json.part"
    part_path.write_text(_outcome(task, workdir))
    part_path.replace(workdir / "result.json")
    sys.stdout.flush()
    sys.stderr.flush()
    if guard_pid is not None:  # also wait for it: process 1 of a container may not reap it
        with suppress(OSError):  # the job's own code may have ended it or waited for it
            os.kill(guard_pid, signal.SIGKILL)
            os.waitpid(guard_pid, 0)
    os._exit(0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; end now if `parent` is gone already.

    Linux only (prctl(2)); elsewhere a killed parent leaves its children to finish.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)


def _outcome(task: ChildTask, workdir: Path) -> str:
    """Run the request, and return its result or its exception as JSON."""
    try:
        request = decode_request(task.request)
        return json.dumps({"value": encode(request.run(WorkerContext(workdir, task.store)))})
    except EnginesmithError as error:
        traceback.print_exc()
        return json.dumps(error_to_json(error))
    except Exception as error:
        traceback.print_exc()
        return json.dumps({"exception": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
