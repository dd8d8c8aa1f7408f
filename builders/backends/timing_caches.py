"""What a tuner has measured, given to the next build on a machine of that kind.

Such a cache makes builds quicker or better and not reproducible: it is no part of a build key. Whoever builds puts one
at WORKDIR/`GIVEN` and finds the grown one at WORKDIR/`GROWN`.
"""

from typing import Protocol, runtime_checkable

GIVEN = "timing.cache"
GROWN = "timing.grown"


@runtime_checkable
class TimingCached(Protocol):
    """A backend that tunes by measuring, and can be given what was measured before."""

    def timing_place(self) -> tuple[str, str] | None:
        """The product (a GPU's, or a CPU's where CPUs are tuned for) and the compiler's version that a cache from here
        is good for; None where nothing is tuned."""
        ...

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """One cache with what both know. Raises EngineryError when they do not go together."""
        ...
