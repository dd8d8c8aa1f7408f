"""The command line: `enginesmith ...`, or `python -m enginesmith ...`."""

import _thread
import importlib
import signal
import sys
import threading
import time
from typing import NoReturn

from enginesmith.rooms import prefer_own


def main() -> NoReturn:
    """Run the command line with this process's arguments, and exit: raises SystemExit."""
    sys.unraisablehook = _interrupt_again
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prefer_own()
        cli = importlib.import_module("enginesmith.cli")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    cli.main()
    raise SystemExit(0)


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Interrupt the main thread again if Python drops a KeyboardInterrupt: in finalizers and callbacks of weak
    references (https://docs.python.org/3/library/sys.html#sys.unraisablehook), such as those of importlib's locks."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    # In a thread: otherwise the signal would be handled, and dropped, in this function. Not with threading.Thread,
    # which could wait for a lock that the interrupted code holds.
    _thread.start_new_thread(_send_later, (threading.main_thread().ident or 0,))


def _send_later(thread: int) -> None:
    time.sleep(0.01)
    signal.pthread_kill(thread, signal.SIGTERM)


if __name__ == "__main__":
    main()
