"""A compile cache of torch: a zip of Inductor's cache folder with its requirements on a machine. A process compiles
with it (a warm start), and the saved time is measured.

A cache contains code of its publisher: torch unpickles graphs and loads shared libraries from it. So no part of it is
read before its publisher is trusted (by a trust policy at the pull, or by the caller) and its bytes have the published
digest. torch looks up a graph by its content: for another model, a cache costs time and does not change results.
"""

import atexit
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from enginesmith.client.pull import Pulled, PulledAttachment
from enginesmith.core import parsing
from enginesmith.core.codec import decode, document_error, encode
from enginesmith.core.errors import (
    EnginesmithError,
    InputError,
    IntegrityError,
    ModelError,
    UntrustedError,
    digest_of_file,
)
from enginesmith.core.hardware.evaluation import evaluate, list_facts
from enginesmith.core.hardware.machine import Machine, cpu_here
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Gpu, Installation, Requirement, for_target, hardware_of, same_versions
from enginesmith.core.text import DAMAGED, check_compression
from enginesmith.core.types import Target
from enginesmith.registry.evidence.attachments import COMPILE_CACHE, DESCRIPTION, read_attachment

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MOST_BYTES = 4 << 30
_REQUIRES, _FILES = "requires.json", "files/"
# Locks of running processes.
_LEFT_OUT = "locks"
_DATE = (1980, 1, 1, 0, 0, 0)


class StaleCacheError(EnginesmithError):
    """A compile cache that was made for another machine or installation."""


def pack(folder: Path, requires: tuple[Requirement, ...], path: Path) -> None:
    """Write the files of a cache folder and their requirements to the zip `path`; equal files give equal bytes."""
    with zipfile.ZipFile(path, "w") as archive:

        def write(name: str, data: bytes | str) -> None:
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)

        write(_REQUIRES, json.dumps(encode(requires), sort_keys=True))
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            if file.is_file() and not file.is_symlink() and _LEFT_OUT not in name.parts:
                write(f"{_FILES}{name.as_posix()}", file.read_bytes())


def read_requirements(path: Path) -> tuple[Requirement, ...]:
    """Requirements of a cache file on a machine. Raises IntegrityError for an invalid file, and OSError."""
    with _opened(path) as archive:
        return decode(parsing.load_json(archive.read(_REQUIRES)), tuple[Requirement, ...])


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The zip of a cache. Raises IntegrityError if it is damaged, too large, or not a cache."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_compression(archive)
            if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                raise IntegrityError(f"its files take more than {MOST_BYTES >> 30} GiB")
            yield archive
    except (*DAMAGED, KeyError, IntegrityError) as error:
        raise document_error(f"{path} is not a compile cache", error, "measure one with --measure") from error


@dataclass(frozen=True)
class WarmStart:
    """A cache that this process compiles with. folder: its files, removed at exit.  kernels: its shared libraries.

    The folder is Inductor's cache for the whole process: other compilations write there as well.
    """

    folder: Path
    kernels: int

    def misses(self) -> dict[str, int]:
        """Cache misses of this process: compilations, by kind; empty if the cache had everything."""
        from torch._dynamo.utils import counters

        fx_counters, aot_counters = counters["inductor"], counters["aot_autograd"]
        # A trace that restarts because a size is a constant is a miss without compilation.
        uncached_count = aot_counters["total"] - aot_counters["ok"]
        counts = {
            "graphs of Inductor": int(fx_counters["fxgraph_cache_miss"] + fx_counters["fxgraph_cache_bypass"]),
            "graphs of AOTAutograd": max(0, int(aot_counters["autograd_cache_miss"] - uncached_count)),
            "C++ kernels": _count_kernels(self.folder) - self.kernels,
        }
        return {name: count for name, count in counts.items() if count}


def warm_start(pulled: "Pulled | PulledAttachment | Path | str", *, allow_unsigned: bool = False) -> WarmStart:
    """Make this process compile with a cache. Call it before the first torch.compile.

    pulled: the result of `pull`, whose newest compile cache is used, or the document (NAME.attachment.json) beside a
    cache's file. allow_unsigned: whether its code may run although no signature of it was checked: then everybody who
    can write to the registry (or, for a document, to its folder) can run code here.
    Raises UntrustedError before anything is read, IntegrityError for other bytes than were published, StaleCacheError
    with the differences of this machine, InputError if there is no compile cache.
    """
    cache = _cache_of(pulled)
    if not cache.signed_by and not allow_unsigned:
        raise UntrustedError(
            f"{cache.path.name} is code (pickles and shared libraries), and no signature of it was checked; pull it "
            "with a trust policy, or give allow_unsigned=True if whoever can write to the registry may run code here"
        )
    is_for_gpu = isinstance(hardware_of(cache.attachment.requires), Gpu)
    machine = (Machine.from_name() if is_for_gpu else cpu_here()).with_installed(cache.attachment.requires)
    for finding in evaluate(cache.attachment.requires, machine):
        if finding.state != "met" and finding.words:
            raise StaleCacheError(f"{cache.path.name}: {finding.words}; pull the one that fits, or make it here")
    return open_cache(cache.path, cache.attachment.digest)


