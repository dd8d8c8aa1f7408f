"""Reads the text of a picture with the pulled version: `python read.py picture.png`, after `enginesmith build`."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

import enginesmith
from enginesmith.user_code import load_function

SIZE = 480, 160


def main() -> None:
    """Pull, and print the lines of each picture with their boxes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="+", type=Path)
    parser.add_argument("--registry", default="registry")
    parser.add_argument("--precision", default="int8")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        engine = enginesmith.pull(
            "ocr:candidate", registry=options.registry, target="cpu", precision=options.precision, dest=folder
        )
        # The functions are this folder's ocr.py, as it was published.
        description = enginesmith.Ensemble.described(enginesmith.open_onnx, engine.description, functions=load_function)
        for picture in options.pictures:
            image = np.asarray(Image.open(picture).convert("RGB").resize(SIZE))
            outputs = description.run({"image": image})
            for box, text in zip(outputs["lines.boxes"], outputs["text.text"], strict=True):
                print(f"{picture.name} {box.tolist()}: {''.join(map(chr, text[text > 0]))}")


if __name__ == "__main__":
    main()
