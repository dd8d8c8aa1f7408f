"""Real or lifelike inputs for graphs of others: pages, photographs, text, files, speech, digits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.images import cut_photographs, draw_lines, draw_pages, draw_seals, draw_tables, turn
from benchmarks.zoo.speech import cut_speech, speech
from enginesmith.arrays import Array
from enginesmith.core.types import Shape, Tensors, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
_TEXT = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split()).lower().encode()
Maker = Callable[[np.random.Generator, Shape], Array]
# Inputs that start at zero.
_ZEROS = ("h", "c", "state", "token_type_ids", "diac_inputs")


def make_inputs(
    graph: Mapping[str, Any], specs: tuple[TensorSpec, ...], sizes: Mapping[str, int], count: int
) -> list[Tensors]:
    """`count` complete inputs of a graph of graphs.yaml at these sizes, equal ones in every process."""
    generator = np.random.default_rng(0)
    if graph["inputs"] == "tokens" and (words := [spec for spec in specs if not spec.dtype.startswith("float")]):
        # What else it takes is no text: a state, or what an encoder gave.
        other_texts = {spec.name: "tokens" if spec in words else "normal" for spec in specs}
        graphs = {name: {**graph, "inputs": kind} for name, kind in other_texts.items()}
    else:
        graphs = {spec.name: dict(graph) for spec in specs}
    return [{spec.name: _make(generator, graphs[spec.name], spec, sizes) for spec in specs} for _ in range(count)]


def _make(
    generator: np.random.Generator, graph: Mapping[str, Any], spec: TensorSpec, sizes: Mapping[str, int]
) -> Array:
    shape, lowered, kind = spec.at(sizes), spec.name.lower(), graph["inputs"]
    if spec.name in graph.get("values", {}):
        return np.full(shape, graph["values"][spec.name], spec.dtype)
    if "mask" in lowered:
        return np.ones(shape, spec.dtype)
    if "len" in lowered and spec.dtype.startswith("int"):
        longest_size = max(sizes.values())
        return generator.integers(longest_size // 2, longest_size + 1, shape).astype(spec.dtype)
    if lowered in _ZEROS:
        return np.zeros(shape, spec.dtype)
    if lowered == "edge_dist":  # lengths, of which graphs take the reciprocal
        return (1 + np.abs(generator.standard_normal(shape))).astype(spec.dtype)
    if lowered == "encoder_hidden_states":
        return (generator.standard_normal(shape) * 0.2).astype(spec.dtype)
    if kind == "normal" and spec.dtype.startswith(("int", "uint", "bool")):
        kind = "tokens"
    values = KINDS[kind](generator, shape)
    if kind in ("page", "seal", "table", "line", "photo", "turned"):
        values = _scale(values, graph.get("scaling", "imagenet"))
    if kind == "tokens":
        max_size, min_size = (graph.get(key, {}).get(spec.name, usual) for key, usual in (("most", 29), ("least", 1)))
        values = values % (max_size - min_size + 1) + min_size
    return values.astype(spec.dtype)


def _scale(pixels: Array, scaling: str) -> Array:
    """Pixels of [n, c, h, w] in 0..255 as a model takes them. scaling: unit, symmetric, imagenet, bytes."""
    unit = pixels / 255.0
    if scaling == "imagenet" and pixels.shape[1] == 3:
        mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        return np.asarray((unit - mean[:, None, None]) / deviation[:, None, None])
    return np.asarray({"bytes": pixels, "symmetric": unit * 2 - 1}.get(scaling, unit))


def _letters(generator: np.random.Generator, shape: Shape) -> Array:
    """The letters of the licence as numbers, in their order."""
    count = int(np.prod(shape))
    text = np.resize(np.frombuffer(_TEXT, "u1"), max(len(_TEXT), 2 * count + 2))
    start = int(generator.integers(0, len(text) - count - 1))
    return text[start : start + count].astype("i8").reshape(shape)


def _bytes(generator: np.random.Generator, shape: Shape) -> Array:
    """Beginnings of files of many kinds: this project's own, and those of the Python that runs this."""
    import matplotlib

    roots = (ROOT / name for name in ("pipeline", "docs", "charts"))
    byte_values: dict[str, list[Path]] = {}
    for place in (*roots, Path(matplotlib.get_data_path()), Path(np.__file__).parent):
        for path in sorted(place.rglob("*")):
            if path.is_file() and path.stat().st_size > shape[-1] and path.suffix != ".pyc":
                byte_values.setdefault(path.suffix, []).append(path)
    kinds = sorted(byte_values)
    chosen = [byte_values[kinds[int(index)]] for index in generator.integers(0, len(kinds), shape[0])]
    files = [paths[int(generator.integers(len(paths)))] for paths in chosen]
    return np.stack([np.frombuffer(file.read_bytes()[: shape[-1]], "u1") for file in files])


def _mel(generator: np.random.Generator, shape: Shape) -> Array:
    """Whisper's features of speech [n, bands, frames]: log10 of the energies, 25 ms at every 10, clipped and scaled."""
    count, bands, frames = shape
    hop, window = 160, np.hanning(400)
    mel_frames = []
    for start in generator.integers(0, len(speech()) - hop * (frames + 3), count):
        parts = np.stack([speech()[start + hop * index :][:400] for index in range(frames)])
        power = np.abs(np.fft.rfft(parts * window)) ** 2
        logs = np.log10(np.maximum(power @ _mel_filters(bands, power.shape[1]), 1e-10))
        mel_frames.append((np.maximum(logs, logs.max() - 8).T + 4) / 4)
    return np.stack(mel_frames)


def _mel_filters(bands: int, bins: int) -> Array:
    """Triangles of equal widths on the mel scale up to 8 kHz [bins, bands]."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), bands + 2) / 2595) - 1)
    places = np.linspace(0, 8000, bins)[:, None]
    rising_places = (places - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - places) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising_places, falling)) * 2 / (edges[2:] - edges[:-2])


def _digits(generator: np.random.Generator, shape: Shape) -> Array:
    """Pixels of scikit-learn's scanned digits that no tree was grown from (`trees`)."""
    from sklearn.datasets import load_digits

    pixels = load_digits().data[1::2]
    return np.asarray(pixels[generator.integers(0, len(pixels), shape[0])])


def _normal(generator: np.random.Generator, shape: Shape) -> Array:
    return np.asarray(generator.standard_normal(shape))


KINDS: Mapping[str, Maker] = {
    "page": draw_pages,
    "seal": draw_seals,
    "table": draw_tables,
    "turned": turn,
    "line": draw_lines,
    "photo": cut_photographs,
    "tokens": _letters,
    "bytes": _bytes,
    "speech": cut_speech,
    "mel": _mel,
    "digits": _digits,
    "normal": _normal,
}
