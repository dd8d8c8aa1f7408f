"""Whether an engine may be opened by a backend on this machine: asked before any runtime sees its bytes.

Runtimes say no to a foreign engine with cryptic words, with a crash or not at all. What decides stands beside the
engine (its request), so that nothing has to be loaded to find out. Standard library only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from builders.backends import discovery
from enginery.core.errors import EngineryError, IntegrityError
from enginery.core.hardware.compatibility import numbers
from enginery.core.types import Backend, BuildRequest, Engine, Session

_OWN = "enginery-"


@runtime_checkable
class Choosy(Protocol):
    """A backend that knows better than "the very versions that built it" what its engines can be opened with."""

    def unfit(self, built: Mapping[str, str], here: Mapping[str, str]) -> str | None:
        """Why versions `here` cannot open what versions `built` have built; None when they can."""
        ...


@runtime_checkable
class Portable(Protocol):
    """A backend some of whose engines run on other hardware than they were built for."""

    def runs_engine(self, request: BuildRequest) -> str | None:
        """As `Backend.runs`, of the engine of this request."""
        ...


@runtime_checkable
class BuildOnly(Protocol):
    """A backend some of whose `versions` are of tools that opening an engine takes nothing of: their names."""

    @property
    def build_only(self) -> tuple[str, ...]:
        """As in a toolchain: 'nvcc'."""
        ...


@contextmanager
def open_engine(engine: Engine) -> Iterator[Session]:
    """The engine, opened by the backend of its request. Raises as `check_fits` and `Backend.open` do."""
    backend = discovery.configure(engine.request.backend, dict(engine.request.options))
    check_fits(backend, engine)
    with backend.open(engine) as session:
        yield session


def check_fits(backend: Backend, engine: Engine) -> None:
    """Raise EngineryError unless `backend` can open `engine` here, IntegrityError where its file is not whole.

    In this order: another backend's, not installed, another version, hardware that is not here, a file of another size.
    """
    if reason := misfit(backend, engine.request):
        raise EngineryError(f"{engine.path.name}: {reason}")
    size = engine.path.stat().st_size if engine.path.exists() else None
    if size != engine.size_bytes:
        found = "is not there" if size is None else f"has {size} bytes"
        raise IntegrityError(
            f"{engine.path} {found}, the engine has {engine.size_bytes}; pull it again, or build it anew"
        )


def misfit(backend: Backend, request: BuildRequest) -> str | None:
    """Why an engine of this request cannot be opened by `backend` here, with the remedy; None when it can."""
    if request.backend != backend.name:
        return f"built by {request.backend}, and this is {backend.name}; open it with {request.backend}"
    if not backend.versions():
        return f"built by {backend.name}, which is not installed here: {backend.install}"
    if reason := version_misfit(backend, dict(request.toolchain)):
        return reason
    if reason := backend.runs_engine(request) if isinstance(backend, Portable) else backend.runs(request.target):
        return f"built for {request.target.name}, and cannot run here: {reason}; run it on a node that has one"
    return None


def version_misfit(backend: Backend, toolchain: Mapping[str, str]) -> str | None:
    """Why the versions that are installed here do not open what this toolchain has built; the backend is installed."""
    built, here = packages(toolchain), backend.versions()
    return backend.unfit(built, here) if isinstance(backend, Choosy) else other_versions(built, here)


def packages(toolchain: Mapping[str, str]) -> dict[str, str]:
    """A toolchain without the backend's own revision, which says nothing about what opens an engine."""
    return {name: version for name, version in toolchain.items() if not name.startswith(_OWN)}


def other_versions(built: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The rule for a backend that is not `Choosy`: every version on record that is also known here is the same.

    Versions are compared as far as both are given: 10.16 stands for every 10.16.x. What no record holds is not asked.
    """
    wrong = [name for name in sorted(built.keys() & here.keys()) if not same_version(built[name], here[name])]
    if built and not built.keys() & here.keys():
        wrong = sorted(built)
    if not wrong:
        return None
    was, now = (", ".join(f"{name} {found.get(name, 'absent')}" for name in wrong) for found in (built, here))
    return f"built with {was}, here is {now}; install the version it was built with, or build it again here"


def same_version(built: str, here: str) -> bool:
    """Whether two versions are equal as far as both are given; what is not all numbers is compared as it stands."""
    plain = all(part.isdecimal() for part in f"{built}.{here}".split("."))
    return built == here or (plain and all(a == b for a, b in zip(numbers(built), numbers(here), strict=False)))
