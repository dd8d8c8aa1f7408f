"""Titles what an agent did, with the pulled version: `python write.py "intent: ..."`, after `enginery build`."""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime
from writer import TitleWriter

import enginery


def opens(path):
    """A function that runs an engine's file."""
    options = onnxruntime.SessionOptions()
    described = json.loads(path.with_suffix(".json").read_text())
    for name, value in described.get("session_options_without_vnni", {}).items():
        options.add_session_config_entry(name, value)  # int8 is exact on every CPU with it
    session = onnxruntime.InferenceSession(path, options)
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


def main() -> None:
    """Pull, and print a title for each text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", help="'intent: ... | actions: ... | files: ...', or a sentence")
    parser.add_argument("--registry", default="registry")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        pulled = enginery.pull("title:candidate", registry=asked.registry, target="cpu", precision="int8", dest=folder)
        graphs = enginery.Ensemble.described(opens, pulled.description).graphs
        writer = TitleWriter(
            lambda inputs: graphs["encoder"].run(inputs)["last_hidden_state"],
            lambda inputs: graphs["decoder"].run(inputs)["logits"],
            Path(__file__).parent / "tokenizer.json",
        )
        for text in asked.texts:
            print(writer.write(text))


if __name__ == "__main__":
    main()
