"""Readers of the parts of a manifest's fields: each takes a JSON value and its path, and raises Malformed."""

from collections.abc import Mapping
from dataclasses import fields

from enginesmith.core import parsing
from enginesmith.core.codec import decode
from enginesmith.core.digest import canonical_json, is_digest
from enginesmith.core.ensemble import EnsembleFunction, PinnedGraph
from enginesmith.core.errors import IntegrityError
from enginesmith.core.names import is_name
from enginesmith.core.parsing import Malformed
from enginesmith.core.parsing import field as read
from enginesmith.core.requirements import KINDS, Requirement, Unknown
from enginesmith.core.types import Shape, ShapeProfile, TensorSpec
from enginesmith.registry.store.layout import MAX_BLOB_BYTES


def read_graph(value: object, path: str) -> PinnedGraph:
    """A version that is a graph of an ensemble."""
    found = parsing.mapping(value, path)
    return PinnedGraph(
        name=read(found, "name", parsing.graph_name, path),
        model=read(found, "model", parsing.name, path),
        version=read(found, "version", parsing.name, path),
        manifest=read(found, "manifest", parsing.digest, path),
        sources=read(found, "sources", parsing.mapping_of(parsing.text), path),
    )


# The sources of a manifest that are files of functions begin so.
FUNCTION = "function"


def read_functions(spec: Mapping[str, object], sources: Mapping[str, str]) -> list[EnsembleFunction]:
    """The functions between the graphs of a version. spec, sources: of its manifest."""
    functions = parsing.mapping(spec.get("functions", {}), "spec.functions")
    connections = parsing.mapping_of(parsing.text)(spec.get("connections", {}), "spec.connections")
    return [_read_function(name, value, connections, sources) for name, value in functions.items()]


def _read_function(
    name: str, value: object, connections: Mapping[str, str], sources: Mapping[str, str]
) -> EnsembleFunction:
    path = f"spec.functions.{name[:80]}"
    found = parsing.mapping(value, path)
    file, _, function = read(found, "function", parsing.text, path).partition(":")
    inputs, outputs = (_read_tensors(found, key, path) for key in ("inputs", "outputs"))
    begin = f"{FUNCTION} {parsing.graph_name(name, 'a name in spec.functions')} "
    files = {key.removeprefix(begin): digest for key, digest in sources.items() if key.startswith(begin)}
    for name_of_file in files:
        parsing.file_path(name_of_file, f"sources of {path}")
    if file not in files:
        raise Malformed(f"{path}.function is {file[:80]!r}, and no source is {begin}{file[:80]}")
    given = {spec.name: connections.get(f"{name}.{spec.name}", f"{name}.{spec.name}") for spec in inputs}
    return EnsembleFunction(name, file, function, inputs, outputs, given, files)


def _read_tensors(found: Mapping[str, object], key: str, path: str) -> tuple[TensorSpec, ...]:
    where = f"{path}.{key}"
    return tuple(
        read_tensor({"name": name, **parsing.mapping(item, f"{where}.{name}")}, f"{where}.{name}")
        for name, item in read(found, key, parsing.mapping, path).items()
    )


def read_size(value: object, path: str) -> int:
    """The size of a blob in bytes."""
    found = parsing.count(value, path)
    if found > MAX_BLOB_BYTES:
        raise Malformed(f"{path} is {found}; a blob has at most {MAX_BLOB_BYTES} bytes")
    return found


def read_shards(value: object, path: str) -> Mapping[str, int]:
    """Digest of each shard -> its size in bytes."""
    found = parsing.mapping_of(read_size)(value, path)
    if wrong := next((name for name in found if not is_digest(name)), None):
        raise Malformed(f"{path} has {wrong[:80]!r}, which is no digest")
    return found


def read_suffix(value: object, path: str) -> str:
    """A file's suffix, such as '.engine'."""
    found = parsing.text(value, path)
    if not (found.startswith(".") and is_name(found[1:]) and len(found) <= 32):
        raise Malformed(f"{path} is {found[:80]!r}; it must be a file suffix such as '.engine'")
    return found


def read_tensor(value: object, path: str) -> TensorSpec:
    """An input or output."""

    def size(item: object, where: str) -> int | str:
        return parsing.text(item, where) if isinstance(item, str) else parsing.count(item, where)

    data = parsing.mapping(value, path)
    shape = read(data, "shape", parsing.many(size), path)
    return TensorSpec(read(data, "name", parsing.text, path), read(data, "dtype", parsing.text, path), shape)


def read_profile(value: object, path: str) -> ShapeProfile:
    """A `ShapeProfile` that its `to_json` wrote."""
    found = parsing.mapping(value, path)
    multiples = read(found, "multiples", parsing.many(_multiples), path) if "multiples" in found else ()
    return ShapeProfile(read(found, "inputs", parsing.many(_ranges), path), multiples)


def _ranges(value: object, path: str) -> tuple[str, Shape, Shape, Shape]:
    items = parsing.many(lambda item, _: item)(value, path)
    if len(items) != 4:
        raise Malformed(f"{path} has {len(items)} items; it must have a name and three shapes")
    low, opt, high = (parsing.many(parsing.count)(item, path) for item in items[1:])
    return parsing.text(items[0], path), low, opt, high


def _multiples(value: object, path: str) -> tuple[str, Shape]:
    items = parsing.many(lambda item, _: item)(value, path)
    if len(items) != 2:
        raise Malformed(f"{path} has {len(items)} items; it must have a name and a multiple for each axis")
    multiples = parsing.many(parsing.count)(items[1], path)
    if not all(multiples):
        raise Malformed(f"{path} has the multiple 0; the least is 1")
    return parsing.text(items[0], path), multiples


def read_requirement(value: object, path: str) -> Requirement:
    """Read a requirement that `core.requirements.to_json` wrote.

    One of an unknown kind or with an unknown field becomes `Unknown`, which no machine meets, so that it rules out its
    engine alone. Raises Malformed for a field of another type.
    """
    data = parsing.mapping(value, path)
    kind = read(data, "kind", parsing.text, path)
    known = KINDS.get(kind)
    if known is None or data.keys() != {field.name for field in fields(known)}:
        return Unknown(kind, canonical_json(data).decode())
    try:
        return decode(data, known)
    except IntegrityError as error:
        raise Malformed(f"{path}: {error}") from error
