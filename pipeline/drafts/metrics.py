"""Which task metric a model most likely wants, by the shapes and names of what it takes and gives."""

import re
from collections.abc import Iterator, Sequence

from enginesmith.core.state import without_states
from enginesmith.core.types import TensorSpec
from pipeline.drafts.states import find_states

# A last axis from here on is a vocabulary.
_VOCABULARY = 1000
# Not `position_ids`, `token_type_ids`.
_IDS = re.compile(r"^(?:(?:decoder_)?input_)?ids$|^tokens?$", re.I)


def suggest_metric(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, object]:
    """A task metric as a spec has it, with a first limit; empty where nothing is evident."""
    return next(_suggestions(inputs, outputs), {})


def _suggestions(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Iterator[dict[str, object]]:
    states = find_states(inputs, outputs)
    inputs = without_states(inputs, states)  # caches of keys and values have the axes of pictures
    image = [spec for spec in inputs if len(spec.shape) == 4 and spec.dtype != "int64"]
    text = any(spec.dtype in ("int64", "int32") and len(spec.shape) == 2 for spec in inputs)
    for spec in outputs:
        name, shape = spec.name, spec.shape
        last = shape[-1] if shape and isinstance(shape[-1], int) else 0
        if "float" not in spec.dtype:
            continue
        if image and last == 4 and "box" in name.lower():
            scores = next((other.name for other in outputs if "score" in other.name.lower()), None)
            chosen = {"scores": scores, "least_score": 0.25} if scores else {}
            yield {"name": "detection", "output": name, **chosen, "floor": 0.95}
        elif image and len(shape) == 3 and _is_head(shape, image):
            head = {"form": "cxcywh", "head": True, "least_score": 0.25, "nms": 0.45}
            yield {"name": "detection", "output": name, **head, "floor": 0.95}
        elif image and len(shape) == 3 and last > 10:
            yield {"name": "ctc", "output": name, "floor": 0.98}
        elif states and _find_token_ids(inputs) and "logits" in name.lower() and last > 1:
            yield {"name": "perplexity", "output": name, "floor": 0.95}
        elif text and len(shape) == 3 and last >= _VOCABULARY:
            yield {"name": "tokens", "output": name, "floor": 0.99}
        elif text and (name == "last_hidden_state" or "embedding" in name.lower()):
            pool = {"pool": "mean"} if len(shape) == 3 else {}
            yield {"name": "embeddings", "output": name, **pool, "floor": 0.99}
        elif image and len(shape) == 2 and last > 2:
            yield {"name": "top_k", "output": name, "k": 1, "floor": 0.99}


def _find_token_ids(inputs: Sequence[TensorSpec]) -> str | None:
    """The input of token ids, by its name and integers; None where there is not one alone."""
    found = [spec.name for spec in inputs if spec.dtype in ("int64", "int32") and _IDS.search(spec.name)]
    return found[0] if len(found) == 1 else None


def _is_head(shape: Sequence[int | str], images: Sequence[TensorSpec]) -> bool:
    """Whether [batch, 4 + classes, places] is a detector's head: a place for each 8, 16 and 32 pixels of an image; of
    images of any size an expression of these is the name of the axis."""
    rows, places = shape[1:]
    if isinstance(places, str):
        return isinstance(rows, int) and rows > 4 and "floor" in places
    sizes = [[size for size in spec.shape[2:] if isinstance(size, int)] for spec in images]
    known = {sum((size[0] // step) * (size[1] // step) for step in (8, 16, 32)) for size in sizes if len(size) == 2}
    return isinstance(rows, int) and rows > 4 and places in known
