"""Real or lifelike inputs for graphs of others: rendered pages and lines, photographs, text, files, voiced sounds.

Each function takes the inputs of a model at given sizes and gives `count` complete inputs, equal ones for equal seeds.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from enginery.arrays import Array
from enginery.core.types import Shape, Tensors, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
_WORDS = (ROOT / "README.md").read_text(encoding="utf-8").split()
_RATE = 16_000
Maker = Callable[[np.random.Generator, Shape], Array]


def make_inputs(
    kind: str,
    scaling: str,
    specs: tuple[TensorSpec, ...],
    sizes: Mapping[str, int],
    values: Mapping[str, int],
    count: int,
) -> list[Tensors]:
    """Inputs of a kind of KINDS. scaling: of pixels: unit, symmetric, imagenet, bytes.  values: of inputs by name."""
    generator = np.random.default_rng(0)
    return [{spec.name: _make(generator, kind, scaling, spec, sizes, values) for spec in specs} for _ in range(count)]


def _make(
    generator: np.random.Generator,
    kind: str,
    scaling: str,
    spec: TensorSpec,
    sizes: Mapping[str, int],
    values: Mapping[str, int],
) -> Array:
    shape = spec.at(sizes)
    if spec.name in values:
        return np.full(shape, values[spec.name], spec.dtype)
    lowered = spec.name.lower()
    if "mask" in lowered:
        return np.ones(shape, spec.dtype)
    if "len" in lowered and spec.dtype.startswith("int"):
        return np.full(shape, max(sizes.values()), spec.dtype)
    if lowered in ("h", "c", "state", "token_type_ids", "roles", "diac_inputs"):
        return np.zeros(shape, spec.dtype)
    if lowered == "encoder_hidden_states":
        return (generator.standard_normal(shape) * 0.2).astype(spec.dtype)
    if kind in ("page", "line", "photo", "turned"):
        return _scale(KINDS[kind](generator, shape), scaling).astype(spec.dtype)
    return KINDS[kind](generator, shape).astype(spec.dtype)


def _scale(pixels: Array, scaling: str) -> Array:
    """Pixels of [n, c, h, w] in 0..255."""
    unit = pixels / 255.0
    if scaling == "imagenet" and pixels.shape[1] == 3:
        mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        return np.asarray((unit - mean[:, None, None]) / deviation[:, None, None])
    return np.asarray({"bytes": pixels, "symmetric": unit * 2 - 1}.get(scaling, unit))


def _page(generator: np.random.Generator, shape: Shape) -> Array:
    return np.stack([_draw(generator, shape[1:], int(generator.integers(3, 9))) for _ in range(shape[0])])


def _turned(generator: np.random.Generator, shape: Shape) -> Array:
    """Pages, or lines where they are flat, by a quarter or half a turn."""
    flat = shape[-1] > 2 * shape[-2]
    pages = _line(generator, shape) if flat else _page(generator, shape)
    turns = generator.integers(0, 2, shape[0]) * 2 if flat else generator.integers(0, 4, shape[0])
    return np.stack([np.rot90(page, int(turn), (1, 2)) for page, turn in zip(pages, turns, strict=True)])


def _line(generator: np.random.Generator, shape: Shape) -> Array:
    return np.stack([_draw(generator, shape[1:], 1) for _ in range(shape[0])])


def _draw(generator: np.random.Generator, shape: Shape, words: int) -> Array:
    """Words of the README on a light ground: [c, h, w] in 0..255."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    channels, height, width = shape
    ground, ink = generator.integers(190, 256, 3), generator.integers(0, 90, 3)
    image = Image.new("RGB", (width, height), tuple(map(int, ground)))
    draw = ImageDraw.Draw(image)
    face = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    for index in range(words):
        size = int(height * 0.7) if words == 1 else int(generator.integers(11, max(12, height // 6)))
        top = 2 if words == 1 else int(height * index / words)
        place = (int(generator.integers(0, max(1, width // 3))), top)
        draw.text(place, str(generator.choice(_WORDS)), tuple(map(int, ink)), ImageFont.truetype(str(face), size))
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), "f4")
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _photo(generator: np.random.Generator, shape: Shape) -> Array:
    """Pieces of scikit-learn's two photographs, at another size."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    count, _, height, width = shape
    found = []
    for _ in range(count):
        whole = load_sample_images().images[int(generator.integers(2))]
        side = int(generator.integers(200, 420))
        top, left = (int(generator.integers(0, limit - side)) for limit in whole.shape[:2])
        piece = Image.fromarray(whole[top : top + side, left : left + side]).resize((width, height))
        found.append(np.asarray(piece, "f4").transpose(2, 0, 1))
    return np.stack(found)


def _tokens(generator: np.random.Generator, shape: Shape) -> Array:
    """Small token numbers as letters have them, in the order of the README's text."""
    text = " ".join(_WORDS).lower().encode()
    start = int(generator.integers(0, len(text) - int(np.prod(shape)) - 1))
    numbers = np.frombuffer(text, "u1", int(np.prod(shape)), start).astype("i8")
    return (numbers % 29 + 1).reshape(shape)


def _bytes(generator: np.random.Generator, shape: Shape) -> Array:
    """Beginnings of files of many kinds: this project's own, and those of the Python that runs this."""
    import matplotlib

    places = (
        ROOT / "pipeline",
        ROOT / "docs",
        ROOT / "charts",
        Path(matplotlib.get_data_path()),
        Path(np.__file__).parent,
    )
    known: dict[str, list[Path]] = {}
    for path in (path for place in places for path in sorted(place.rglob("*"))):
        if path.is_file() and path.stat().st_size > shape[-1] and path.suffix != ".pyc":
            known.setdefault(path.suffix, []).append(path)
    kinds = sorted(known)
    chosen = [known[kinds[int(index)]] for index in generator.integers(0, len(kinds), shape[0])]
    files = [paths[int(generator.integers(len(paths)))] for paths in chosen]
    return np.stack([np.frombuffer(file.read_bytes()[: shape[-1]], "u1") for file in files])


def _speech(generator: np.random.Generator, shape: Shape) -> Array:
    """Voiced sounds and pauses: a pulse train of 90 to 250 Hz through three formants (Peterson and Barney, 1952)."""
    samples = shape[-1]
    found = []
    for _ in range(int(np.prod(shape[:-1]))):
        time = np.arange(samples) / _RATE
        pitch = generator.uniform(90, 250) * (1 + 0.05 * np.sin(2 * np.pi * 5 * time))
        phase = np.cumsum(pitch) / _RATE
        source = sum(np.sin(2 * np.pi * order * phase) / order for order in range(1, 20))
        spectrum, places = np.fft.rfft(source), np.fft.rfftfreq(samples, 1 / _RATE)
        formants = generator.uniform((300, 900, 2200), (800, 1800, 3000))
        gain = sum(np.exp(-(((places - centre) / 120) ** 2)) for centre in formants)
        voice = np.fft.irfft(spectrum * (gain + 0.02), samples)
        voice *= 0.3 / max(np.abs(voice).max(), 1e-9) * (generator.random() > 0.2)
        found.append(voice + 0.003 * generator.standard_normal(samples))
    return np.stack(found).reshape(shape)


def _mel(generator: np.random.Generator, shape: Shape) -> Array:
    """Log energies of bands in time, smooth along both, between -1 and 1 as Whisper's features are."""
    rough = generator.standard_normal(shape)
    for axis in (-1, -2):
        rough = (rough + np.roll(rough, 1, axis) + np.roll(rough, -1, axis)) / 3
    return np.clip(rough, -1, 1)


KINDS: Mapping[str, Maker] = {
    "page": _page,
    "turned": _turned,
    "line": _line,
    "photo": _photo,
    "tokens": _tokens,
    "bytes": _bytes,
    "speech": _speech,
    "mel": _mel,
}
