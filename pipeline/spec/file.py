"""Reads a spec file, and looks that the files it names are there."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from builders.errors import SpecError
from pipeline.spec.document import Kind, Loc, line_of, load_document
from pipeline.spec.model import ModelSpec

KIND = Kind(ModelSpec, "a spec", "model, source, inputs", "`enginery init` writes a commented spec")


def load_spec(path: Path | str) -> ModelSpec:
    """Read and check a spec. Raises SpecError with one line per mistake."""
    path = Path(path)
    spec, root = load_document(path, KIND)
    spec._path = path
    if missing := list(_missing_files(path, root, spec)):
        raise SpecError(missing)
    return spec


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
