"""The draft of a spec from a model package of ONNX Runtime or Olive, by the ONNX file of one variant.

A package has components, each with variants for execution providers (`enginesmith.client.layouts.model_package` writes
one). A variant names its file in `executor_info`; without it, as Olive writes packages for onnxruntime-genai, the only
ONNX file in the folder is used. Olive until 0.13 lists the components, and describes each in a metadata.json.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from builders.onnx_graphs.wire import fields, inner_fields, inner_text
from enginesmith.core.codec import Excerpt, decode, parse_as
from enginesmith.core.errors import InputError, ModelError
from enginesmith.core.names import inside
from enginesmith.core.parsing import Malformed
from enginesmith.core.text import join_first
from pipeline.drafts.facts import FoundModel, model_name
from pipeline.drafts.onnx_model import look_at_onnx
from pipeline.sources.onnx_model import inside as inside_folder

T = TypeVar("T")

MANIFEST = "manifest.json"
# The greatest size of a package's JSON file, which contains only names of files and options.
_MOST_BYTES = 1 << 20
_CPU = "CPUExecutionProvider"
# Field numbers in ModelProto, GraphProto and NodeProto.
_GRAPH, _NODE, _OP_TYPE = 7, 1, 4


@dataclass(frozen=True)
class _Variant(Excerpt):
    variant_directory: str = ""
    ep: str = ""
    executor_info: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class _Component(Excerpt):
    variants: Mapping[str, _Variant]


@dataclass(frozen=True)
class _Package(Excerpt):
    components: object
    package_name: str = ""


@dataclass(frozen=True)
class _Ort(Excerpt):
    model_file: str


@dataclass(frozen=True)
class _Model:
    """A variant's ONNX file. name: 'COMPONENT/VARIANT'."""

    name: str
    provider: str
    path: Path


def look_at_package(package: Path, folder: Path) -> FoundModel:
    """Facts from a package's model: the CPU provider's variant, else another whose file every provider can open.

    Raises InputError for a folder that is no package or has several models, and if all variants are compiled for their
    devices; ModelError as `look_at_onnx`, and for paths that lead out of the package.
    """
    manifest = _read(package / MANIFEST, _Package)
    models = [
        _Model(
            f"{name}/{key}",
            variant.ep,
            _find_file(package, _below(package, folder, variant.variant_directory or key), variant),
        )
        for name, (folder, component) in _components(package, manifest)
        for key, variant in component.variants.items()
    ]
    if len(names := {variant.name.partition("/")[0] for variant in models}) > 1:
        raise InputError(f"{package} has several models, {', '.join(sorted(names))}; name the ONNX file of one")
    sources = [variant for variant in models if not _is_compiled(variant.path)]
    if not sources:
        raise InputError(
            f"{package}: its variants ({join_first([variant.name for variant in models], 5) or 'none'}) are compiled "
            "for their devices; give the ONNX file that they were compiled from"
        )
    chosen_variant = min(sources, key=lambda variant: variant.provider not in ("", _CPU))
    model_facts = look_at_onnx(chosen_variant.path, str(chosen_variant.path.resolve().relative_to(folder.resolve())))
    other_texts = [f"{variant.name} ({variant.provider})" for variant in models if variant != chosen_variant]
    notes = (
        f"{package.name}: variant {chosen_variant.name} ({chosen_variant.provider})",
        *(f"not taken: {text}" for text in other_texts),
    )
    name = model_name(manifest.package_name) if manifest.package_name else model_facts.name
    return replace(model_facts, name=name, notes=(*model_facts.notes, *notes), serve="onnxruntime")


def _components(package: Path, manifest: _Package) -> list[tuple[str, tuple[Path, _Component]]]:
    """(name, (folder of its variants, component)) of each component."""
    if isinstance(manifest.components, list):
        paths = {str(name): f"models/{name}/metadata.json" for name in manifest.components}
    elif isinstance(manifest.components, dict):
        paths = manifest.components
    else:
        raise InputError(f"{package / MANIFEST}: components is neither a list nor a table; give a model package")
    return [(name, _read_component(package, name, path)) for name, path in paths.items()]


def _read_component(package: Path, name: str, place: object) -> tuple[Path, _Component]:
    if not isinstance(place, str):
        return package, _checked(package / MANIFEST, lambda: decode(place, _Component, f"components.{name}"))
    path = _below(package, package, place)
    path = path / "component.json" if path.is_dir() else path
    return path.parent, _read(inside_folder(path, package, "the package"), _Component)


def _find_file(package: Path, folder: Path, variant: _Variant) -> Path:
    info = variant.executor_info.get("ort")
    if info is None:
        files = sorted(folder.rglob("*.onnx"))
        if len(files) != 1:
            file_text = join_first([str(path.relative_to(package)) for path in files], 5) or "no ONNX file"
            raise InputError(f"{folder} has {file_text}; name one of the files, or several of them for an ensemble")
        return inside_folder(files[0], package, "the package")
    if isinstance(info, str):
        ort_info = _read(inside_folder(_below(package, folder, info), package, "the package"), _Ort)
    else:
        ort_info = _checked(package, lambda: decode(info, _Ort, f"{folder.name}: executor_info.ort"))
    scheme, _, digest_text = ort_info.model_file.partition(":")
    base_path, file = (
        (package / "shared_assets", f"sha256-{digest_text}") if scheme == "sha256" else (folder, ort_info.model_file)
    )
    return inside_folder(_below(package, base_path, file), package, "the package")


def _read(path: Path, kind: type[T]) -> T:
    """A document of the package. Raises InputError for a missing or malformed one."""
    return _checked(path, lambda: parse_as(path.read_bytes(), _MOST_BYTES, kind))


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (Malformed, OSError) as error:
        raise InputError(f"{path}: {error}; give a model package that onnxruntime 1.31 opens") from error


def _below(package: Path, folder: Path, name: str) -> Path:
    """A path in the package. Raises ModelError for a name that may lead out of it."""
    try:
        return folder / inside(name)
    except ValueError as error:
        raise ModelError(f"{package}: {name[:80]!r} {error}; give a package that holds all its files") from error


def _is_compiled(path: Path) -> bool:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            graphs = (message_field for message_field in fields(data, 0, len(data)) if message_field.number == _GRAPH)
            nodes = (node for graph in graphs for node in inner_fields(data, graph, _NODE))
            return any(inner_text(data, node, _OP_TYPE) == "EPContext" for node in nodes)
    except (ValueError, OSError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is empty, truncated or not an ONNX file; copy the package again") from error
