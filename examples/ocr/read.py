"""Reads the text of a picture with the pulled version: `python read.py picture.png`, after `enginery build`."""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
from PIL import Image

import enginery

SIZE = 480, 160


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
    """Pull, and print the lines of each picture with their boxes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="+", type=Path)
    parser.add_argument("--registry", default="registry")
    parser.add_argument("--precision", default="int8")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        pulled = enginery.pull(
            "ocr:candidate", registry=asked.registry, target="cpu", precision=asked.precision, dest=folder
        )
        # The functions are this folder's ocr.py, as it was published.
        whole = enginery.Ensemble.described(opens, pulled.description, functions=enginery.load_function)
        for picture in asked.pictures:
            image = np.asarray(Image.open(picture).convert("RGB").resize(SIZE))
            found = whole.run({"image": image})
            for box, text in zip(found["lines.boxes"], found["text.text"], strict=True):
                print(f"{picture.name} {box.tolist()}: {''.join(map(chr, text[text > 0]))}")


if __name__ == "__main__":
    main()
