"""The bodies of urllib3's answers, and the error for incomplete answers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from http.client import HTTPException, HTTPResponse
from typing import Any

from urllib3.exceptions import HTTPError


class NoWholeAnswerError(ValueError):
    """An answer lacks a part that belongs to it. If a connection ends among the headers, Python takes it for an answer
    with fewer headers and no body."""


class HttpBody:
    """The `Body` of a response of urllib3, `size` bytes, read from the response beneath it if there is one: urllib3's
    own `readinto` copies everything once more, a sixth of a download's CPU time.

    answers: a context that converts OSError, urllib3's errors and NoWholeAnswerError to Failed.
    """

    def __init__(self, response: Any, size: int, answers: Callable[[], AbstractContextManager[None]]) -> None:
        if size < 0:
            raise NoWholeAnswerError("a negative size")
        self._response, self._left, self._answers = response, size, answers

    def readinto(self, into: memoryview, /) -> int:
        """See `Body.readinto`."""
        target_view = into[: self._left]
        if not target_view:
            return 0
        raw_response = getattr(self._response, "_fp", None)
        with self._answers():
            try:
                count: int = (raw_response if isinstance(raw_response, HTTPResponse) else self._response).readinto(
                    target_view
                )
            except (OSError, HTTPException, HTTPError) as error:
                raise NoWholeAnswerError("broken off") from error
            if not count:
                raise NoWholeAnswerError("it ends too early")
        self._left -= count
        return count

    def close(self) -> None:
        """See `Body.close`."""
        if not self._left:
            self._response.release_conn()
        self._response.close()
