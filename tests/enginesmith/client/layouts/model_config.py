"""Triton's own description of `config.pbtxt`: the protobuf message that tritonclient brings, compiled."""

import importlib.util
from importlib.metadata import files
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format


def read_config(path: Path) -> dict[str, Any]:
    """A configuration as protobuf's own parser reads it, by the fields' names; raises ParseError for any other text.

    The module is loaded by its path: the package around it wants grpcio.
    """
    place = next(file.locate() for file in files("tritonclient") or () if file.name == "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", str(place))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    message = text_format.Parse(path.read_text(), module.ModelConfig())
    return json_format.MessageToDict(message, preserving_proto_field_name=True)