def _cache_of(pulled: "Pulled | PulledAttachment | Path | str") -> PulledAttachment:
    """The compile cache that was pulled. Raises InputError with the reason if there is none."""
    if isinstance(pulled, Pulled):
        cache = next(
            (candidate for candidate in pulled.attachments if candidate.attachment.kind == COMPILE_CACHE), None
        )
        if cache is None:
            reason_text = "; ".join(f"{name}: {reason}" for name, reason in pulled.left_out) or "its version has none"
            raise InputError(f"{pulled!r} has no compile cache: {reason_text}")
        return cache
    if isinstance(pulled, PulledAttachment):
        pulled_cache = pulled
    else:
        path = Path(pulled)
        try:
            attachment = read_attachment(path.read_bytes())
        except (OSError, Malformed) as error:
            raise InputError(f"{path} is not a document of a compile cache (NAME{DESCRIPTION}): {error}") from error
        pulled_cache = PulledAttachment(path.with_name(attachment.name), path, attachment)
    if pulled_cache.attachment.kind != COMPILE_CACHE:
        raise InputError(
            f"{pulled_cache.path} is a {pulled_cache.attachment.kind}, not a compile cache ({COMPILE_CACHE})"
        )
    return pulled_cache


def open_cache(path: Path, digest: str) -> WarmStart:
    """Make this process compile with the cache file `path`, whose publisher is trusted; raises as `warm_start`."""
    try:
        actual_digest = digest_of_file(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); pull it again") from error
    if actual_digest != digest:
        raise IntegrityError(
            f"{path} has the digest {actual_digest[:12]}, but {digest[:12]} was published; pull it again"
        )
    folder = Path(tempfile.mkdtemp(prefix="enginesmith-cache-"))  # readable only by this user
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with _opened(path) as archive:
        archive.extractall(folder)  # never outside the folder: extractall removes '..' from names
    use_folder(files := folder / _FILES, threads=1)
    return WarmStart(files, _count_kernels(files))


def use_folder(folder: Path, threads: int | None = None) -> None:
    """Make `folder` Inductor's cache in this process. threads: number of compiling threads: 1 if nothing must be
    compiled, since torch starts its pool of processes even then; None is torch's default."""
    os.environ[FOLDER_VARIABLE] = str(folder)
    _answer_probes(folder / "probes.json")
    if threads:
        import torch._inductor.config

        torch._inductor.config.compile_threads = threads


def _answer_probes(record: Path) -> None:
    """Make Inductor's probes of vector instructions read their answers from a file, and write them to it. Each probe
    starts a process that imports torch, even if its library exists (torch 2.13, `_inductor.cpu_vec_isa.VecISA`)."""
    from torch._inductor.cpu_vec_isa import VecISA

    answers: dict[str, bool] = json.loads(record.read_bytes()) if record.exists() else {}
    probe = getattr(VecISA, "_probe_load", None)

    def answer(self: object, library: str) -> bool:
        if (name := Path(library).name) not in answers and probe:
            answers[name] = bool(probe(self, library))
            record.write_text(json.dumps(answers))
        return answers[name]

    if probe:  # other versions of torch probe in other ways
        setattr(VecISA, "_probe_load", answer)  # noqa: B010 - mypy accepts no assignment to a method


