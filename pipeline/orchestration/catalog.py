"""Many specs: finding those of a catalog, and compiling each; one that fails does not stop the others."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.text import pluralize
from enginesmith.registry.registered_specs import addresses
from enginesmith.registry.store.base import open_store
from pipeline.compile.composition import StepRunner
from pipeline.intake.places import SCHEME, Bucket, Found, below, files_below, place_at, registry_of
from pipeline.orchestration.ensembles import compile_any
from pipeline.orchestration.run import Compiled, Executors, RunOptions
from pipeline.outcome import Outcome
from pipeline.progress import Progress, by_model
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import named_graphs

LARGEST_LOOKED_AT = 1 << 20
_MODEL = re.compile(rb"^[\"']?model[\"']?\s*:", re.MULTILINE)
_STATUSES = ("proven", "unproven", "failed", "refused")


@dataclass(frozen=True)
class CatalogRow:
    """The outcome of one spec. state: 'published', 'unchanged' (the version existed) or 'failed' (there is none).

    engines: how many by status.  reason: why it failed, or the engines that did.
    """

    spec: str
    model: str | None
    state: Literal["published", "unchanged", "failed"]
    version: str | None = None
    engines: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether neither the spec nor one of its engines failed."""
        return self.state != "failed" and not self.engines.get("failed")

    def to_json(self) -> dict[str, object]:
        """A row of `enginesmith build --all --json` and of the flow's table."""
        return asdict(self)


@contextmanager
def gather_specs(specs: str, registry: str | None) -> Iterator[Sequence[str | Found]]:
    """Addresses of the specs in a folder, at a `file://` URI or in a bucket (copied, while inside); for 'registered',
    of the newest registered spec of each model. Raises InputError where there is none, UnavailableError."""
    if specs == SCHEME.removesuffix(":"):
        uri = registry_of(None, registry)
        found = addresses(open_store(uri))
        if not found:
            raise InputError(f"no spec is registered in {uri}; `enginesmith prefect register SPEC` registers one")
        yield found
        return
    with place_at(specs) as place:
        place.refresh()
        paths = without_graphs(spec_files(place.folder))
        if not paths:
            raise InputError(f"{specs} holds no spec: no .yaml file there has the key `model`; name another place")
        # The address of a copied file is the one that it was copied from.
        names = [path.relative_to(place.folder).as_posix() for path in paths]
        copied = isinstance(place, Bucket)
        yield [
            Found(below(specs, name) if copied else str(path), path) for name, path in zip(names, paths, strict=True)
        ]


def spec_files(folder: Path) -> list[Path]:
    """YAML files with a key `model`. Whether one is a valid spec shows when it is read."""

    def has_model(path: Path) -> bool:
        try:
            with path.open("rb") as stream:
                return _MODEL.search(stream.read(LARGEST_LOOKED_AT)) is not None
        except OSError:
            return True  # reading it again says why not

    return [path for path in files_below(folder) if path.suffix in (".yaml", ".yml") and has_model(path)]


def without_graphs(paths: Sequence[Path]) -> list[Path]:
    """The specs but for those of graphs of an ensemble among them: they are built with that."""
    named = {file.resolve() for path in paths if is_ensemble(path) for file in named_graphs(path)}
    return [path for path in paths if path.resolve() not in named]


def compile_row(
    address: str | Found,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors,
    done: Callable[[Compiled], object] = lambda _: None,
) -> CatalogRow:
    """Compile one spec of many. An error is not raised: it is the row's reason. done: called with what was compiled."""
    try:
        compiled = compile_any(address, options, runner, progress, executors)
        done(compiled)
    except EnginesmithError as error:
        return CatalogRow(str(address), None, "failed", reason=str(error))
    except Exception as error:
        logging.getLogger(__name__).exception("%s", address)
        return CatalogRow(str(address), None, "failed", reason=f"{type(error).__name__}: {error}")
    return _row(str(address), compiled.outcome)


def compile_all(
    addresses: Sequence[str | Found],
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors,
    done: Callable[[Compiled], object] = lambda _: None,
) -> list[CatalogRow]:
    """Compile every spec, several at a time; a row for each, in order. done: as for `compile_row`."""
    return runner.map(compile_row, addresses, options, runner, by_model(progress), executors, done)


def words(rows: Sequence[CatalogRow]) -> str:
    """The outcome of a catalog in a line: '4 specs: 2 published, 1 unchanged, 1 failed'."""
    states = Counter(row.state for row in rows)
    counted = ", ".join(f"{states[state]} {state}" for state in ("published", "unchanged", "failed") if states[state])
    partly = sum(not row.good and row.state != "failed" for row in rows)
    return f"{pluralize(len(rows), 'spec')}: {counted}" + (f"; {partly} with engines that failed" if partly else "")


def _row(address: str, outcome: Outcome) -> CatalogRow:
    counts = Counter(engine.status for engine in outcome.engines)
    engines = {status: counts[status] for status in _STATUSES if counts[status]}
    reasons = [f"{item.unit}: {item.reason}" for item in outcome.failed]
    if outcome.version is None:
        reason = "; ".join(reasons) or "no engine is fit to be published"
        return CatalogRow(address, outcome.model, "failed", None, engines, reason)
    existed = outcome.cached or outcome.same_as
    state: Literal["published", "unchanged"] = "unchanged" if existed else "published"
    return CatalogRow(address, outcome.model, state, outcome.version, engines, "; ".join(reasons))
