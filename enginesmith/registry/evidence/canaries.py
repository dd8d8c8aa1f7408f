"""Verdicts of canaries, and other records of a build beside its engines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from enginesmith.core.codec import Excerpt, decode, encode, explain_damage, parse_as
from enginesmith.core.errors import Digest, InputError, IntegrityError, UnknownNameError, canonical_json
from enginesmith.core.hardware.cpu_kinds import kind_named
from enginesmith.core.hardware.evaluation import judge
from enginesmith.core.hardware.machine import Machine, parse_targets
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.requirements import Format, hardware_of
from enginesmith.core.types import NO_LAYERS, Target
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import canary_key, evidence_prefix

if TYPE_CHECKING:
    from enginesmith.core.reports.breakdown import QuantizationRecord

# Records of a build beside its engines, as blobs that the manifest names among its sources.
#
# Layer information of engines is JSON from the compiler's inspector: a list of layers, each a name, or an object with
# names, types, formats and the chosen tactic, depending on the profiling verbosity of the build. There is one
# quantization record per graph variant.

# Names of sources in the manifest: 'layers UNIT', 'quantization VARIANT', and 'recipe VARIANT': how a graph was written
# (`pipeline.compile.steps.graphs`).
LAYERS = "layers"
RECORD = "quantization"
RECIPE = "recipe"
MAX_BYTES = 64 << 20
LAYER_COLUMNS = ("layer", "type", "tactic", "inputs", "outputs")
_WIDEST = 60


def layers_of(store: Store, manifest: Manifest, unit: str) -> tuple[EngineEntry, dict[str, object]]:
    """The engine that `unit` names ('sm_89 fp16 tensorrt', or its first words), and its layer information as JSON.

    Raises UnknownNameError if no unit or several match, or there is no layer information; IntegrityError for damage.
    """
    unit_words = unit.split()
    matches = [
        entry for entry in manifest.engines if unit_words and entry.unit.split()[: len(unit_words)] == unit_words
    ]
    if len(matches) != 1:
        unit_list = ", ".join(entry.unit for entry in matches or manifest.engines)
        mismatch = "fits several" if matches else "is not one"
        raise UnknownNameError(f"{unit!r} {mismatch} of the units of {manifest.reference}: {unit_list}")
    entry = matches[0]
    digest = manifest.sources.get(f"{LAYERS} {entry.unit}")
    if digest is None:
        note = next((entry_note for entry_note in entry.notes if entry_note.startswith(NO_LAYERS)), "")
        explanation = note.partition(": ")[2] or f"{entry.backend} tells none"
        raise UnknownNameError(f"no layers are recorded for {entry.unit}: {explanation}")
    document = parse_json(store.read_blob(digest), MAX_BYTES)
    if not isinstance(document.get("Layers"), list):
        raise IntegrityError(f"the record of the layers of {entry.unit} has no list of layers; build it again")
    return entry, document


def layer_row(layer: object) -> tuple[str, ...]:
    """A layer's fields in the order of LAYER_COLUMNS, as text."""
    if not isinstance(layer, dict):
        return _short(layer), "", "", "", ""
    tactic = layer.get("TacticName") or layer.get("TacticValue") or ""
    tensor_texts = (_tensors(layer.get("Inputs")), _tensors(layer.get("Outputs")))
    return (_short(layer.get("Name", "")), _short(layer.get("LayerType", "")), _short(tactic), *tensor_texts)


def _tensors(tensors: object) -> str:
    """The format and dimensions of each tensor as text: 'float16 [1,64,56,56]'."""
    tensor_texts = []
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, dict):
            data_format, dims = tensor.get("Format/Datatype") or tensor.get("Format") or "", tensor.get("Dimensions")
            tensor = f"{data_format} {dims if isinstance(dims, list) else ''}".strip().replace(", ", ",")
        tensor_texts.append(str(tensor))
    return _short(", ".join(tensor_texts))


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def quantization_records(store: Store, manifest: Manifest) -> dict[str, "QuantizationRecord"]:
    """Graph variant's name -> quantization record. Raises IntegrityError for a damaged record or another format."""
    from enginesmith.core.reports.breakdown import QuantizationRecord

    records: dict[str, QuantizationRecord] = {}
    for name, digest in sorted(manifest.sources.items()):
        if name.startswith(f"{RECORD} "):
            variant = name.removeprefix(f"{RECORD} ")
            with explain_damage(f"the quantization record of {variant}", "build it again"):
                records[variant] = parse_as(store.read_blob(digest), MAX_BYTES, QuantizationRecord)
    return records


# Verdicts of canaries: each is about one run of a published version on one target, a GPU generation or a kind of CPU.
#
# They are stored beside the manifest, which does not change, and are deleted with the version. Each names the canary's
# report, a blob. Several runs on a target give one verdict (`verdict_on`), in which a FAIL outweighs a PASS.

