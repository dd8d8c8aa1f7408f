"""A daemon thread that others wait for: whatever ends its work, its owner answers those who wait.

A thread may end by more than an Exception: SystemExit of a plug-in, a panic of a library in Rust (pyo3's
PanicException is a BaseException). Python then ends that thread alone, and every future and condition that it was to
serve would wait for ever.
"""

from collections.abc import Callable
from threading import Thread, current_thread


class WorkerThread(Thread):
    """A daemon thread that runs `work`. fail: called in the thread with what `work` raised, of any class."""

    def __init__(self, name: str, work: Callable[[], object], fail: Callable[[BaseException], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._fail = work, fail

    def run(self) -> None:
        """Run `work`, and `fail` where it raises."""
        try:
            self._work()
        except BaseException as error:
            self._fail(error)

    def wait_for_end(self) -> None:
        """Wait until it has ended; not in the thread itself, where a callback may close its owner."""
        if current_thread() is not self:
            self.join()


def describe_error(error: BaseException) -> str:
    """'ValueError: why'; the class alone where `str`, which is the error's own code, raises itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__
