"""A warm start: a process that compiles a model with torch.compile out of a compile cache that was pulled.

A cache is code of whoever published it: torch unpickles graphs and loads shared libraries out of it. So nothing of it
is read before its publisher is known (a trust policy whose signatures held when it was pulled, or the caller's word)
and its bytes have the digest of the manifest.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.client.pull import Pulled
from enginesmith.compile_caches.archive import MOST_BYTES, unpack
from enginesmith.compile_caches.probes import use_probes
from enginesmith.compile_caches.recipe import CacheRecipe
from enginesmith.core.codec import Excerpt, parse_as
from enginesmith.core.errors import (
    Digest,
    EnginesmithError,
    InputError,
    IntegrityError,
    UntrustedError,
    digest_of_bytes,
)
from enginesmith.core.hardware.evaluation import evaluate
from enginesmith.core.hardware.machine import Machine, cpu_here
from enginesmith.core.names import FileName
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Gpu, Requirement, hardware_of

if TYPE_CHECKING:
    import torch

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MOST_DESCRIPTION = 16 << 20


class StaleCacheError(EnginesmithError):
    """A compile cache that was made for another machine, installation or model."""


@dataclass(frozen=True)
class WarmStart:
    """A cache that this process compiles out of. folder: its files, removed at exit.  kernels: shared libraries in it.

    The folder is Inductor's cache for the whole process: what is compiled beside the cache goes there as well.
    """

    recipe: CacheRecipe
    folder: Path
    kernels: int

    def compile(self, model: "torch.nn.Module") -> "Callable[..., Any]":
        """The model, compiled with the cache's options when it is first called; it records no gradients.

        Raises StaleCacheError, naming what differs, for another model than the cache was made from, and for one in
        training mode.
        """
        differing = ["it is in training mode: call model.eval()"] if model.training else []
        if differing := [*differing, *self.recipe.differences(model)]:
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise StaleCacheError(f"stale: the cache was made from another model: {differing[0]}{more}; build it again")
        return self.recipe.options.compile(model)

    def misses(self) -> dict[str, int]:
        """What this process compiled although it has the cache, by kind; empty where the cache had everything."""
        made = _count_kernels(self.folder) - self.kernels
        return {name: count for name, count in (*count_misses().items(), ("C++ kernels", made)) if count}


def warm_start(pulled: "Pulled | Path | str", *, allow_unsigned: bool = False) -> WarmStart:
    """Have this process compile out of a cache. Call it before the first torch.compile.

    pulled: what `pull(..., kind='cache')` gave, or the description (JSON) that lies beside a cache's file.
    allow_unsigned: whether its code may run without a signature that a trust policy asked for, since everybody who can
    write to the registry (or, of a description, to its folder) may run code here.
    Raises UntrustedError before anything is read, IntegrityError for other bytes than were published, StaleCacheError
    with what differs on this machine, InputError for what is no compile cache.
    """
    if isinstance(pulled, Pulled):
        if not pulled.is_cache:
            raise InputError(f"{pulled!r} is an engine and no compile cache; pull it with kind='cache'")
        path, digest, requires = pulled.path, str(pulled.engine.digest), pulled.engine.requires
        signed = bool(pulled.located.signed_by)
    else:
        path, digest, requires = _read_description(Path(pulled))
        signed = False
    if not signed and not allow_unsigned:
        raise UntrustedError(
            f"{path.name} is code (pickles and shared libraries), and no signature of it was asked for; pull it with a "
            "trust policy, or give allow_unsigned=True if whoever can write to the registry may run code here"
        )
    check_fresh(requires, path.name)
    return open_cache(path, digest)


def open_cache(path: Path, digest: str, folder: Path | None = None) -> WarmStart:
    """Have this process compile out of the cache file `path`, whose publisher is trusted; raises as `warm_start`.

    folder: an empty one for its files; None is a new one, which is removed at exit.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); pull it again") from error
    if (found := digest_of_bytes(data)) != digest:
        raise IntegrityError(f"{path} has the digest {found[:12]}, and {digest[:12]} was published; pull it again")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="enginesmith-cache-"))  # readable by this user alone
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        recipe = unpack(data, folder)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}") from error
    use_folder(folder, threads=1)
    use_probes(recipe.probes)
    return WarmStart(recipe, folder, _count_kernels(folder))


def use_folder(folder: Path, threads: int | None = None) -> None:
    """Make `folder` Inductor's cache in this process. threads: that compile: one where nothing is left to do, since the
    pool of compiling processes is started even then; None leaves torch's default."""
    os.environ[FOLDER_VARIABLE] = str(folder)
    if threads:
        import torch._inductor.config

        torch._inductor.config.compile_threads = threads


def check_fresh(requires: tuple[Requirement, ...], name: str) -> None:
    """Raise StaleCacheError where this machine or installation is not the one that a cache was made for."""
    for_gpu = isinstance(hardware_of(requires), Gpu)
    machine = (Machine.from_name() if for_gpu else cpu_here()).with_installed(requires)
    for found in evaluate(requires, machine):
        if found.state != "met" and found.words:
            raise StaleCacheError(f"{name}: {found.words}; pull the one that fits, or build it here")


def count_misses() -> dict[str, int]:
    """Graphs that this process found in no cache and compiled, by kind, by torch's own counters."""
    from torch._dynamo.utils import counters

    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    # A trace that is begun anew, since a size turned out to be a constant, misses and compiles nothing.
    begun_anew = autograd["total"] - autograd["ok"]
    return {
        "graphs of Inductor": int(inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]),
        "graphs of AOTAutograd": max(0, int(autograd["autograd_cache_miss"] - begun_anew)),
    }


def count_frames() -> int:
    """How many frames dynamo has compiled in this process, recompilations among them."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["ok"])


def _count_kernels(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.so"))


@dataclass(frozen=True)
class _Description(Excerpt):
    file: FileName
    digest: Digest
    requires: tuple[Requirement, ...]
    kind: str = ""


def _read_description(path: Path) -> tuple[Path, str, tuple[Requirement, ...]]:
    """File, digest and requirements out of the description beside a cache."""
    try:
        with path.open("rb") as stream:
            found = parse_as(stream.read(_MOST_DESCRIPTION + 1), _MOST_DESCRIPTION, _Description)
        if found.kind != "cache":
            raise InputError(f"{path} describes no compile cache; `enginesmith pull --kind cache` writes one")
        return path.parent / found.file, found.digest, found.requires
    except (OSError, Malformed) as error:
        raise InputError(f"{path} is no description of a compile cache: {error}") from error
