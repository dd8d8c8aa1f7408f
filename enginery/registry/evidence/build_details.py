"""Layer information of a version's engines: blobs as the compiler's engine inspector wrote them.

The JSON has a list of layers, each a name, or an object with names, types, formats and the chosen tactic, depending on
the profiling verbosity that the engine was built with.

The quantization records of a version: one per graph variant, stored as blobs beside the graphs.
"""

from typing import TYPE_CHECKING

from enginery.core import parsing
from enginery.core.codec import decode
from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.types import NO_LAYERS
from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store

if TYPE_CHECKING:
    from enginery.core.reports.quantization import QuantizationRecord


# The manifest's sources of this name, with the unit behind it, are such documents.
LAYERS = "layers"
MAX_BYTES = 64 << 20
LAYER_COLUMNS = ("layer", "type", "tactic", "inputs", "outputs")
_WIDEST = 60


def layers_of(store: Store, manifest: Manifest, unit: str) -> tuple[EngineEntry, dict[str, object]]:
    """The engine that `unit` names ('sm_89 fp16 tensorrt', or its first words), and its layer information as JSON.

    Raises UnknownNameError if no unit or several match, or there is no layer information; IntegrityError for damage.
    """
    entry = _entry(manifest, unit)
    digest = manifest.sources.get(f"{LAYERS} {entry.unit}")
    if digest is None:
        raise UnknownNameError(f"nothing is on record of the layers of {entry.unit}: {_why_not(entry)}")
    document = parsing.parse_json(store.read_blob(digest), MAX_BYTES)
    if not isinstance(document.get("Layers"), list):
        raise IntegrityError(f"what is on record of the layers of {entry.unit} has no list of layers; build it again")
    return entry, document


def layer_row(layer: object) -> tuple[str, ...]:
    """A layer's fields in the order of COLUMNS, as text."""
    if not isinstance(layer, dict):
        return _short(layer), "", "", "", ""
    tactic = layer.get("TacticName") or layer.get("TacticValue") or ""
    ends = (_tensors(layer.get("Inputs")), _tensors(layer.get("Outputs")))
    return (_short(layer.get("Name", "")), _short(layer.get("LayerType", "")), _short(tactic), *ends)


def _entry(manifest: Manifest, unit: str) -> EngineEntry:
    wanted = unit.split()
    found = [entry for entry in manifest.engines if wanted and entry.unit.split()[: len(wanted)] == wanted]
    if len(found) == 1:
        return found[0]
    units = ", ".join(entry.unit for entry in found or manifest.engines)
    what = "fits several" if found else "is none"
    raise UnknownNameError(f"{unit!r} {what} of the units of {manifest.model}@{manifest.version}: {units}")


def _why_not(entry: EngineEntry) -> str:
    """The reason that the build left in a note."""
    note = next((item for item in entry.notes if item.startswith(NO_LAYERS)), "")
    return note.partition(": ")[2] or f"{entry.backend} tells none"


def _tensors(items: object) -> str:
    """'float16 [1,64,56,56]' of each tensor, as its format and dimensions tell."""
    if not isinstance(items, list):
        return ""
    return _short(", ".join(_tensor(item) for item in items))


def _tensor(item: object) -> str:
    if not isinstance(item, dict):
        return str(item)
    form, dims = item.get("Format/Datatype") or item.get("Format") or "", item.get("Dimensions")
    return f"{form} {dims if isinstance(dims, list) else ''}".strip().replace(", ", ",")


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


# The manifest's sources of this name, followed by the graph variant, are records.
RECORD = "quantization"
# And of this name, recipes: how a graph was written (`pipeline.compile.steps.graphs`).
RECIPE = "recipe"
FORMAT = 1
RECORD_MAX_BYTES = 64 << 20


def quantization_records(store: Store, manifest: Manifest) -> dict[str, "QuantizationRecord"]:
    """Graph variant's name -> quantization record. Raises IntegrityError for a damaged record or another format."""
    names = {name.removeprefix(f"{RECORD} "): digest for name, digest in manifest.sources.items() if _is_record(name)}
    return {variant: _read_record(store, variant, digest) for variant, digest in sorted(names.items())}


def _is_record(source: str) -> bool:
    return source.startswith(f"{RECORD} ")


def _read_record(store: Store, variant: str, digest: str) -> "QuantizationRecord":
    from enginery.core.reports.quantization import QuantizationRecord

    document = parsing.parse_json(store.read_blob(digest), RECORD_MAX_BYTES)
    if document.get("format") != FORMAT:
        raise IntegrityError(f"the quantization record of {variant} is not of format {FORMAT}: upgrade enginery")
    return decode(document, QuantizationRecord)
