"""What a build recorded beside its engines, as blobs that the manifest names among its sources.

Layer information of engines is JSON as the compiler's inspector wrote it: a list of layers, each a name, or an object
with names, types, formats and the chosen tactic, depending on the profiling verbosity that the engine was built with.
Quantization records are one for each graph variant.
"""

from typing import TYPE_CHECKING

from enginesmith.core.codec import parse_as
from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.core.parsing import Malformed, parse_json
from enginesmith.core.types import NO_LAYERS
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store

if TYPE_CHECKING:
    from enginesmith.core.reports.quantization import QuantizationRecord

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
    wanted = unit.split()
    found = [entry for entry in manifest.engines if wanted and entry.unit.split()[: len(wanted)] == wanted]
    if len(found) != 1:
        units = ", ".join(entry.unit for entry in found or manifest.engines)
        what = "fits several" if found else "is none"
        raise UnknownNameError(f"{unit!r} {what} of the units of {manifest.model}@{manifest.version}: {units}")
    entry = found[0]
    digest = manifest.sources.get(f"{LAYERS} {entry.unit}")
    if digest is None:
        note = next((item for item in entry.notes if item.startswith(NO_LAYERS)), "")
        why = note.partition(": ")[2] or f"{entry.backend} tells none"
        raise UnknownNameError(f"nothing is on record of the layers of {entry.unit}: {why}")
    document = parse_json(store.read_blob(digest), MAX_BYTES)
    if not isinstance(document.get("Layers"), list):
        raise IntegrityError(f"what is on record of the layers of {entry.unit} has no list of layers; build it again")
    return entry, document


def layer_row(layer: object) -> tuple[str, ...]:
    """A layer's fields in the order of LAYER_COLUMNS, as text."""
    if not isinstance(layer, dict):
        return _short(layer), "", "", "", ""
    tactic = layer.get("TacticName") or layer.get("TacticValue") or ""
    ends = (_tensors(layer.get("Inputs")), _tensors(layer.get("Outputs")))
    return (_short(layer.get("Name", "")), _short(layer.get("LayerType", "")), _short(tactic), *ends)


def _tensors(items: object) -> str:
    """'float16 [1,64,56,56]' for each tensor, from its format and dimensions."""
    texts = []
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            form, dims = item.get("Format/Datatype") or item.get("Format") or "", item.get("Dimensions")
            item = f"{form} {dims if isinstance(dims, list) else ''}".strip().replace(", ", ",")
        texts.append(str(item))
    return _short(", ".join(texts))


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def quantization_records(store: Store, manifest: Manifest) -> dict[str, "QuantizationRecord"]:
    """Graph variant's name -> quantization record. Raises IntegrityError for a damaged record or another format."""
    from enginesmith.core.reports.quantization import QuantizationRecord

    found: dict[str, QuantizationRecord] = {}
    for name, digest in sorted(manifest.sources.items()):
        if name.startswith(f"{RECORD} "):
            variant = name.removeprefix(f"{RECORD} ")
            try:
                found[variant] = parse_as(store.read_blob(digest), MAX_BYTES, QuantizationRecord)
            except Malformed as error:
                raise IntegrityError(f"the quantization record of {variant}: {error}; build it again") from error
    return found
