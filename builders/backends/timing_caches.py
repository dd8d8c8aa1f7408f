"""What a tuner has measured, given to the next build on a machine of that kind.

Such a cache makes builds quicker or better and not reproducible: it is no part of a build key. Whoever builds puts one
at WORKDIR/`GIVEN` and finds the grown one at WORKDIR/`GROWN`.
"""

from typing import Protocol, cast

from enginery.core.types import Backend

GIVEN = "timing.cache"
GROWN = "timing.grown"


class TimingCached(Protocol):
    """A backend that can be given what its tuner measured before (`Capabilities.timing_cache`)."""

    def timing_place(self) -> tuple[str, str] | None:
        """The product (a GPU's, or a CPU's where CPUs are tuned for) and the compiler's version that a cache from here
        is good for; None where nothing is tuned."""
        ...

    def merge_timing(self, older: bytes, newer: bytes) -> bytes:
        """One cache with what both know. Raises EngineryError when they do not go together."""
        ...


def timing_cached(backend: Backend) -> TimingCached | None:
    """The backend, where it takes a timing cache; else None."""
    return cast("TimingCached", backend) if backend.capabilities.timing_cache else None
