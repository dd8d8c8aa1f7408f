"""What the engine inspector tells of an engine's layers: names, types, formats, tactics. Never run on a GPU.

The inspector wants a loaded engine, hence the GPU, and room on it beside what the builder still holds. An engine is
none the worse for not being inspected, so every failure ends in a reason and not in an error.
"""

import json
from collections.abc import Callable
from pathlib import Path

from builders.backends.tensorrt.words import clean
from enginery.core.untyped import Untyped

MAX_BYTES = 64 << 20


def kept_layers(
    trt: Untyped, said: Untyped, engine: Path, prepare: Callable[[Untyped], None]
) -> tuple[Path | None, str]:
    """The inspector's JSON in a file beside the engine, or the reason why there is none."""
    before = len(said.messages)
    runtime = trt.Runtime(said)
    prepare(runtime)
    runtime.engine_host_code_allowed = True  # it was built in this process
    loaded = runtime.deserialize_cuda_engine(engine.read_bytes())
    inspector = loaded and loaded.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON) if inspector else ""
    heard = [clean(words) for level, words in said.messages[before:] if "ERROR" in level]
    del said.messages[before:]
    if not text:
        return None, "; ".join(dict.fromkeys(heard)) or "TensorRT tells nothing"
    return _write_layers(text, engine)


def _write_layers(text: str, engine: Path) -> tuple[Path | None, str]:
    if len(text) > MAX_BYTES:
        return None, f"it takes {len(text)} bytes; the limit is {MAX_BYTES}"
    try:
        document = json.loads(text)
    except ValueError as error:
        return None, f"TensorRT's JSON cannot be read: {error}"
    path = engine.with_name("layers.json")
    path.write_text(json.dumps(document, sort_keys=True))
    return path, ""
