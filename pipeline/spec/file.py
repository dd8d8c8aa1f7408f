"""Reads a spec file, and looks that the files it names are there."""

import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from enginery.core.errors import InputError, SpecError
from pipeline.spec.document import Kind, load_document
from pipeline.spec.fields import Loc
from pipeline.spec.mistakes import line_of
from pipeline.spec.model import ModelSpec

KIND = Kind(ModelSpec, "a spec", "model, source, inputs", "`enginery init` writes a commented spec")

# Files of a model, by how they end, and the key of a spec that names such a file.
_OF_A_MODEL = {".onnx": "source.onnx", ".pt2": "source.pt2", ".py": "source.torch", ".safetensors": "source.weights"}


def load_spec(path: Path | str, address: str = "") -> ModelSpec:
    """Read and check a spec. address: what it is called where its file is a copy. Raises SpecError with one line per
    mistake."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"spec {path!r}: give the path of its file")
    path = Path(path)
    try:
        _refuse_model(path)
        spec, root = load_document(path, KIND)
        spec._path, spec._address = path, address
        if missing := list(_missing_files(path, root, spec)):
            raise SpecError(missing)
    except SpecError as error:
        if address in ("", str(path)):
            raise
        lines = [line.replace(str(path), address).replace(str(path.resolve().parent), address) for line in error.lines]
        raise SpecError(lines) from None
    return spec


def _refuse_model(path: Path) -> None:
    if (key := _OF_A_MODEL.get(path.suffix.lower())) and path.is_file():
        remedy = f"write a spec with `enginery init`, and name this file in it as {key}"
        raise SpecError([f"{path}: is a file of a model, and not a spec; {remedy}"])


def _missing_files(path: Path, root: yaml.Node, spec: ModelSpec) -> Iterator[str]:
    """Files that do not exist, or that a symbolic link takes outside the spec's folder."""
    wanted: list[tuple[Loc, str | None]] = [
        (("source", spec.source.kind), spec.source.file),
        (("source", "weights"), spec.source.weights),
        (("calibration", "data"), spec.calibration.file if spec.calibration else None),
        (("golden", "data"), spec.golden.data if spec.golden else None),
    ]
    for loc, name in wanted:
        if name is None:
            continue
        where = f"{path}:{line_of(root, loc)}: {'.'.join(map(str, loc))}: {name!r}"
        real = spec.file(name).resolve()
        if not real.is_relative_to(spec.folder):
            yield f"{where} leads outside the spec's folder; copy the file into {spec.folder}"
        elif not real.is_file() and not (loc[0] == "calibration" and real.is_dir()):
            yield f"{where} does not exist in {spec.folder}; paths are relative to the spec"
