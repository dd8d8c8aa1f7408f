"""Timing caches of full TensorRT: what the tuner has measured on this GPU, given to the next build.

A cache is good for one product, driver and version of TensorRT; with another it is an error to some releases
(NVIDIA/TensorRT#2144) and useless to the rest. So whoever keeps caches keys them by these three (`TimingCached`), and
what TensorRT refuses all the same is left out, with a note. A cache makes builds quicker and not reproducible
(NVIDIA/TensorRT#4798): it is no part of a build key. Not run on a GPU.
"""

from pathlib import Path

from builders.backends.timing_caches import GIVEN, GROWN
from enginery.core.errors import EngineryError
from enginery.core.untyped import Untyped


def use_given(config: Untyped, workdir: Path) -> list[tuple[str, str]]:
    """Give the tuner WORKDIR/timing.cache, else an empty cache to fill; a warning if the one there was left out."""
    path = workdir / GIVEN
    data = path.read_bytes() if path.is_file() else b""
    reason = _set(config, data)
    if not (data and reason):
        return []
    _set(config, b"")
    return [("WARNING", f"the timing cache of this GPU was left out, and begun anew: {reason}")]


def keep_grown(config: Untyped, workdir: Path) -> None:
    """Leave what the tuner knows now in WORKDIR."""
    cache = config.get_timing_cache()
    if cache is not None:
        (workdir / GROWN).write_bytes(bytes(cache.serialize()))


def merge_caches(trt: Untyped, logger: Untyped, older: bytes, newer: bytes) -> bytes:
    """Both caches as one. Raises EngineryError when TensorRT does not take them together."""
    config = trt.Builder(logger).create_builder_config()
    first = config.create_timing_cache(older)
    second = config.create_timing_cache(newer)
    if first is None or second is None or not first.combine(second, False):
        raise EngineryError("TensorRT does not merge these timing caches; the newer one alone is kept")
    return bytes(first.serialize())


def _set(config: Untyped, data: bytes) -> str:
    """Why TensorRT does not take it; '' when it does."""
    try:
        cache = config.create_timing_cache(data)
        taken = cache is not None and config.set_timing_cache(cache, False)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "" if taken else "TensorRT refuses it (another version, GPU or driver, or damaged)"
