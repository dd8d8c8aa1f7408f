"""Proves published engines on this machine: what a CPU host had to leave unproven, a node with the GPU attests.

One at a time on a machine, since engines are timed, and two at once would time each other; and of several machines that
want to prove the same engine one does, while the others wait for what it attests.

Unproven engines that can run here or on workers with a GPU, of a whole registry or of one version; their proof.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from builders.backends import discovery
from builders.backends.compatibility import find_incompatibility
from enginery.core.digest import digest_of
from enginery.core.errors import EngineryError, IntegrityError
from enginery.core.hardware.targets import parse_targets, this_kind
from enginery.core.names import check_model, check_version, version_order
from enginery.core.origin import this_process
from enginery.core.parsing import parse_json
from enginery.core.reports.proof import Report
from enginery.core.types import Target
from enginery.registry.evidence.attestations import MAX_BYTES, JudgedEntry, attest, judge_entries
from enginery.registry.evidence.latencies import attach_latency
from enginery.registry.manifest import EngineEntry, Manifest, make_request, request_of
from enginery.registry.store.base import Store
from enginery.registry.trust import require
from enginery.registry.versions import channels, lookup
from pipeline.compile.run_context import RunContext, shown_turn
from pipeline.compile.steps.latency import time_engine
from pipeline.compile.steps.proofs import try_to_prove
from pipeline.outcome import make_report
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, Graph, GraphVariant, Proof, Unit


@dataclass(frozen=True)
class Attested:
    """One engine's result: 'proven', 'failed', or 'unproven' with the reason why it was not run here.

    report, latency: digests of the reports that were attached.
    """

    entry: EngineEntry
    verdict: str
    reason: str
    report: str | None = None
    latency: str | None = None


def revalidate(
    manifest: Manifest,
    context: RunContext,
    targets: Collection[str] | None = None,
    engines: Collection[str] | None = None,
    again: bool = True,
) -> Iterator[Attested]:
    """Run every engine of a version that can run here, and attach a report to each; say of the others why not.

    targets, engines: names of the targets and digests of the engines to keep to; None for all.  again: whether to run
    what has been proven, or has failed, by the time when it is its turn.
    Raises IntegrityError when an engine, its graph or its golden set is damaged.
    """
    spec = spec_of(manifest)
    for known in judge_entries(context.store, manifest):
        entry = known.on_cpu(this_kind().name)
        if entry.digest is None or (targets is not None and entry.target not in targets):
            continue
        if engines is not None and entry.digest not in engines:
            continue
        if reason := why_not_here(entry):
            told = f"{entry.reason}; not run here: {reason}" if entry.status == "proven" else reason
            yield Attested(entry, entry.status, told)
            continue
        with _its_turn(manifest, entry, context):
            found = None if again else _read_settled(manifest, entry, context)
            found = found or _read_attested(manifest, entry, spec, context)
        yield found


def why_not_here(entry: EngineEntry) -> str | None:
    """Why an engine cannot be run here; None when it can.

    Where its compiler is not installed, or in a version that does not open it, that says nothing about the engine: a
    report of it would outweigh every machine on which it passes.
    """
    backend = discovery.configure(entry.backend, dict(entry.options))
    return backend.runs(entry.hardware) or find_incompatibility(backend, make_request(entry))


@contextmanager
def _its_turn(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Iterator[None]:
    """First the machine, then the engine, by everybody: who has an engine waits for nothing."""
    host = this_process().host
    what = f"proving {entry.unit} of {manifest.model}@{manifest.version}"
    with (
        shown_turn(context, digest_of({"proving on": host}), what),
        shown_turn(context, digest_of({"proving": entry.digest, "of": manifest.digest}), what),
    ):
        yield


def _read_settled(manifest: Manifest, entry: EngineEntry, context: RunContext) -> Attested | None:
    """What somebody else found out meanwhile."""
    found = next(item for item in judge_entries(context.store, manifest) if item.unit == entry.unit)
    now = found.on_cpu(this_kind().name)
    return None if now.status == "unproven" else Attested(now, now.status, now.reason)


def _read_attested(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> Attested:
    report = _prove(manifest, entry, spec, context)
    attached = attest(context.store, manifest, report)
    timed = _time(manifest, entry, spec, context) if report.verdict == "proven" else None
    return Attested(entry, report.verdict, report.reason, attached, timed)


def spec_of(manifest: Manifest) -> ModelSpec:
    """The spec that a version was built from: its limits and its metric count here too."""
    try:
        return ModelSpec.model_validate(manifest.spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "spec"
        raise IntegrityError(
            f"{manifest.model}@{manifest.version}: its spec does not fit this installation: {where}: {first['msg']}; "
            "install the backends that it was built with, and the same enginery"
        ) from error


def _prove(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> Report:
    built = as_built(entry)
    golden = manifest.golden
    proof = try_to_prove(built, spec, golden, context, afresh=True)
    return make_report(built, golden, [published_proof(entry, context.store), proof], None)


def _time(manifest: Manifest, entry: EngineEntry, spec: ModelSpec, context: RunContext) -> str | None:
    """Time the engine on this kind of machine, where the spec asks for it, and attach the report."""
    asked = spec.validation.latency
    if asked is None:
        return None
    found = time_engine(as_built(entry), spec, asked, manifest.golden, context, afresh=True)
    if found:
        attach_latency(context.store, manifest, found)
    return found


def as_built(entry: EngineEntry) -> Built:
    """The unit as it was when it was built. Raises IntegrityError when the entry does not give its own build key."""
    request = request_of(entry)
    graph = Graph(GraphVariant(request.precision), request.model, request.inputs, request.outputs, entry.scales)
    unit = Unit(request, graph, "cached", "published")
    return Built(unit, entry.digest, entry.size_bytes or 0, entry.suffix or "", entry.requires, entry.notes)


def published_proof(entry: EngineEntry, store: Store) -> Proof:
    """The export and quantization stages as they were measured when the version was published."""
    if entry.report is None:
        return Proof()
    report = Report.from_json(parse_json(store.read_blob(entry.report), MAX_BYTES))
    before = ("export", "quantization")
    spreads = tuple(spread for spread in report.spreads if spread.joint in before)
    return Proof(tuple(check for check in report.checks if check.joint in before), spreads=spreads)


@dataclass(frozen=True)
class Pending:
    """A version with engines that wait for a proof that this machine, or a worker with a GPU, can give."""

    manifest: Manifest
    engines: tuple[EngineEntry, ...]

    @property
    def reference(self) -> str:
        """'digits@4'."""
        return f"{self.manifest.model}@{self.manifest.version}"


@dataclass(frozen=True)
class PendingProof:
    """What became of one engine, or (engine None) why its whole version could not be looked at."""

    reference: str
    engine: str | None
    verdict: str
    reason: str

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.verdict in ("proven", "unproven")


def list_pending(store: Store, only: str | None = None, on: Target | None = None) -> Iterator[Pending]:
    """Of each model's newest version and of what its channels serve: the unproven engines that run here.

    only: that model alone.  on: see `pending_of`.
    A version that cannot be read is left out; `enginery verify` names it.
    """
    for model in lookup.models(store) if only is None else [check_model(only)]:
        for version in sorted(_looked_at(store, model), key=version_order):
            try:
                found = pending_of(store, model, version, on=on)
            except EngineryError as error:
                logging.getLogger(__name__).warning("%s@%s is left out: %s", model, version, error)
                continue
            if found.engines:
                yield found


def pending_of(store: Store, model: str, version: str, target: str | None = None, on: Target | None = None) -> Pending:
    """The unproven engines of a version that run here; whichever version it is, for whoever asks.

    target: only those for it, as `--target` names one.  on: instead those for this GPU, which workers have; whether
    they run there (compiler, versions) is asked there.
    Raises UnknownNameError, and IntegrityError for a version that cannot be read.
    """
    manifest = lookup.load(store, check_model(model), check_version(version))
    entries = _select_entries(_here(store, manifest), target)
    return Pending(manifest, tuple(entry for entry in entries if _unproven(entry) and _why_not(entry, on) is None))


def why_nothing(store: Store, item: Pending, target: str | None = None, on: Target | None = None) -> str:
    """Why a version has no engine that could be proven here, or on workers. target, on: as for `pending_of`."""
    entries = _select_entries(_here(store, item.manifest), target)
    for_target = f" for {target}" if target else ""
    waiting = [entry for entry in entries if _unproven(entry)]
    if waiting:
        return "; ".join(dict.fromkeys(f"{item.reference}: {_why_not(entry, on)}" for entry in waiting))
    counts = Counter(entry.status for entry in entries if entry.digest)
    there = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    return f"{item.reference} has no unproven engine{for_target}; it has {there}"


def prove(item: Pending, context: RunContext) -> list[PendingProof]:
    """Run a version's pending engines here and attach a report to each. What was proven meanwhile is not run again.

    What goes wrong is its row: a version that the trust policy does not let run, too.
    """
    try:
        require(context.store, item.manifest)
        digests = {str(entry.digest) for entry in item.engines}
        return [_row(item, found) for found in revalidate(item.manifest, context, engines=digests, again=False)]
    except EngineryError as error:
        return [PendingProof(item.reference, None, "error", str(error))]


def _looked_at(store: Store, model: str) -> set[str]:
    found = lookup.versions(store, model)
    served = {
        channel.version for name in channels.names(store, model) if (channel := channels.read(store, model, name))
    }
    return ({found[-1]} if found else set()) | (served & set(found))


def _select_entries(entries: Iterable[EngineEntry], target: str | None) -> list[EngineEntry]:
    """The entries for a target: a generation means its products, too."""
    if target is None:
        return [*entries]
    wanted = parse_targets(target)
    names, generations = {item.name for item in wanted}, {item.sm for item in wanted if item.product is None}
    return [entry for entry in entries if entry.target in names or entry.hardware.sm in generations]


def _here(store: Store, manifest: Manifest) -> list[JudgedEntry]:
    """The engines with the status that they have on this machine's kind of CPU."""
    return [entry.on_cpu(this_kind().name) for entry in judge_entries(store, manifest)]


def _why_not(entry: EngineEntry, on: Target | None) -> str | None:
    """Why an engine cannot be run here, or is not for the GPU that workers have; None when it can, or is."""
    if on is None:
        return why_not_here(entry)
    wanted = entry.hardware
    if wanted.compute_capability == on.compute_capability and wanted.product in (None, on.product):
        return None
    return f"an unproven engine is for {entry.target}, and these workers have {on.name}"


def _unproven(entry: EngineEntry) -> bool:
    return entry.digest is not None and entry.status == "unproven"


def _row(item: Pending, found: Attested) -> PendingProof:
    return PendingProof(item.reference, found.entry.unit, found.verdict, found.reason)