FORMAT = 1
MAX_CANARY_BYTES = 1 << 16
# The target of observations without a known target; it counts for no channel.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class CanaryVerdict(Excerpt):
    """The verdict of a canary on one target. target: 'sm_89', or the kind of CPU.  engine: the candidate's digest.

    baseline: digest of the manifest it was compared with.  against: that version.  report: digest of the report's blob.
    created_at: ISO 8601, UTC.
    """

    target: Name
    verdict: Literal["PASS", "FAIL", "INSUFFICIENT"]
    reason: str
    engine: Digest
    unit: str
    baseline: Digest
    against: Name
    report: Digest
    created_at: str


@dataclass(frozen=True)
class _StoredVerdict(Excerpt):
    format: Annotated[int, Format(FORMAT)]


def attach_canary(store: Store, manifest: Manifest, verdict: CanaryVerdict) -> None:
    """Store a verdict beside its version; nothing changes if it is stored already.

    Raises IntegrityError if its report is not stored, InputError for an engine that the version lacks or that does not
    run on the target, and for a verdict with malformed fields.
    """
    entry = next((entry for entry in manifest.engines if entry.digest == verdict.engine), None)
    if entry is None:
        raise InputError(f"the canary ran engine {verdict.engine}, which {manifest.reference} does not have")
    verdict_bytes = canonical_json({"format": FORMAT, **encode(verdict)})
    try:
        _read(verdict_bytes)
    except Malformed as error:
        raise InputError(f"the canary's report does not say what was compared, and where: {error}") from None
    if verdict.target != UNKNOWN:
        # Whether the target that the engine was built for includes the canary's.
        capability = parse_targets(verdict.target)[0].compute_capability if verdict.target.startswith("sm_") else None
        processor = hardware_of(entry.requires)
        if processor is None or judge(processor, Machine(capability)).state == "unmet":
            raise InputError(f"the canary's report is invalid: {entry.unit} does not run on {verdict.target}")
    if not store.has(verdict.report):
        raise IntegrityError(f"canary report {verdict.report} is not in {store.uri}; run the canary again")
    key = canary_key(manifest.model, manifest.version, verdict.target, verdict.report)
    store.create(key, verdict_bytes)


def canaries(store: Store, manifest: Manifest) -> list[CanaryVerdict]:
    """All verdicts of a version, sorted by target and then by time. Raises IntegrityError for a damaged one."""
    verdicts = []
    for key in store.list(evidence_prefix("canaries", manifest.model, manifest.version)):
        with explain_damage(f"{key} of {store.uri}", "delete it, and run the canary again"):
            verdict = _read(store.read(key) or b"")
            if canary_key(manifest.model, manifest.version, verdict.target, verdict.report) != key:
                raise Malformed("its content does not match its path: it was edited by hand or moved")
        verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: (verdict.target, verdict.created_at))


def _read(data: bytes) -> CanaryVerdict:
    document = parse_json(data, MAX_CANARY_BYTES)
    decode(document, _StoredVerdict, "")
    return decode(document, CanaryVerdict, "")


def verdict_on(target: str, baseline: str, verdicts: Iterable[CanaryVerdict]) -> CanaryVerdict | None:
    """The combined verdict of a target against a baseline (digest of its manifest): a FAIL if any run failed, else a
    PASS if one passed, else the newest; None without a run. target: as in `covers`."""
    covering_verdicts = [v for v in verdicts if v.baseline == baseline and covers(v.target, target)]
    ranked_verdicts = sorted(
        covering_verdicts, key=lambda v: (("INSUFFICIENT", "PASS", "FAIL").index(v.verdict), v.created_at)
    )
    return ranked_verdicts[-1] if ranked_verdicts else None


def covers(ran_on: str, target: str) -> bool:
    """Whether a canary that ran on `ran_on` counts for `target`; 'cpu' includes all kinds of CPU."""
    return ran_on == target or (target == "cpu" and (ran_on == "cpu" or kind_named(ran_on) is not None))


def canary_target(target: Target) -> str:
    """The canary target for the target of an engine or a machine: the GPU generation, or the kind of CPU."""
    return target.name if target.is_cpu else target.sm


def targets_named(target_names: Iterable[str]) -> tuple[str, ...]:
    """Canary targets from names: a product gives its generation, a family each of its generations. Sorted.

    Raises UnknownNameError for an unknown name.
    """
    return tuple(sorted({canary_target(target) for name in target_names for target in parse_targets(name)}))


def list_served(entries: Sequence[EngineEntry], proven_only: bool) -> list[EngineEntry]:
    """The engines that a channel serves. entries: with their current status."""
    return [entry for entry in entries if entry.status == "proven" or (entry.usable and not proven_only)]
