"""KServe: the URIs by which its storage initializer pulls a version.

An `InferenceService` names the runtime, Triton, and where the model is from: a URI
`enginesmith://MODEL@VERSION?target=l4`. For such URIs a `ClusterStorageContainer` says which image pulls them: KServe
runs it before the server, as `enginesmith initialize SRC DEST`, with DEST /mnt/models. Both are in
manifests/examples/kserve.yaml.
"""

from urllib.parse import parse_qsl, unquote

from enginesmith.core.errors import InputError
from enginesmith.core.names import parse_reference

SCHEME = "enginesmith"
# What may stand in a URI, as `enginesmith pull` takes it; those of the second line take no value.
_OPTIONS = (
    "layout",
    "target",
    "precision",
    "runtime",
    "driver",
    "cuda",
    "memory",
    "fallback",
    "max-batch-size",
    "max-queue-delay",
    "registry",
)
_FLAGS = ("proven-only", "no-warmup")


def pull_arguments(uri: str) -> list[str]:
    """The arguments of `enginesmith pull` for a URI, without DEST: ['digits@3', '--target', 'l4', '--layout',
    'triton'].

    Without a layout it is Triton's. Raises InputError for another scheme and options that a URI cannot have,
    UnknownNameError for a malformed reference.
    """
    scheme, separator, rest = uri.partition("://")
    if scheme != SCHEME or not separator:
        raise InputError(f"{uri!r}: give a URI such as {SCHEME}://digits@3?target=l4")
    text, _, query = rest.partition("?")
    arguments = [str(parse_reference(unquote(text).strip("/")))]
    query_pairs = parse_qsl(query, keep_blank_values=True)
    for name, value in query_pairs:
        if name not in (*_OPTIONS, *_FLAGS):
            raise InputError(f"{uri!r} has {name!r}; it can have {', '.join((*_OPTIONS, *_FLAGS))}")
        if name in _FLAGS and value not in ("", "true"):
            raise InputError(f"{uri!r}: {name} has no value; leave it out, or write {name} alone")
        arguments += [f"--{name}"] if name in _FLAGS else [f"--{name}", value]
    return arguments if any(name == "layout" for name, _ in query_pairs) else [*arguments, "--layout", "triton"]
