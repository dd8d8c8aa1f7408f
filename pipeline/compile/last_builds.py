"""What the newest engine of each unit was built from, on record by model: what the next plan compares with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.core.codec import encode
from enginesmith.core.digest import digest_of
from enginesmith.core.types import BuildRequest
from pipeline.compile.run_context import RunContext

# What steps read, by stage ('export', 'calibration', 'golden', 'proof'), then by name: a digest, or a value as text.
Inputs = dict[str, dict[str, str]]


@dataclass(frozen=True)
class BuildSources:
    """What engines were built from. reads: see `Exported`.  onnx, golden: digests."""

    inputs: Inputs
    reads: str
    onnx: str
    golden: str


@dataclass(frozen=True)
class LastBuild:
    """The build of a unit's newest engine."""

    request: BuildRequest
    sources: BuildSources


@dataclass(frozen=True)
class _NamedBuild:
    request: BuildRequest
    from_: str


@dataclass(frozen=True)
class _LatestBuilds:
    """The record of a model's last builds. units: by unit.  from_: sources by their digest, which units share."""

    units: Mapping[str, _NamedBuild]
    from_: Mapping[str, BuildSources]


def recall_builds(model: str, context: RunContext) -> dict[str, LastBuild]:
    """The last build of each unit of a model that has one."""
    known = context.recall("latest-builds", {"model": model}, _LatestBuilds) or _LatestBuilds({}, {})
    return {
        unit: LastBuild(found.request, known.from_[found.from_])
        for unit, found in known.units.items()
        if found.from_ in known.from_
    }


def remember_builds(
    model: str,
    built: Sequence[BuildRequest],
    reads: str,
    read_sources: Callable[[], BuildSources],
    context: RunContext,
    new: bool,
) -> None:
    """Note what these engines were built from, so that the next plan can say what has changed since.

    reads: see `Exported`.  read_sources: reads the files; called only for a version that is new, or where a request or
    `reads` is another than at the last build.
    """
    known = recall_builds(model, context)
    before = [known.get(request.unit) for request in built]
    if not new and all(
        last and (last.request, last.sources.reads) == (request, reads)
        for last, request in zip(before, built, strict=True)
    ):
        return
    sources = read_sources()
    builds = {**known, **{request.unit: LastBuild(request, sources) for request in built}}
    named = {unit: (last, digest_of(encode(last.sources))) for unit, last in sorted(builds.items())}
    units = {unit: _NamedBuild(last.request, name) for unit, (last, name) in named.items()}
    value = _LatestBuilds(units, {name: last.sources for last, name in named.values()})
    context.remember("latest-builds", {"model": model}, encode(value), [])
