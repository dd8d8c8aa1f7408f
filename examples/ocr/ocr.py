"""The functions between the three graphs: they prepare a picture, cut out and turn its lines, and spell the text.

The constants are those that the models were trained with (PaddleOCR, ppocr/data/imaug and ppocr/postprocess).
"""

import numpy as np
from characters import CHARACTERS

# Of the detector's input, per channel; for the other inputs, all are 0.5.
MEAN, SPREAD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
# The detector marks the core of a line: the threshold of a mark, and the line's margin around it, in core heights.
MARKED, GROWN = 0.3, 0.45
LEAST_HEIGHT = 4
HEIGHT, WIDTH, SMALL = 48, 480, 192
SURE = 0.9


def prepare(image):
    """A picture, uint8 [height, width, 3], as the detector's input: float32 [1, 3, height, width]."""
    scaled_image = (image.astype(np.float32) / 255 - MEAN) / SPREAD
    return {"x": scaled_image.transpose(2, 0, 1)[None]}


def crop(image, marks):
    """The lines of text that the detector's map [1, 1, height, width] marks in a picture: pictures of one size for the
    classifier and one for the recogniser, and boxes (top, left, bottom, right)."""
    boxes = np.array(list(_lines(marks[0, 0] > MARKED)), np.int64).reshape(-1, 4)
    parts = [image[top:bottom, left_edge:right_edge] for top, left_edge, bottom, right_edge in boxes]
    return {"x": _fit(parts, WIDTH), "small": _fit(parts, SMALL), "boxes": boxes}


def turn(x, upside_down):
    """The lines, turned where the classifier is sure that they are upside down."""
    turned_boxes = x.copy()
    for row in np.flatnonzero(upside_down[:, 1] > SURE):
        width = np.flatnonzero(x[row].any((0, 1)))[-1] + 1  # then padding begins
        turned_boxes[row, :, :, :width] = x[row, :, ::-1, :width][:, :, ::-1]
    return {"x": turned_boxes}


def spell(likelihoods):
    """Unicode code points [lines, places] of the likeliest characters, 0 after the end. Repeated ones and blanks are
    left out (connectionist temporal classification: Graves et al., 2006)."""
    best_indices = likelihoods.argmax(-1)
    text = np.zeros(best_indices.shape, np.int64)
    for row, line in zip(text, best_indices, strict=True):
        places = [place for index, place in enumerate(line) if place and (index == 0 or place != line[index - 1])]
        row[: len(places)] = [ord(CHARACTERS[place - 1]) for place in places]
    return {"text": text}


def _lines(marked):
    """Boxes of marked parts, from top to bottom: bands of rows with marks, each divided at its wide gaps."""
    for top, bottom in _runs(marked.any(1), 1):
        height = bottom - top
        if height < LEAST_HEIGHT:
            continue
        margin = round(GROWN * height)
        for left_edge, right_edge in _runs(marked[top:bottom].any(0), 3 * height):
            yield (
                max(0, top - margin),
                max(0, left_edge - margin),
                min(marked.shape[0], bottom + margin),
                min(marked.shape[1], right_edge + margin),
            )


def _fit(parts, most):
    """Pictures as float32 [pictures, 3, HEIGHT, most], -1 to 1; narrower ones are padded with zeros."""
    batch = np.zeros((len(parts), 3, HEIGHT, most), np.float32)
    for line, part in zip(batch, parts, strict=True):
        width = min(most, max(1, round(HEIGHT * part.shape[1] / part.shape[0])))
        line[:, :, :width] = _resize(part, HEIGHT, width).transpose(2, 0, 1) / 127.5 - 1
    return batch


def _runs(marks, gap):
    """(begin, end) of runs of true values; runs with less than `gap` between them are joined."""
    runs_found = []
    for position in np.flatnonzero(marks):
        if runs_found and position - runs_found[-1][1] < gap:
            runs_found[-1][1] = position + 1
        else:
            runs_found.append([position, position + 1])
    return runs_found


def _resize(part, height, width):
    """A picture in another size, by linear interpolation between the centres of its pixels."""
    for axis, size in ((0, height), (1, width)):
        places = (np.arange(size) + 0.5) * part.shape[axis] / size - 0.5
        places = np.clip(places, 0, part.shape[axis] - 1)
        low = np.floor(places).astype(int)
        high = np.minimum(low + 1, part.shape[axis] - 1)
        share = (places - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        part = np.take(part, low, axis) * (1 - share) + np.take(part, high, axis) * share
    return part
