"""What a build is doing, and how to end it early.

TensorRT calls its progress monitor for every step of every phase, thousands of times in a second for some, and one
that does much slows the build (pytorch/TensorRT#3215). So a step costs one reading of the clock here; what to do now is
told every `_TELL_S`, and whether the build shall end is asked every `_ASK_S`. How much is left is no matter of steps,
which cover little of a build: the history of builds predicts that.
"""

import time
from collections.abc import Callable
from typing import Any

_ASK_S = 0.2
_TELL_S = 2.0


def monitor(trt: Any, asked_to_stop: Callable[[], bool], tell: Callable[[str], None]) -> Any:
    """An `IProgressMonitor` that tells phases and stops the build when it is asked to. It must outlive the config."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self._asked_at = self._told_at = 0.0
            self._phase = self._told = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self._phase = phase_name

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002
            now = time.monotonic()
            if now - self._asked_at >= _ASK_S:
                self._asked_at = now
                self.stopped = self.stopped or asked_to_stop()
                self._say(now)
            return not self.stopped

        def _say(self, now: float) -> None:
            if self._phase != self._told and now - self._told_at >= _TELL_S:
                self._told, self._told_at = self._phase, now
                tell(f"compiling: {self._phase[:80].lower()}")

    return Monitor()
