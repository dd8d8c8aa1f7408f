"""A bound on the memory that a library may take for one call, where a few bytes of input can ask for any amount."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def at_most(extra_bytes: int) -> Iterator[None]:
    """Inside, the process gets so much more memory than it has, and then MemoryError.

    The limit (RLIMIT_AS) is the whole process's for that time: for processes that do nothing else meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is None:  # not Linux: whoever started this process limits it
        yield
        return
    wanted = pages * resource.getpagesize() + extra_bytes
    known = [limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
