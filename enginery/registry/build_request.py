"""The build request behind a published engine."""

from enginery.core.errors import IntegrityError
from enginery.core.types import BuildRequest
from enginery.registry.manifest import EngineEntry


def request_of(entry: EngineEntry) -> BuildRequest:
    """The request as it was when the engine was built.

    Raises IntegrityError when the entry does not give its own build key.
    """
    request = stated(entry)
    if request.key != entry.build_key:
        raise IntegrityError(f"{entry.unit}: its build key is {entry.build_key}, its fields give {request.key}")
    return request


def stated(entry: EngineEntry) -> BuildRequest:
    """The request as the entry's fields have it, whatever its build key is."""
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
