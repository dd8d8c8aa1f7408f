"""The output of a job, kept within bounds and without credentials.

Whole lines are scrubbed before anything is cut, as a cut through a secret would hide it from the scrubber. A line that
has not ended yet is not shown.
"""

import re
from collections import deque
from collections.abc import Callable

from builders.execution.scrub import HIDDEN

# Of one job the first and the last so many bytes are kept.
HEAD_BYTES = 1 << 20
TAIL_BYTES = 3 << 20
# So many characters of a job are shown while it runs.
LIVE_BYTES = 16 << 10
# A line is cut here; the margin is cut off after scrubbing, since a secret may lie across the first cut.
LONGEST_LINE = 64 << 10
MARGIN = 4 << 10
# So many characters are scrubbed at once: line by line would cost more than the rest of watching a build.
PIECE = 64 << 10
_KEY_BEGINS, _KEY_ENDS = "-----BEGIN ", "-----END "
_LINE_END = re.compile(r"(?<=[\n\r])")


class KeptLog:
    """The log of one job; for one thread at a time. scrub: replaces what is secret in a text of whole lines."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub
        self._open = ""
        self._dropping = self._in_key = False
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._head_bytes = self._tail_bytes = self._left_out = 0

    def feed(self, text: str) -> None:
        """Add what was printed next; it may end anywhere."""
        for start in range(0, len(text), PIECE):
            piece = self._open + text[start : start + PIECE]
            end = max(piece.rfind("\n"), piece.rfind("\r")) + 1
            self._open = piece[end:]
            self._take(piece[:end])
            if len(self._open) > LONGEST_LINE:
                if not self._dropping:
                    self._keep(self._scrub(self._open)[: LONGEST_LINE - MARGIN] + " [the line is longer]\n")
                    self._dropping = True
                self._open = ""

    def close(self) -> None:
        """Take the last line, which has no end."""
        rest, self._open = self._open, ""
        self._take(rest)

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
        for lines in [*reversed(self._tail), *reversed(self._head)]:
            parts.append(lines)
            length += len(lines)
            if length >= most:
                break
        return "".join(reversed(parts))[-most:]

    def _take(self, lines: str) -> None:
        """Keep whole lines, without private keys and scrubbed."""
        if lines and self._dropping:  # first the rest of a line that was cut
            self._dropping = False
            lines = _LINE_END.split(lines, 1)[1] if _LINE_END.search(lines) else ""
        if self._in_key or _KEY_BEGINS in lines:
            lines = "".join(map(self._without_key, _LINE_END.split(lines)))
        if lines:
            self._keep(self._scrub(lines))

    def _without_key(self, line: str) -> str:
        """The line; a private key, whose lines look like any others, is replaced by one word."""
        if self._in_key:
            self._in_key = _KEY_ENDS not in line
            return ""
        self._in_key = _KEY_BEGINS in line and "PRIVATE KEY" in line and _KEY_ENDS not in line
        return f"{HIDDEN}\n" if self._in_key else line

    def _keep(self, lines: str) -> None:
        size = len(lines.encode(errors="replace"))
        if not self._tail and self._head_bytes + size <= HEAD_BYTES:
            self._head.append(lines)
            self._head_bytes += size
            return
        self._tail.append(lines)
        self._tail_bytes += size
        while self._tail_bytes > TAIL_BYTES:
            gone = len(self._tail.popleft().encode(errors="replace"))
            self._tail_bytes -= gone
            self._left_out += gone
