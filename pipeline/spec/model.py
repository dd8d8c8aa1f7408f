"""The spec of one model: what its sections demand of each other, and how its file is read."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast

import yaml
from pydantic import model_validator

from enginesmith.core.errors import InputError, SpecError
from enginesmith.core.types import Precision
from pipeline.spec.consistency import find_mistakes
from pipeline.spec.document import is_ensemble, load_document
from pipeline.spec.golden import Golden
from pipeline.spec.mistakes import Kind, line_of
from pipeline.spec.quantization import Calibration
from pipeline.spec.sections import SpecSections
from pipeline.spec.source import WEIGHTS
from pipeline.spec.validation import StageLimits
from pipeline.spec.value_types import Loc, Mistakes


class ModelSpec(SpecSections):
    """One model: source, shapes, precisions, targets, proof and publication."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if mistakes := tuple(find_mistakes(self)):
            raise Mistakes(mistakes)
        return self


def overrides(
    spec: ModelSpec, precision: Precision, stage: Literal["export", "quantization", "engine"]
) -> Mapping[str, float]:
    """The limits that a spec sets for a precision at a stage, by metric; they replace the default ones."""
    limits = getattr(spec.validation.limits.get(precision, StageLimits()), stage)
    return cast("dict[str, float]", limits.model_dump(exclude_unset=True))


@dataclass(frozen=True)
class ComputedData:
    """A file of samples whose name says its content. sequence, steps: as in `SequenceArrays`."""

    path: Path
    sequence: str | None = None
    steps: Mapping[str, str] | None = None

    @property
    def keys(self) -> dict[str, object]:
        """What a section of a spec says of it."""
        return {"data": self.path.name, "sequence": self.sequence, "steps": dict(self.steps) if self.steps else None}


def with_data(spec: ModelSpec, golden: ComputedData, calibration: ComputedData | None) -> ModelSpec:
    """The spec with other golden data and, where given, other calibration data, wherever they lie. How ranges are
    chosen, and task metrics, stay the spec's."""
    changes: dict[str, object] = {"golden": (spec.golden or Golden(data="-")).model_copy(update=golden.keys)}
    if calibration:
        before = spec.calibration or Calibration(data="-")
        changes["calibration"] = before.model_copy(update={**calibration.keys, "labels": None})
    changed = spec.model_copy(update=changes)
    changed._computed = {item.path.name: item.path for item in (golden, calibration) if item}
    return changed


KIND = Kind(ModelSpec, "a spec", "model, source, inputs", "`enginesmith init` writes a commented spec")

# Files of a model, by how they end, and the key of a spec that names such a file.
_KEY_OF_SUFFIX = {".onnx": "source.onnx", ".pt2": "source.pt2", ".py": "source.torch"} | dict.fromkeys(
    WEIGHTS, "source.weights"
)


def load_spec(path: Path | str, address: str = "") -> ModelSpec:
    """Read and check a spec. address: what messages call it where its file is a copy.

    Raises SpecError with one line per mistake, a file that it names and that does not exist among them.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"spec {path!r}: give the path of its file")
    path = Path(path)
    try:
        if (key := _KEY_OF_SUFFIX.get(path.suffix.lower())) and path.is_file():
            remedy = f"write a spec with `enginesmith init`, and name this file in it as {key}"
            raise SpecError([f"{path}: is a file of a model, and not a spec; {remedy}"])
        if is_ensemble(path):
            raise SpecError(
                [f"{path}: is the spec of an ensemble; give that of one of its graphs, or `enginesmith build` it"]
            )
        spec, root = load_document(path, KIND)
        spec._path, spec._address = path, address
        if missing := list(_missing_files(path, root, spec)):
            raise SpecError(missing)
    except SpecError as error:
        raise SpecError(_address_lines(error.lines, path, address)) from None
    return spec


def _address_lines(lines: Sequence[str], path: Path, address: str) -> list[str]:
    """Messages on a spec with its address in the place of its path and folder, where it is a copy."""
    if address in ("", str(path)):
        return [*lines]
    return [line.replace(str(path), address).replace(str(path.resolve().parent), address) for line in lines]


def locate_mistakes(spec: ModelSpec, found: Iterable[tuple[Loc, str]]) -> SpecError:
    """Mistakes that the files of a spec show, (key that it is about, message) each, as one error with their lines."""
    _, root = load_document(spec.path, KIND)
    lines = [f"{spec.path}:{line_of(root, loc)}: {'.'.join(map(str, loc))}: {text}" for loc, text in found]
    return SpecError(_address_lines(lines, spec.path, spec.address))


def _missing_files(path: Path, root: yaml.Node, spec: ModelSpec) -> Iterator[str]:
    """A message for each file that does not exist or is a folder, or that a symbolic link takes outside the spec's
    folder. Samples may be a folder."""
    folder = spec.folder
    for loc, name in spec.named_files():
        real, what = spec.file(name).resolve(), ""
        if not real.is_relative_to(folder):
            what = f"leads outside the spec's folder; copy the file into {folder}"
        elif real.is_dir():
            if loc[-1] != "data" or (loc[0] == "calibration" and spec.calibration and spec.calibration.function):
                what = "is a folder; name the file in it"
        elif not real.is_file():
            what = f"does not exist in {folder}; paths are relative to the spec"
        if what:
            yield f"{path}:{line_of(root, loc)}: {'.'.join(map(str, loc))}: {name!r} {what}"
