"""Pictures [n, c, h, w] in 0..255: rendered words, scanned pages, photographs of scikit-learn and scikit-image."""

from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.zoo.packages import read_image
from enginesmith.arrays import Array
from enginesmith.core.types import Shape

_WORDS = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8").split()
_PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "motorcycle_left.png",
    "hubble_deep_field.jpg",
)
_SCANS = ("page.png", "text.png")
# The share of pages that are scans; the rest is drawn.
_SCANNED = 0.25


def draw_pages(generator: np.random.Generator, shape: Shape) -> Array:
    """Pages of a few words, and pieces of scans."""
    return np.stack([_page(generator, shape[1:]) for _ in range(shape[0])])


def draw_seals(generator: np.random.Generator, shape: Shape) -> Array:
    """Pages with a round red seal, letters along its inside; blue is the first plane, as OpenCV reads pictures."""
    return np.stack([_seal(generator, _page(generator, shape[1:]))[::-1] for _ in range(shape[0])])


def draw_tables(generator: np.random.Generator, shape: Shape) -> Array:
    """Tables with ruled cells and a word in each."""
    return np.stack([_table(generator, shape[1:]) for _ in range(shape[0])])


def draw_lines(generator: np.random.Generator, shape: Shape) -> Array:
    """Lines of one word."""
    return np.stack([_draw(generator, shape[1:], 1) for _ in range(shape[0])])


def turn(generator: np.random.Generator, shape: Shape) -> Array:
    """Pages by quarter turns; lines, where the shape is flat, by half turns."""
    is_flat = shape[-1] > 2 * shape[-2]
    pages = (draw_lines if is_flat else draw_pages)(generator, shape)
    turns = generator.integers(0, 2, shape[0]) * 2 if is_flat else generator.integers(0, 4, shape[0])
    return np.stack([np.rot90(page, int(turn), (1, 2)) for page, turn in zip(pages, turns, strict=True)])


def cut_photographs(generator: np.random.Generator, shape: Shape) -> Array:
    """Pieces of photographs, at another size."""
    return np.stack([_cut(generator, _photographs(), shape[1:]) for _ in range(shape[0])])


@cache
def _photographs() -> tuple[Array, ...]:
    from sklearn.datasets import load_sample_images

    return (
        *load_sample_images().images,
        *(read_image("scikit-image", f"skimage/data/{name}") for name in _PHOTOGRAPHS),
    )


@cache
def _scans() -> tuple[Array, ...]:
    return tuple(read_image("scikit-image", f"skimage/data/{name}") for name in _SCANS)


def _cut(generator: np.random.Generator, pictures: tuple[Array, ...], shape: Shape) -> Array:
    """A square piece of one of the pictures, resized to `shape` [c, h, w]."""
    from PIL import Image

    whole_picture = pictures[int(generator.integers(len(pictures)))]
    min_side = min(whole_picture.shape[:2])
    side = int(generator.integers(min_side // 2, min_side))
    top, left_number = (int(generator.integers(0, size - side)) for size in whole_picture.shape[:2])
    piece = Image.fromarray(whole_picture[top : top + side, left_number : left_number + side])
    return _planes(piece.resize((shape[2], shape[1])), shape[0])


def _page(generator: np.random.Generator, shape: Shape) -> Array:
    if generator.random() < _SCANNED:
        return _cut(generator, _scans(), shape)
    return _draw(generator, shape, int(generator.integers(3, 9)))


def _seal(generator: np.random.Generator, page: Array) -> Array:
    """A page [c, h, w] with a seal on it."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(page.transpose(1, 2, 0).astype("u1"))
    side = min(image.size)
    radius = int(generator.integers(side // 4, side // 3))
    x, y = (int(generator.integers(radius + 2, size - radius - 2)) for size in image.size)
    red = (int(generator.integers(180, 240)), 30, 40)
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), outline=red, width=3)
    letters = str(generator.choice([word for word in _WORDS if len(word) > 5]))[:12].upper()
    for letter, angle in zip(letters, np.linspace(-120, 120, len(letters)), strict=True):
        tile = Image.new("L", (24, 24))
        ImageDraw.Draw(tile).text((12, 12), letter, 255, _font(max(11, radius // 3)), anchor="mm")
        turned_tensor, remote_radius = tile.rotate(-angle), radius * 0.75
        place = (x + remote_radius * np.sin(np.radians(angle)) - 12, y - remote_radius * np.cos(np.radians(angle)) - 12)
        image.paste(red, tuple(map(int, place)), turned_tensor)
    return _planes(image, len(page))


def _table(generator: np.random.Generator, shape: Shape) -> Array:
    """A table of two to four columns: [c, h, w]."""
    from PIL import Image, ImageDraw

    channels, height, width = shape
    rows, columns = int(generator.integers(2, 6)), int(generator.integers(2, 5))
    image = Image.new("RGB", (width, height), "white")
    draw, wide_width, high = ImageDraw.Draw(image), (width - 9) // columns, (height - 9) // rows
    for index in range(rows * columns):
        x, y = 4 + index % columns * wide_width, 4 + index // columns * high
        draw.rectangle((x, y, x + wide_width, y + high), outline=(40, 40, 40))
        draw.text((x + 4, y + high // 2), str(generator.choice(_WORDS))[: wide_width // 9], 0, _font(11), anchor="lm")
    return _planes(image, channels)


def _font(size: int) -> "ImageFont.FreeTypeFont":  # noqa: F821
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def _draw(generator: np.random.Generator, shape: Shape, words: int) -> Array:
    """Words of the licence, which no commit changes, on a light ground: [c, h, w]."""
    from PIL import Image, ImageDraw

    channels, height, width = shape
    ground, ink = generator.integers(190, 256, 3), generator.integers(0, 90, 3)
    image = Image.new("RGB", (width, height), tuple(map(int, ground)))
    draw = ImageDraw.Draw(image)
    for index in range(words):
        size = int(height * 0.7) if words == 1 else int(generator.integers(11, max(12, height // 6)))
        top = 2 if words == 1 else int(height * index / words)
        place = (int(generator.integers(0, max(1, width // 3))), top)
        draw.text(place, str(generator.choice(_WORDS)), tuple(map(int, ink)), _font(size))
    return _planes(image, channels)


def _planes(image: "Image.Image", channels: int) -> Array:  # noqa: F821
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), "f4")
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
