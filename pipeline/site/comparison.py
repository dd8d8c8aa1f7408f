"""The values that pages show of a model, and that `enginesmith show --diff` compares between two versions."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from enginesmith.core.errors import (
    EnginesmithError,
    IntegrityError,
    UnavailableError,
    UnknownNameError,
    digest_of_bytes,
    is_digest,
)
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.core.text import format_bytes, format_plain
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.canaries import CanaryVerdict, canaries
from enginesmith.registry.evidence.latencies import latencies
from enginesmith.registry.manifest import EngineEntry, Manifest, pinned_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import evidence_prefix
from enginesmith.registry.versions import channel_state, lookup, policies
from enginesmith.registry.versions.channel_state import Channel, ChannelHistory, read_history
from enginesmith.registry.versions.policies import ChannelPolicy
from pipeline.compile.publication.pages import published_document
from validation.plotting import number_text, percent_text, seconds_text
from validation.reporting.html import VersionPage, metric_text, overview
from validation.reporting.version_document import VersionDocument

# Two versions of a model side by side: what of the spec, the toolchain, the data, the quality, the scales and the
# latency differs.

# Values that are longer than this are cut: a spec may hold a whole table.
MOST_CHARACTERS = 300
# Rows of one section that are shown; scales of a large model are thousands.
MOST_ROWS = 200
# Ratio from which it is written as a factor: +4690 % is hard to read.
_LARGE = 3


@dataclass(frozen=True)
class Fact:
    """A value as text. number: to compare it by, None for one that is only equal or not.  relative: whether a change of
    it is a share of the older value, else a difference in `unit`.  engine: the unit that it is of; '' for none.

    Of an engine that one version alone has, nothing is compared but its status.
    """

    text: str
    number: float | None = None
    relative: bool = True
    unit: str = ""
    engine: str = ""


# By the title of a section and the name of the value.
Facts = Mapping[str, Mapping[str, Fact]]


@dataclass(frozen=True)
class ComparedRow:
    """A value of both versions; '' where a version has none. change: in words; '' for values that are no numbers.
    name: of the value."""

    name: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class ComparedSection:
    """One section. changed: the rows that differ.  same: how many values are equal.  more: changed rows left out."""

    title: str
    changed: tuple[ComparedRow, ...]
    same: int
    more: int


def facts_of(document: VersionDocument) -> Facts:
    """The values of a version that are compared, by section."""
    return {
        "Spec": {path: Fact(text) for path, text in _flatten(document.spec, "")},
        "Toolchain and host": {
            name: Fact(str(value)) for name, value in {**document.toolchain, **document.host}.items()
        },
        "Quality": dict(_quality(document)),
        "Latency": dict(_latency(document)),
        "Quantization scales": {
            f"{variant}: {tensor.role} {tensor.name}": Fact(number_text(tensor.scale), tensor.scale)
            for variant, record in document.quantization.items()
            for tensor in record.tensors
        },
        "Engines": dict(_engines(document)),
        "Model and data": {
            name: Fact(digest[:16]) for name, digest in {**document.provenance, **document.sources}.items()
        },
    }


def compare(before: Facts, after: Facts) -> tuple[ComparedSection, ...]:
    """All sections, each with what differs. The order of names is that of the newer version."""
    shared_units = _engines_of(before) & _engines_of(after)
    return tuple(_compare_section(title, before.get(title, {}), after[title], shared_units) for title in after)


def _engines_of(facts: Facts) -> set[str]:
    return {fact.engine for section in facts.values() for fact in section.values()} | {""}


def _compare_section(
    title: str, before: Mapping[str, Fact], after: Mapping[str, Fact], engines: set[str]
) -> ComparedSection:
    all_facts = {**before, **after}
    names = [name for name in dict.fromkeys([*after, *before]) if all_facts[name].engine in engines]
    changed_rows = [
        ComparedRow(name, _text(before.get(name)), _text(after.get(name)), _change(before.get(name), after.get(name)))
        for name in names
        if _text(before.get(name)) != _text(after.get(name))
    ]
    omitted_count = max(0, len(changed_rows) - MOST_ROWS)
    # Numbers that read the same differ by noise.
    return ComparedSection(title, tuple(changed_rows[:MOST_ROWS]), len(names) - len(changed_rows), omitted_count)


def _text(fact: Fact | None) -> str:
    return fact.text if fact else ""


def _change(before: Fact | None, after: Fact | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if before.number is None or after.number is None or not math.isfinite(after.number - before.number):
        return ""
    if not after.relative:
        sign = "+" if after.number > before.number else ""
        return f"{sign}{number_text(after.number - before.number)} {after.unit}".strip()
    if not before.number:
        return ""
    ratio = after.number / before.number
    return percent_text(ratio - 1) if 1 / _LARGE < ratio < _LARGE else f"{format_plain(ratio)} ×"  # noqa: RUF001 - times


def _flatten(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Each value in a spec by its path: 'inputs.image.dtype' -> 'float32'."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flatten(item, f"{path}.{name}" if path else str(name))
    elif value is not None:
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield path or "spec", text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _engines(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for entry in document.engines:
        yield f"{entry.unit}: status", Fact(entry.status)
        if entry.digest:
            size = document.size_of(entry)
            yield f"{entry.unit}: size", Fact(format_bytes(size), size, engine=entry.unit)
            yield f"{entry.unit}: bytes", Fact(entry.digest[:16], engine=entry.unit)
        for name, text in entry.toolchain.items():
            yield f"{entry.unit}: {name}", Fact(text, engine=entry.unit)


def _quality(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for graph, values in document.metrics.items():
        for name, value in values.items():
            unit = "dB" if name.endswith("_db") else ""
            yield f"{graph}: {name}", Fact(metric_text(value, name), value, False, unit)
    for report in document.reports:
        least_values: dict[str, float] = {}
        for check in report.checks:
            if check.name == "sqnr_db" and check.value is not None and not math.isnan(check.value):
                least_values[check.stage] = min(least_values.get(check.stage, math.inf), check.value)
        for stage, value in least_values.items():
            yield (
                f"{report.unit}: SQNR at {stage}",
                Fact(metric_text(value, "sqnr_db"), value, False, "dB", report.unit),
            )


def _latency(document: VersionDocument) -> Iterator[tuple[str, Fact]]:
    for reports in document.latencies.values():
        for report in reports:
            for bucket in report.buckets:
                seconds = bucket.runtime_s
                busy_note = " (busy machine)" if report.busy else ""
                name = f"{report.unit}, {bucket.name}, on {report.machine}"
                yield name, Fact(seconds_text(seconds) + busy_note, seconds, engine=report.unit)


# Reads what a model's pages show: its channels with their histories, and its versions with all that was measured.

T = TypeVar("T")


@dataclass(frozen=True)
class Signatures:
    """The signatures of a version's manifest. keys: ids of the keys that signed, shortened.  signed_by: the trust
    policy's names of signers whose signature holds; None where no policy was given.  refusal: why it is not trusted."""

    keys: tuple[str, ...] = ()
    signed_by: tuple[str, ...] | None = None
    refusal: str = ""


