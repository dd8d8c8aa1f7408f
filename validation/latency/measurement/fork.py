"""A measurement in a process of its own, for a fraction of what starting Python costs: a fork of this one.

A fork has its parent's modules, so it does not import them again, and its parent's addresses, so it would have its
parent's luck with them; it begins with memory of a random size taken, which moves the libraries and arrays that come
after (as Curtsinger & Berger, "STABILIZER: statistically sound performance evaluation", ASPLOS 2013). A runtime that
starts threads must not be imported in the parent: a fork has none of them.
"""

import json
import mmap
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from enginery.core.errors import EngineryError, error_from_json, error_to_json
from validation.latency.measurement.once import Once

# Pages and bytes that a fork takes at most before it begins.
_MOST_PAGES, _MOST_BYTES = 512, 1 << 16


def measured_apart(work: Callable[[], Once], folder: Path) -> Once:
    """What `work` measures in a fork of this process. folder: exists, and is empty.

    Raises the EngineryError that it raises, and EngineryError for any other end of the fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in the parent: those are numpy's, which are prepared for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _work(work, folder)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return Once.load(folder)
    if (folder / "error.json").exists():
        raise error_from_json(json.loads((folder / "error.json").read_text()))
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else "its traceback is above"
    raise EngineryError(f"the process that timed the engine gave no result: {how}")


def _work(work: Callable[[], Once], folder: Path) -> NoReturn:
    """It ends by `os._exit`: what this process shares with its parent is the parent's to put away."""
    code = 1
    try:
        pages, heap = random.randint(1, _MOST_PAGES), random.randint(1, _MOST_BYTES)  # noqa: S311 - not a secret
        taken = mmap.mmap(-1, mmap.PAGESIZE * pages), bytearray(heap)
        work().save(folder)
        del taken
        code = 0
    except EngineryError as error:
        (folder / "error.json").write_text(json.dumps(error_to_json(error)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
