"""Many specs at once: what a catalog holds, and a row for each model, whatever happens to the others.

Builds that a spec's arrival or a catalog starts.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from enginery.core.errors import EngineryError, InputError
from enginery.core.text import pluralize
from enginery.registry.registered_specs import addresses
from enginery.registry.store.base import open_store
from enginery.registry.store.layout import DEFAULT_REGISTRY
from pipeline.compile.composition import StepRunner
from pipeline.intake.places import SCHEME, Bucket, Found, Place, below, files_below, place_at
from pipeline.orchestration.run import Compiled, Executors, RunOptions, compile_once
from pipeline.outcome import Outcome
from pipeline.progress import Progress, together

LARGEST_LOOKED_AT = 1 << 20
_MODEL = re.compile(rb"^[\"']?model[\"']?\s*:", re.MULTILINE)
_STATUSES = ("proven", "unproven", "failed", "refused")


@dataclass(frozen=True)
class CatalogRow:
    """What became of one spec. state: 'published', 'unchanged' (the version existed), 'failed' (there is none).

    engines: how many by status.  reason: of a failure, and of engines that failed beside those that did not.
    """

    spec: str
    model: str | None
    state: Literal["published", "unchanged", "failed"]
    version: str | None = None
    engines: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing of it failed."""
        return self.state != "failed" and not self.engines.get("failed")

    def to_json(self) -> dict[str, object]:
        """As it is printed and shown."""
        return asdict(self)


@contextmanager
def gather_specs(specs: str, registry: str | None) -> Iterator[Sequence[str | Found]]:
    """Addresses of the specs in a folder, a `file://` or `s3://` place (a copy, while inside), or, for 'registered',
    of the newest registration of each model. Raises InputError where there is none, UnavailableError."""
    if specs == SCHEME.removesuffix(":"):
        found = addresses(open_store(registry or DEFAULT_REGISTRY))
        if not found:
            raise InputError(
                f"no spec is registered in {registry or DEFAULT_REGISTRY}; `enginery register SPEC` registers one"
            )
        yield found
        return
    with place_at(specs) as place:
        place.refresh()
        paths = spec_files(place.folder)
        if not paths:
            raise InputError(f"{specs} holds no spec: no .yaml file there has the key `model`; name another place")
        yield [_name_found(path, place, specs) for path in paths]


def _name_found(path: Path, place: Place, specs: str) -> Found:
    """A file of a place; of a copied one it is called by where it was copied from."""
    copied = isinstance(place, Bucket)
    return Found(below(specs, path.relative_to(place.folder).as_posix()) if copied else str(path), path)


def spec_files(folder: Path) -> list[Path]:
    """Files that mean to be specs: YAML that says `model:`; whether it is a good one shows when it is read."""
    candidates = (path for path in files_below(folder) if path.suffix in (".yaml", ".yml"))
    return [path for path in candidates if _names_a_model(path)]


def compile_row(
    address: str | Found,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors,
    done: Callable[[Compiled], object] = lambda _: None,
) -> CatalogRow:
    """Compile one spec of many. Nothing that goes wrong with it is raised: it is its row's reason.

    done: is given what was compiled.
    """
    try:
        compiled = compile_once(address, options, runner, progress, executors)
        done(compiled)
    except EngineryError as error:
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
    return runner.map(compile_row, addresses, options, runner, together(progress), executors, done)


def words(rows: Sequence[CatalogRow]) -> str:
    """A catalog's outcome in a line: '4 models: 2 published, 1 unchanged, 1 failed'."""
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


def _names_a_model(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return _MODEL.search(stream.read(LARGEST_LOOKED_AT)) is not None
    except OSError:
        return True  # reading it again says why not