@dataclass(frozen=True)
class ReadVersion:
    """The present state of a version. document: None if its manifest cannot be read; else `page` has the contents of
    its page, and `manifest` the manifest's digest.  problems: what could not be read, as texts.  sizes: unit -> bytes
    of its engine; of an ensemble, of its graphs' engines.  pinned: the graphs of an ensemble whose versions exist.
    model, version: names.  signatures: of whom, by the trust policy."""

    model: str
    version: str
    document: VersionDocument | None
    page: VersionPage | None = None
    problems: tuple[str, ...] = ()
    manifest: str = ""
    signatures: Signatures = field(default_factory=Signatures)
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadChannel:
    """A channel. channel: None where it cannot be read, and `problem` says why.  policy: what it asks.  history: its
    moves and rollouts; empty where they cannot be read.  name: of the channel."""

    name: str
    channel: Channel | None
    policy: ChannelPolicy
    history: ChannelHistory
    problem: str = ""

    @property
    def version(self) -> str | None:
        """The version that it serves; None where it cannot be read."""
        return self.channel.version if self.channel else None


def read_channels(store: Store, model: str, names: tuple[str, ...]) -> tuple[ReadChannel, ...]:
    """The channels of a model, in this order; those that were deleted meanwhile are left out."""
    channels = []
    for name in names:
        problems: list[str] = []
        channel = _try(partial(channel_state.read_channel, store, model, name), None, problems)
        history = (
            _try(partial(read_history, store, channel), ChannelHistory(), problems) if channel else ChannelHistory()
        )
        policy = _try(partial(policies.of_channel, store, model, name), ChannelPolicy(), problems)
        if channel or problems:
            channels.append(ReadChannel(name, channel, policy, history, "; ".join(problems)))
    return tuple(channels)


