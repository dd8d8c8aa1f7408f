"""Takes the three models out of a wheel of rapidocr, and draws pictures with text: `python prepare.py WHEEL`.

    pip download --no-deps rapidocr-onnxruntime==1.4.4
    python prepare.py rapidocr_onnxruntime-1.4.4-py3-none-any.whl

Needs onnx, numpy, Pillow and the fonts that matplotlib ships.
"""

import sys
import zipfile
from pathlib import Path

import matplotlib
import numpy as np
import onnx
from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
MODELS = {
    "detector": "ch_PP-OCRv4_det_infer",
    "classifier": "ch_ppocr_mobile_v2.0_cls_infer",
    "recogniser": "ch_PP-OCRv4_rec_infer",
}
SIZE = (160, 480)
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
WORDS = (
    "engine build quantize version channel promote rollback registry kernel latency memory tensor golden sample canary "
    "verdict report target precision calibrate export validate publish download driver profile batch stream"
)


def take_models(wheel: Path) -> None:
    """Write the ONNX files of the wheel, and the recogniser's characters as a Python module."""
    with zipfile.ZipFile(wheel) as archive:
        for name, stem in MODELS.items():
            (HERE / f"{name}.onnx").write_bytes(archive.read(f"rapidocr_onnxruntime/models/{stem}.onnx"))
    metadata = {item.key: item.value for item in onnx.load(HERE / "recogniser.onnx").metadata_props}
    characters = "".join(metadata["character"].splitlines()) + " "
    text = f'"""Characters of the recogniser, in the order of its classes."""\n\nCHARACTERS = {characters!r}\n'
    (HERE / "characters.py").write_text(text)


def draw(rng: np.random.Generator) -> np.ndarray:
    """A picture, uint8 [height, width, 3], with two lines of text, some of them upside down."""
    image = Image.new("RGB", SIZE[::-1], tuple(rng.integers(200, 256, 3).tolist()))
    font = rng.choice(["DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf", "DejaVuSans-Bold.ttf"])
    for row in (20, 90):
        words = " ".join(rng.choice(WORDS.split(), rng.integers(1, 4)))
        line = Image.new("RGB", (440, 44), image.getpixel((0, 0)))
        ink = tuple(rng.integers(0, 90, 3).tolist())
        ImageDraw.Draw(line).text((4, 4), words, ink, ImageFont.truetype(str(FONTS / font), int(rng.integers(22, 30))))
        image.paste(line.rotate(180) if rng.random() < 0.2 else line, (20, row))
    return np.asarray(image)


def main() -> None:
    """Write models, characters and pictures beside this file."""
    take_models(Path(sys.argv[1]))
    rng = np.random.default_rng(0)
    for name, count in (("calibration", 32), ("golden", 12)):
        np.savez(HERE / f"{name}.npz", image=np.stack([draw(rng) for _ in range(count)]))


if __name__ == "__main__":
    main()
