"""Golden sets of a registry: the one that a reference means, the versions proven with it, freezing one in a spec."""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

from enginesmith.core.codec import OMIT_DEFAULT
from enginesmith.core.digest import is_digest
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.names import parse_reference
from enginesmith.registry.ensembles import require_model
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import load, locate, models, versions
from pipeline.compile.steps.blobs import fetch
from pipeline.spec.model import ModelSpec, load_spec

if TYPE_CHECKING:
    from validation.limits.noise_floor import Noise

# A text of fewer characters is not taken for the beginning of a digest.
SHORTEST = 8


@dataclass(frozen=True)
class MadeGolden:
    """A spec's golden set. digest, before: of it and of the one before it.  change: how they differ, in words.

    frozen: the digest that the spec demands, None for any.
    """

    model: str
    digest: str
    before: str | None
    change: str | None
    frozen: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """A golden set: its digest, (name, kind) of each case, and the versions (model@version) that were proven with it.

    labels: whether it has the labels of a task.  noise: the noise floor of each output.  sequences: the steps of each.
    """

    digest: str
    cases: tuple[tuple[str, str], ...]
    labels: bool
    noise: "Noise | None"
    versions: tuple[str, ...]
    sequences: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)


def golden_of(store: Store, text: str) -> str:
    """The digest of the golden set that is named by its digest, by the beginning of it, or by a version's reference.

    Raises UnknownNameError where there is none, and InputError for an ensemble, whose graphs have one each.
    """
    if is_digest(text):
        if not store.has(text):
            raise UnknownNameError(f"no golden set {text} in {store.uri}")
        return text
    if len(text) >= SHORTEST and set(text) <= set("0123456789abcdef"):
        found = sorted(digest for digest in _uses(store) if digest.startswith(text))
        if len(found) == 1:
            return found[0]
    manifest = locate(store, parse_reference(text)).manifest
    require_model(manifest)
    return manifest.golden


def describe_golden(store: Store, digest: str) -> Shown:
    """What a golden set holds, and the versions that use it. Raises DataError for a blob that is no golden set."""
    from validation.golden.golden_set import GoldenSet

    with TemporaryDirectory(prefix="enginesmith-golden-") as folder:
        golden = GoldenSet.load(fetch(store, digest, Path(folder) / "golden.safetensors"))
        cases = tuple((case.name, case.kind) for case in golden.cases)
        versions, lengths = tuple(_uses(store).get(digest, ())), golden.sequences.lengths if golden.sequences else ()
        return Shown(digest, cases, golden.labels is not None, golden.noise, versions, lengths)


def unfreeze(spec: ModelSpec) -> ModelSpec:
    """The spec without `golden.frozen`. Raises InputError for a spec without golden data."""
    if spec.golden is None:
        raise InputError(f"{spec.path}: there is no golden data to freeze; add golden.data")
    return spec.model_copy(update={"golden": spec.golden.model_copy(update={"frozen": None})})


def write_frozen(path: Path, digest: str) -> None:
    """Set `golden.frozen` in a spec's file and leave every other character as it is.

    Raises InputError where the line cannot be placed; the file is replaced only when the changed text reads as meant.
    """
    text = path.read_text(encoding="utf-8")
    changed = _with_frozen(text, digest)
    if changed is None:
        raise InputError(f"{path}: golden is not a block of lines; write there: frozen: {digest}")
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(changed, encoding="utf-8")
        again = load_spec(fresh)
        if (
            again.golden is None
            or again.golden.frozen != digest
            or unfreeze(again).model_dump() != unfreeze(load_spec(path)).model_dump()
        ):
            raise InputError(f"{path}: the line cannot be placed; write under golden: frozen: {digest}")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _with_frozen(text: str, digest: str) -> str | None:
    """The text of a spec with `golden.frozen`; None where `golden` is no mapping that it can be put into."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    golden = next((value for key, value in pairs if key.value == "golden"), None)
    if not isinstance(golden, yaml.MappingNode) or not golden.value:
        return None
    known = next((value for key, value in golden.value if key.value == "frozen"), None)
    if known is not None:
        return f'{text[: known.start_mark.index]}"{digest}"{text[known.end_mark.index :]}'
    first = golden.value[0][0].start_mark
    if golden.flow_style:
        return f'{text[: first.index]}frozen: "{digest}", {text[first.index :]}'
    return f'{text[: first.index]}frozen: "{digest}"\n{" " * first.column}{text[first.index :]}'


def _uses(store: Store) -> dict[str, list[str]]:
    """The versions that use each golden set."""
    found: dict[str, list[str]] = {}
    for model in models(store):
        for version in versions(store, model):
            if digest := load(store, model, version).sources.get("golden"):
                found.setdefault(digest, []).append(f"{model}@{version}")
    return found
