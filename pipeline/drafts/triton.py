"""A look at Triton's `config.pbtxt`: the model that it serves, and what the configuration says of it.

The format is protobuf's text format (https://protobuf.dev/reference/protobuf/textformat-spec/); the fields are those of
Triton's ModelConfig (https://github.com/triton-inference-server/common, protobuf/model_config.proto).
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginery.core.errors import InputError
from pipeline.drafts.found import FoundDim, FoundModel, model_name
from pipeline.drafts.onnx_model import look_at_onnx

LARGEST_BYTES = 1 << 20
_DEEPEST = 20
_TOKEN = re.compile(r'\s*(?:#[^\n]*\s*)*("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[A-Za-z0-9_.+\-/]+|[{}\[\]:,;<>])')
_CLOSING = {"{": "}", "<": ">"}


@dataclass
class ProtoMessage:
    """A message of the text format: each field's values, in order."""

    fields: dict[str, list["str | ProtoMessage"]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """The first value of a field; '' without any."""
        found = self.fields.get(name, [""])[0]
        return found if isinstance(found, str) else ""


def look_at_triton(config: Path, folder: Path) -> FoundModel:
    """The ONNX model beside a configuration, with its name and batch sizes. folder: where the spec goes.

    Raises InputError for a configuration of another platform, and where the model's file is not found.
    """
    if config.stat().st_size > LARGEST_BYTES:
        raise InputError(f"{config} is over {LARGEST_BYTES} bytes; a configuration is a short text")
    try:
        told = parse(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{config} is no protobuf text: {error}") from error
    platform = told.text("backend") or told.text("platform") or "onnxruntime"
    if not platform.startswith("onnxruntime"):
        raise InputError(
            f"{config} is of the platform {platform!r}; configurations of onnxruntime are read: name the model"
        )
    name = told.text("default_model_filename") or "model.onnx"
    places = [config.parent / name, *sorted(config.parent.glob(f"[0-9]*/{name}"), key=_version)]
    model = next((place for place in reversed(places) if place.is_file()), None)
    if model is None:
        raise InputError(f"{config}: no {name} beside it, nor in a folder of a version; put it there")
    found = look_at_onnx(model, str(model.resolve().relative_to(folder.resolve())))
    notes = (*found.notes, f"{config.name}: max_batch_size {told.text('max_batch_size') or '0'}")
    found = replace(found, name=model_name(told.text("name") or config.resolve().parent.name), notes=notes)
    return _take_batch(found, told)


def _version(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdigit() else -1


def _take_batch(found: FoundModel, told: ProtoMessage) -> FoundModel:
    """The largest batch that is served becomes the largest of the spec, the preferred one the size to tune for."""
    most = told.text("max_batch_size")
    batch = found.inputs[0].shape[0] if found.inputs and found.inputs[0].shape else None
    if not most.isdigit() or int(most) < 1 or not isinstance(batch, str):
        return found
    batching = next(
        (item for item in told.fields.get("dynamic_batching", ()) if isinstance(item, ProtoMessage)), ProtoMessage()
    )
    preferred = [
        int(text)
        for text in batching.fields.get("preferred_batch_size", ())
        if isinstance(text, str) and text.isdigit()
    ]
    top = int(most)
    dim = FoundDim(1, min(max(preferred, default=1), top), top, f"max_batch_size is {top}")
    return replace(found, dims={**found.dims, batch: dim})


def parse(text: str) -> ProtoMessage:
    """Read protobuf's text format. Raises ValueError, with the line."""
    tokens: list[tuple[str, int]] = []
    place, end = 0, len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if found is None:
            if not re.sub(r"#[^\n]*", "", text[place:]).strip():
                break
            raise ValueError(f"line {text.count(chr(10), 0, place) + 1} cannot be read")
        tokens.append((found[1], text.count("\n", 0, found.start(1)) + 1))
        place = found.end()
    tokens.reverse()
    return _message(tokens, "", 0)


def _message(tokens: list[tuple[str, int]], closing: str, depth: int) -> ProtoMessage:
    if depth > _DEEPEST:
        raise ValueError(f"messages are more than {_DEEPEST} deep")
    found = ProtoMessage()
    while tokens:
        name, line = tokens.pop()
        if name == closing:
            return found
        if name in ",;":
            continue
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"line {line}: {name[:40]!r} is no field's name")
        if tokens and tokens[-1][0] == ":":
            tokens.pop()
        found.fields.setdefault(name, []).extend(_values(tokens, line, depth))
    if closing:
        raise ValueError(f"the text ends before {closing!r}")
    return found


def _values(tokens: list[tuple[str, int]], line: int, depth: int) -> list["str | ProtoMessage"]:
    if not tokens:
        raise ValueError(f"line {line}: a value is missing")
    word, line = tokens.pop()
    if word in _CLOSING:
        return [_message(tokens, _CLOSING[word], depth + 1)]
    if word != "[":
        if word in "}>]:":
            raise ValueError(f"line {line}: a value is missing before {word!r}")
        return [word[1:-1] if word[0] in "\"'" else word]
    values: list[str | ProtoMessage] = []
    while tokens and tokens[-1][0] != "]":
        if tokens[-1][0] == ",":
            tokens.pop()
            continue
        if tokens[-1][0] == "[":
            raise ValueError(f"line {line}: a list in a list")
        values.extend(_values(tokens, line, depth))
    if not tokens:
        raise ValueError(f"line {line}: the list has no end")
    tokens.pop()
    return values
