"""Compiles a graph for single sizes with ONNX Runtime, whose optimised models are kept in a folder.

Routers of several processes may share the folder. Who compiles holds a lock on the file of that key, so that others
wait and find the result; a file appears whole or not at all; one that cannot be opened is made again; and of more files
than `most`, those not used for longest are deleted, which no session that is open notices.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from enginesmith.core.errors import UnavailableError, digest_of
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.types import Tensors, Untyped
from enginesmith.descriptions import read_file
from enginesmith.opening import open_session
from enginesmith.registry.store.files import make_folder, reachable, start_atomic_write, sweep

_SUFFIX = ".compiled.onnx"


@dataclass(frozen=True)
class OrtCompiler:
    """Makes runners of one ONNX file for given sizes of its dims. digest: of the file, which is read and checked for
    each of them.  cache: a folder for optimised models, or None.

    most: files in it.  options: entries of the sessions' configuration.
    libraries: with operators of the model, which were checked.
    """

    model: Path
    digest: str
    cache: Path | None = None
    most: int = 64
    options: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[Path, ...] = ()

    def why_unusable(self) -> str | None:
        """Why nothing can be kept in the folder, which is made if need be; None where it can."""
        if self.cache is None:
            return None
        try:
            with reachable(f"using the cache {self.cache}"):
                make_folder(self.cache)
                with start_atomic_write(self.cache):
                    return None
        except UnavailableError as error:
            return str(error)

    def __call__(self, sizes: Mapping[str, int]) -> Callable[[Tensors], Tensors]:
        """A runner for these sizes. Raises what ONNX Runtime does, IntegrityError for another file than the digest is
        of, and UnavailableError for a folder out of reach."""
        if self.cache is None:
            return _runner(self._open(self._session_options(sizes)))
        with reachable(f"using the cache {self.cache}"):
            make_folder(self.cache)
            file = self.cache / f"{self._key(sizes)}{_SUFFIX}"
            with _locked(file.with_suffix(".lock")):
                session = self._find(file) or self._compile(file, sizes)
            self._evict()
        return _runner(session)

    def _key(self, sizes: Mapping[str, int]) -> str:
        import onnxruntime

        version, kind = onnxruntime.__version__, this_kind().name
        return digest_of([self.digest, sorted(sizes.items()), version, kind, sorted(self.options.items())])[:40]

    def _session_options(self, sizes: Mapping[str, int]) -> Untyped:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it logs as an error it also raises
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        for name, value in self.options.items():
            options.add_session_config_entry(name, value)
        for library in self.libraries:
            options.register_custom_ops_library(str(library))
        return options

    def _find(self, file: Path) -> Untyped:
        """The session of a file in the cache; None where there is none, or none that can be opened."""
        if not file.is_file():
            return None
        import onnxruntime

        options = self._session_options({})
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        with suppress(Exception):  # damaged, or of another build of onnxruntime: it is made again
            session = open_session(file.read_bytes(), self.model.parent, options)
            os.utime(file)
            return session
        return None

    def _compile(self, file: Path, sizes: Mapping[str, int]) -> Untyped:
        options = self._session_options(sizes)
        with start_atomic_write(file.parent) as new_file:
            options.optimized_model_filepath = str(new_file.path)
            session = self._open(options)
            new_file.commit(file)
        return session

    def _open(self, options: Untyped) -> Untyped:
        return open_session(read_file(self.model, self.digest), self.model.parent, options)

    def _evict(self) -> None:
        files: list[tuple[float, Path]] = []
        for path in self.cache.glob(f"*{_SUFFIX}") if self.cache else ():
            with suppress(FileNotFoundError):  # another router's turn
                files.append((path.stat().st_mtime, path))
        for _, path in sorted(files)[: -self.most]:
            path.unlink(missing_ok=True)
        if self.cache:
            sweep(self.cache)


def _runner(session: Untyped) -> Callable[[Tensors], Tensors]:
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if need be and stays, as long as other routers may wait for it."""
    with path.open("wb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        yield
