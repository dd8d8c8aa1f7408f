"""Threads of an engine's process: as many requests in flight as there are threads.

They share a session that several threads may run at once (`Capabilities.thread_safe`). Of any other each thread opens
one of its own, which holds the engine's memory once more, as a server with so many instances does.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from enginery.core.errors import EngineryError
from enginery.core.types import Session, Tensors
from validation.canary.concurrent import Timed, TrafficSegment, serve_requests
from validation.canary.replay import ReplayClock, serve

Job = tuple[TrafficSegment, list[Timed | None], float]
# So many seconds after it was asked for a segment begins: every thread is awake by then.
LEAD_S = 0.002


class Workers:
    """Threads that answer segments. failure: why an engine could not be opened in one of them; None: all are ready.

    opener, session: the engine, and the session of it that is open already.  thread_safe: whether several threads may
    run that at once.  warmup: inputs that each thread runs.
    They end with the process, whatever they do.
    """

    def __init__(
        self,
        opener: Callable[[], AbstractContextManager[Session]],
        session: Session,
        thread_safe: bool,
        in_flight: int,
        warmup: Sequence[Tensors],
    ) -> None:
        self._opener = (lambda: nullcontext(session)) if thread_safe else opener
        self._warmup, self._count = warmup, in_flight
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[EngineryError | None] = queue.SimpleQueue()
        for number in range(in_flight):
            threading.Thread(target=self._work, name=f"in flight {number}", daemon=True).start()
        self.failure = next(filter(None, [self._done.get() for _ in range(in_flight)]), None)

    def serve_segment(self, segment: TrafficSegment) -> deque[Timed]:
        """What came of each request behind the lead, in order; nothing else refers to it."""
        found: list[Timed | None] = [None] * len(segment)
        begun = ReplayClock().now() + LEAD_S
        for _ in range(self._count):
            self._jobs.put((segment, found, begun))
        for _ in range(self._count):
            self._done.get()
        answers = deque(timed for timed in found[segment.lead :] if timed is not None)
        found.clear()
        return answers

    def _work(self) -> None:
        try:
            self._run()
        except SystemExit as ended:  # in a thread it would end that thread, and the request would be waited for
            os._exit(ended.code if isinstance(ended.code, int) else 1)

    def _run(self) -> None:
        clock = ReplayClock()
        try:
            opened = self._opener()
            session = opened.__enter__()
        except Exception as error:
            told = error if isinstance(error, EngineryError) else EngineryError(f"{type(error).__name__}: {error}")
            self._done.put(told)
            return
        for inputs in self._warmup:
            serve(session, inputs, clock)
        self._done.put(None)
        while True:
            segment, found, begun = self._jobs.get()
            serve_requests(session, segment, found, clock, begun)
            self._done.put(None)