def _count_kernels(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.so"))


# The time that a cache saves: two fresh processes import torch, make the model, compile it and call it, one with an
# empty folder and one with the cache. CPU seconds are compared, because other load changes them less.


@dataclass(frozen=True)
class MeasuredStart:
    """Seconds of a process and its children until its first answer: CPU time, and wall clock time.

    compiled_again: number of graphs and kernels that the warm process compiled in all calls.
    cold_cpu_s, warm_cpu_s: CPU time, without the cache and with it. cold_s, warm_s: wall clock time, likewise.
    """

    cold_cpu_s: float
    warm_cpu_s: float
    cold_s: float
    warm_s: float
    compiled_again: int

    def to_json(self) -> dict[str, float]:
        """The measurements in an attachment's document. warm_of_cold: the ratio of the CPU seconds."""
        figures = {**asdict(self), "warm_of_cold": self.warm_cpu_s / self.cold_cpu_s}
        return {name: round(value, 3) for name, value in figures.items() if math.isfinite(value)}


def measure_start(entry_point: str, cache: Path) -> MeasuredStart:
    """Measure the first answer of a fresh process, cold, and with the file `cache`, which is created if it is missing.

    entry_point: 'MODULE:FUNCTION', found from the working folder. The function returns the result of torch.compile, as
    the server calls it, and the inputs of a call (a tuple, or a mapping by name), or a list of them, one for each size.
    Raises InputError if it returns something else, ModelError if a process fails or the results of the two differ.
    """
    with tempfile.TemporaryDirectory(prefix="enginesmith-start-") as folder:
        cold_times = _start("cold", entry_point, cache, Path(folder))
        warm_times = _start("warm", entry_point, cache, Path(folder))
    return MeasuredStart(
        cold_times["cpu_s"], warm_times["cpu_s"], cold_times["wall_s"], warm_times["wall_s"], int(warm_times["misses"])
    )


def _start(side: Literal["cold", "warm"], entry_point: str, cache: Path, folder: Path) -> dict[str, float]:
    """Run one process. folder: for the cold process's files and answers."""
    program = f"from {__name__} import run_once; run_once()"
    command = [sys.executable, "-c", program, side, entry_point, str(cache.absolute()), str(folder)]
    command.append(repr(time.monotonic()))
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()] or [
            f"it ended with {process.returncode}"
        ]
        raise ModelError(f"{entry_point}: the {side} start failed: {lines[-1]}")
    measurements: dict[str, float] = json.loads((folder / f"{side}.json").read_bytes())
    return measurements


def run_once() -> None:
    """The main function of a process of `measure_start`. sys.argv has the side, the entry point, the cache, the folder,
    and the start time on the monotonic clock, which all processes of a machine share."""
    import torch

    start_kind, entry_point, cache, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    warm_cache = open_cache(cache, digest_of_file(cache)) if start_kind == "warm" else None
    if warm_cache is None:
        (folder / "inductor").mkdir()
        use_folder(folder / "inductor")
    model, argument_sets = load_entry_point(entry_point)
    answers, measurements = [], dict[str, float]()
    with torch.no_grad():
        for arguments in argument_sets:
            answers.append(model(**arguments) if isinstance(arguments, Mapping) else model(*arguments))
            measurements = measurements or {
                "cpu_s": sum(os.times()[:4]),
                "wall_s": time.monotonic() - float(sys.argv[5]),
            }
    measurements["misses"] = sum(warm_cache.misses().values()) if warm_cache else 0
    _compare(answers, folder / "answers.pt")
    if warm_cache is None and not cache.exists():
        is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        pack(folder / "inductor", _requirements("cuda" if is_cuda else "cpu"), cache)
    (folder / f"{start_kind}.json").write_text(json.dumps(measurements))


def load_entry_point(entry_point: str) -> tuple[Callable[..., Any], list[Any]]:
    """The compiled model of an entry point, and the inputs of its calls. Raises InputError."""
    import torch

    torch.manual_seed(0)  # random weights must be the same in both processes
    module, separator, function = entry_point.partition(":")
    try:
        result = getattr(import_module(module), function)() if separator else ()
    except (ImportError, AttributeError) as error:
        raise InputError(f"{entry_point}: {error}; give MODULE:FUNCTION, found from {Path.cwd()}") from error
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    if not callable(model):
        raise InputError(f"{entry_point} must return the result of torch.compile, and the inputs of a call")
    return model, inputs if isinstance(inputs, list) else [inputs]


def _compare(answers: list[Any], path: Path) -> None:
    """Store the outputs of a cold process; raise ModelError if outputs of a warm one differ."""
    import torch

    if not path.exists():
        torch.save(answers, path)
        return
    try:
        torch.testing.assert_close(answers, torch.load(path, weights_only=True))
    except AssertionError as error:
        raise ModelError(f"its answers differ from those of a cold start: {str(error).splitlines()[0]}") from error


def _requirements(device: str) -> tuple[Requirement, ...]:
    """Requirements on machines that use a cache made on this machine."""
    machine = cpu_here() if device == "cpu" else Machine.from_name()
    target = Target("cpu") if device == "cpu" else machine.target
    versions = dict[str, str]()
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    installation = Installation(tuple(list_facts(cuda=device != "cpu").items()))
    cpu_kind = machine.cpu or "" if device == "cpu" else ""
    return for_target(target, only=cpu_kind), *same_versions(versions, *versions), installation
