"""Refitting with the weights of another version: a new version like that one, with the refitted engines of the first.

Everything that was measured of the other version stays, and the refitted engines are added or replace its own. What an
engine's graph lost against the framework was measured when the other version was built. What the engine loses against
its graph is measured now where its hardware is; else it is published as unproven.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from builders.backends import discovery
from builders.backends.optional_methods import get_scheme
from enginesmith.core.digest import canonical_json, digest_of
from enginesmith.core.hardware.cpu_kinds import why_no_proof
from enginesmith.core.origin import user
from enginesmith.core.parsing import parse_json
from enginesmith.core.reports.proof import Approved, Report, approve
from enginesmith.core.text import now
from enginesmith.core.types import QUANTIZED, BuildRequest
from enginesmith.registry.evidence.build_details import LAYERS
from enginesmith.registry.manifest import EngineEntry, Manifest, request_of
from enginesmith.registry.versions.publish import Published, publish
from pipeline.compile.publication.draft import entry_of, list_refitted
from pipeline.compile.publication.provenance import SBOM, STATEMENT, with_provenance
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.engines import recall_engine
from pipeline.compile.steps.proofs import try_to_prove
from pipeline.operations.refit import Refit
from pipeline.operations.revalidate import published_proof, spec_of
from pipeline.outcome import JudgedUnit, make_report
from pipeline.values import Built, Graph, GraphVariant, Unit

_REPORT_BYTES = 64 << 20


@dataclass(frozen=True)
class WantedRefit:
    """An engine to make: the request of the first version's, with the graph of `donor`, an entry of the other."""

    request: BuildRequest
    donor: EngineEntry


def wanted_of(base: Manifest, other: Manifest) -> tuple[list[WantedRefit], list[Refit]]:
    """The engines of `base` to refit, and those for which the other version has no graph, with the reason."""
    found, without = [], []
    for entry in filter(lambda each: each.usable, base.engines):
        before, donor = request_of(entry), _find_donor(entry, other)
        if donor is None:
            reason = (
                f"{other.model}@{other.version} has no graph in {entry.precision} as {entry.backend} wants it; "
                "build a unit of it there"
            )
            without.append(Refit(before, entry.digest, reason=reason))
            continue
        changes = {"model": donor.graph, "inputs": donor.inputs, "outputs": donor.outputs}
        found.append(WantedRefit(replace(before, **changes), donor))  # type: ignore[arg-type]
    return found, without


def publish_refitted(
    base: Manifest, other: Manifest, done: Sequence[tuple[Refit, WantedRefit]], channel: str | None, context: RunContext
) -> Published:
    """Prove what can be proven here, and publish the other version again with the refitted engines.

    done: each refitted engine with what was wanted.  channel: the one to move to the new version.
    Raises as `enginesmith.registry.versions.publish.publish`.
    """
    judged = [_judge(wanted, other, context) for _, wanted in done]
    approved, others = _keep(other, {item.built.unit.name for item in judged}, context)
    for item in judged:
        if item.report and (proof := approve(item.report)):
            context.store.put_bytes(canonical_json(proof.report.to_json()))
            approved.append((entry_of(item, proof.report.digest), proof))
        else:
            others.append(replace(entry_of(item, ""), status="failed", digest=None, report=None, reason=item.reason))
    draft = with_provenance(context.store, _draft(other, judged), [entry for entry, _ in approved], context.started_at)
    sums = {record.digest: record.blake3 for item in judged if (record := item.built.record)}
    why = f"refitted from {base.model}@{base.version}, weights of {other.model}@{other.version}"
    return publish(context.store, draft.with_blake3(sums), approved, others, channel=channel, by=user(), why=why)


def _find_donor(entry: EngineEntry, other: Manifest) -> EngineEntry | None:
    """The entry of the other version whose graph fits this engine's precision and backend and that has a report; one of
    the same unit first."""
    reported = {each.graph: each.report for each in other.engines if each.report}
    alike = [each for each in other.engines if each.graph in reported and _is_same_variant(each, entry)]
    best = next((each for each in alike if each.unit == entry.unit), alike[0] if alike else None)
    return best and replace(best, report=reported[best.graph])


def _is_same_variant(one: EngineEntry, other: EngineEntry) -> bool:
    """Whether two entries have the same kind of graph: that of a float precision is the same for every backend, that of
    a quantized one is written in the backend's scheme."""
    if one.precision != other.precision or one.precision not in QUANTIZED or one.backend == other.backend:
        return one.precision == other.precision
    first, second = (get_scheme(discovery.load(each.backend)(), each.hardware) for each in (one, other))
    return first == second


def _judge(wanted: WantedRefit, other: Manifest, context: RunContext) -> JudgedUnit:
    request = wanted.request
    graph = Graph(GraphVariant(request.precision), request.model, request.inputs, request.outputs, wanted.donor.scales)
    built = Built(Unit(request, graph, "cached", "refitted"), recall_engine(request, context))
    backend = discovery.configure(request.backend, dict(request.options))
    cannot_run = backend.runs(request.target) or why_no_proof(request)
    proofs = [published_proof(wanted.donor, context.store)]
    proofs += [] if cannot_run else [try_to_prove(built, (other.golden, other.onnx), Work(spec_of(other), context))]
    return JudgedUnit(built, make_report(built, other.golden, proofs, cannot_run), proofs[-1].metrics)


def _keep(
    other: Manifest, replaced: set[str], context: RunContext
) -> tuple[list[tuple[EngineEntry, Approved]], list[EngineEntry]]:
    """The other version's own entries that stay: engines with their approval, and the other units."""
    approved, others = [], []
    for entry in other.engines:
        if entry.unit in replaced:
            continue
        proof = None
        if entry.usable and entry.report:
            proof = approve(Report.from_json(parse_json(context.store.read_blob(entry.report), _REPORT_BYTES)))
        if proof is None:
            others.append(entry)
        else:
            approved.append((entry, proof))
    return approved, others


def _draft(other: Manifest, judged: Sequence[JudgedUnit]) -> Manifest:
    units = {item.built.unit.name: item.built.unit.request.key for item in judged}
    gone = {STATEMENT, SBOM, *(f"{LAYERS} {unit}" for unit in units)}
    return replace(
        other,
        version="",
        engines=(),
        report=None,
        created_at=now(),
        content=digest_of({"content": other.content, "refitted": sorted(units.items())}),
        sources={name: digest for name, digest in other.sources.items() if name not in gone},
        provenance={**other.provenance, **list_refitted(judged)},
    )
