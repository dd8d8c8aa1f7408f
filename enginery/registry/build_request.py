"""The build request behind a published engine."""

from enginery.core.errors import IntegrityError
from enginery.core.types import BuildRequest
from enginery.registry.manifest import EngineEntry


def request_of(entry: EngineEntry) -> BuildRequest:
    """The build request that an engine was built from. Raises IntegrityError if the entry's fields do not give its
    build key."""
    request = make_request(entry)
    if request.key != entry.build_key:
        raise IntegrityError(f"{entry.unit}: its build key is {entry.build_key}, its fields give {request.key}")
    return request


def make_request(entry: EngineEntry) -> BuildRequest:
    """A build request from an entry's fields; the entry's build key is not checked."""
    return BuildRequest(
        model=entry.graph or "",
        precision=entry.precision,  # type: ignore[arg-type] # checked by the manifest's parser
        target=entry.hardware,
        backend=entry.backend,
        inputs=entry.inputs,
        outputs=entry.outputs,
        profiles=entry.profiles,
        options=tuple(sorted(entry.options.items())),
        toolchain=tuple(sorted(entry.toolchain.items())),
    )
