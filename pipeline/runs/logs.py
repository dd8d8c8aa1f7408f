"""What a job printed, kept within bounds and without credentials.

Lines are scrubbed whole, before anything is cut, so that no cut can split a secret into two harmless halves; a line
that has not ended yet is not shown.
"""

import re
from collections import deque
from collections.abc import Callable

# Of one job: the first and the last so many bytes are kept.
HEAD_BYTES = 1 << 20
TAIL_BYTES = 3 << 20
# Of what is shown of a job while it runs.
LIVE_BYTES = 16 << 10
# A line is cut here; the margin is cut off once more after scrubbing, since a secret may lie across the cut.
LONGEST_LINE = 64 << 10
MARGIN = 4 << 10
_KEY_BEGINS, _KEY_ENDS = "-----BEGIN ", "-----END "
_LINE_END = re.compile(r"(?<=[\n\r])")


class KeptLog:
    """The log of one job. Not safe from several threads: its owner locks."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub
        self._open = ""
        self._dropping = self._in_key = False
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._head_bytes = self._tail_bytes = self._left_out = 0

    def feed(self, text: str) -> None:
        """Add what was printed next; it may end anywhere."""
        *whole, self._open = _LINE_END.split(self._open + text)
        for line in whole:
            self._take(line)
        if len(self._open) > LONGEST_LINE:
            self._cut()

    def close(self) -> None:
        """Nothing more comes."""
        line, self._open = self._open, ""
        if line:
            self._take(line)

    @property
    def empty(self) -> bool:
        """Whether nothing was printed."""
        return not (self._head or self._open)

    def text(self) -> str:
        """Head and tail, with a line that says what was left out between them."""
        gap = f"\n[... {self._left_out} bytes were left out ...]\n" if self._left_out else ""
        return "".join(self._head) + gap + "".join(self._tail)

    def last(self, most: int = LIVE_BYTES) -> str:
        """The end of what is kept, at most so many characters."""
        parts: list[str] = []
        length = 0
        for line in [*reversed(self._tail), *reversed(self._head)]:
            parts.append(line)
            length += len(line)
            if length >= most:
                break
        return "".join(reversed(parts))[-most:]

    def _take(self, line: str) -> None:
        if self._dropping:  # the rest of a line that was cut
            self._dropping = False
            return
        self._keep(self._without_key(line))

    def _without_key(self, line: str) -> str:
        """Scrubbed; of a private key, whose lines look like any other, only the first line is left, hidden."""
        if self._in_key:
            self._in_key = _KEY_ENDS not in line
            return ""
        self._in_key = _KEY_BEGINS in line and "PRIVATE KEY" in line and _KEY_ENDS not in line
        return self._scrub(line) + ("\n" if self._in_key else "")

    def _cut(self) -> None:
        if not self._dropping:
            self._keep(self._scrub(self._open)[: LONGEST_LINE - MARGIN] + " [the line is longer]\n")
            self._dropping = True
        self._open = ""

    def _keep(self, line: str) -> None:
        size = len(line.encode(errors="replace"))
        if not self._tail and self._head_bytes + size <= HEAD_BYTES:
            self._head.append(line)
            self._head_bytes += size
            return
        self._tail.append(line)
        self._tail_bytes += size
        while self._tail_bytes > TAIL_BYTES:
            gone = len(self._tail.popleft().encode(errors="replace"))
            self._tail_bytes -= gone
            self._left_out += gone