def read_version(store: Store, model: str, version: str, trust: Path | None = None) -> ReadVersion:
    """A version with its statuses and measurements of today. trust: a trust policy to check its signatures by.

    What cannot be read is said in `problems`. Raises UnavailableError when the registry is out of reach.
    """
    problems: list[str] = []
    manifest = _try(lambda: lookup.load(store, model, version), None, problems)
    if manifest is None:
        return ReadVersion(model, version, None, problems=tuple(problems))
    full_view = _try(lambda: _view(published_document(store, manifest)), None, problems)
    document, page = full_view or _view(_bare_document(store, manifest, problems))
    signatures = _try(lambda: _signatures(store, manifest, trust), Signatures(), problems)
    sizes = {
        entry.unit: _try(partial(_size, store, document, entry), entry.size_bytes, problems)
        for entry in document.engines
    }
    graph_names = tuple(pin.name for pin in document.graphs if lookup.load_if_there(store, pin.model, pin.version))
    problems = list(dict.fromkeys(problems))
    return ReadVersion(model, version, document, page, tuple(problems), manifest.digest, signatures, sizes, graph_names)


def _size(store: Store, document: VersionDocument, entry: EngineEntry) -> int | None:
    """Size of an engine in bytes; of one of an ensemble that of its graphs' engines. Raises IntegrityError."""
    if not (document.graphs and entry.usable):
        return document.size_of(entry)
    return sum(graph.size_of(engine) or 0 for _, graph, engine in pinned_engines(store, document, entry))


def _view(document: VersionDocument) -> tuple[VersionDocument, VersionPage]:
    """The document, and what its page shows. Raises IntegrityError for a document that lacks what that needs."""
    try:
        return document, overview(document, pictures=False)
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise IntegrityError(f"report.json of {document.reference} is incomplete or damaged ({error!r})") from error


def _bare_document(store: Store, manifest: Manifest, problems: list[str]) -> VersionDocument:
    """What can be read beside a manifest whose report.json is lost or damaged."""
    manifest_fields = {
        manifest_field.name: getattr(manifest, manifest_field.name) for manifest_field in dataclasses.fields(Manifest)
    }
    document = VersionDocument(**manifest_fields)
    document = replace(document, engines=_try(lambda: judge_entries(store, manifest), manifest.engines, problems))
    reports: dict[str, list[LatencyReport]] = _try(lambda: latencies(store, manifest), {}, problems)
    canary_verdicts: tuple[CanaryVerdict, ...] = _try(lambda: tuple(canaries(store, manifest)), (), problems)
    return replace(
        document,
        latencies={engine: tuple(engine_reports) for engine, engine_reports in reports.items()},
        canaries=canary_verdicts,
    )


def _signatures(store: Store, manifest: Manifest, trust: Path | None) -> Signatures:
    prefix = evidence_prefix("signatures", manifest.model, manifest.version)
    is_signed = next(iter(store.children(prefix)), None) is not None
    names = store.children(f"{prefix}{digest_of_bytes(manifest.to_bytes())}/") if is_signed else ()
    keys = (name.removesuffix(".sig.json") for name in names if name.endswith(".sig.json"))
    signatures = Signatures(tuple(key[:16] for key in keys if is_digest(key)))
    if trust is None:
        return signatures
    from enginesmith.registry.trust import require

    try:
        return replace(signatures, signed_by=require(store, manifest, trust).signers)
    except UnavailableError:
        raise
    except EnginesmithError as error:
        return replace(signatures, signed_by=(), refusal=str(error))


def _try(read: Callable[[], T], otherwise: T, problems: list[str]) -> T:
    try:
        return read()
    except (IntegrityError, UnknownNameError) as error:
        problems.append(str(error))
        return otherwise
