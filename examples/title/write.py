"""Titles what an agent did, with the pulled version: `python write.py "intent: ..."`, after `enginesmith build`."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from writer import TitleWriter

import enginesmith


def main() -> None:
    """Pull, and print a title for each text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", help="'intent: ... | actions: ... | files: ...', or a sentence")
    parser.add_argument("--registry", default="registry")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        pulled_engine = enginesmith.pull(
            "title:candidate", registry=options.registry, target="cpu", precision="int8", dest=folder
        )
        graphs = enginesmith.Ensemble.described(enginesmith.open_onnx, pulled_engine.description).graphs
        writer = TitleWriter(
            lambda inputs: graphs["encoder"].run(inputs)["last_hidden_state"],
            lambda inputs: graphs["decoder"].run(inputs)["logits"],
            Path(__file__).parent / "tokenizer.json",
        )
        for text in options.texts:
            print(writer.write(text))


if __name__ == "__main__":
    main()
