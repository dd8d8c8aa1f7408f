"""Engines that must not be opened: of other backends, targets and versions, and what is no engine at all."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from builders.backends import discovery
from enginesmith.core.errors import EnginesmithError, digest_of_file
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.types import Backend, Engine, Target


def foreign(backend: Backend, engine: Engine) -> Iterator[tuple[str, Engine, str]]:
    """Engines that do not fit here: what is wrong with each, and a word that its refusal must have."""
    request = engine.request
    for name in discovery.names():
        if name != backend.name:
            yield f"an engine of {name}", replace(engine, request=replace(request, backend=name)), name
    for target in [target for target in parse_targets("all") if backend.runs(target)][:2]:
        yield f"an engine for {target.name}", replace(engine, request=replace(request, target=target)), target.name
    names = tuple((name, version if name.startswith("enginesmith-") else "99.9") for name, version in request.toolchain)
    yield "an engine of versions that are not here", replace(engine, request=replace(request, toolchain=names)), "99.9"


def damaged(engine: Engine, folder: Path) -> Iterator[tuple[str, Engine]]:
    """Files that are no engine any more. Two of them as a manifest would have it that was made of the damaged file."""
    whole_data = engine.path.read_bytes()
    for label, data in {"nothing": b"", "garbage": bytes(range(256)) * 8}.items():
        path = folder / f"{label}{engine.suffix}"
        path.write_bytes(data)
        yield label, replace(engine, path=path, digest=digest_of_file(path), size_bytes=len(data))
    half_path = folder / f"half{engine.suffix}"
    half_path.write_bytes(whole_data[: len(whole_data) // 2])
    yield "the first half of it", replace(engine, path=half_path)
    yield "no file at all", replace(engine, path=folder / f"gone{engine.suffix}")


def open_complaints(backend: Backend, target: Target, engine: Engine, folder: Path) -> Iterator[str]:
    """What is opened and should not be, and what is refused in words that help nobody."""
    for label, wrong_names, word in foreign(backend, engine):
        yield from _refused(backend, label, wrong_names, word)
    if backend.runs(target):
        yield from _refused(backend, f"an engine for {target.name}", engine, target.name)
        return
    for label, wrong_names in damaged(engine, folder):
        yield from _refused(backend, label, wrong_names, "")


def _refused(backend: Backend, what: str, engine: Engine, word: str) -> Iterator[str]:
    try:
        with backend.open(engine):
            yield f"{what}: was opened"
    except EnginesmithError as error:
        if word not in str(error) or not str(error).strip():
            yield f"{what}: the refusal does not name {word!r}: {error}"
    except Exception as error:
        yield f"{what}: raises {type(error).__name__} instead of EnginesmithError: {error}"
