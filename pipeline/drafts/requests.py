"""Calibration and golden data out of requests that were saved."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from enginesmith.arrays import check_inputs, describe_nonfinite
from enginesmith.core.errors import DataError
from enginesmith.core.text import pluralize
from enginesmith.core.types import Dim, Tensors, TensorSpec
from pipeline.drafts.found import is_batch
from pipeline.drafts.request_files import Scaling, read_requests
from validation.data.batches import leading_dim

# How many of them become golden data: enough that a decision that changes in 1 of 20 shows; and calibration data:
# ranges change little beyond some hundreds of samples (docs/concepts/calibration.md).
MOST_GOLDEN, MOST_CALIBRATION, SHARE = 64, 512, 0.2
# More are not read: of traffic some hundreds suffice, and a small archive can hold any number of zeros.
MOST_READ = 100_000
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class SplitRequests:
    """Requests for calibration and for golden data; none is in both. left_out: why some are in neither, for people.

    sizes: of each named dim, in all of them.
    """

    calibration: tuple[Tensors, ...]
    golden: tuple[Tensors, ...]
    left_out: tuple[str, ...]
    sizes: Mapping[str, int]


def split_requests(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> SplitRequests:
    """Read requests and part them: a fifth, and `MOST_GOLDEN` at most, for golden data, the rest for calibration.

    Which request goes where follows from its content, so that equal requests, of which one is kept, and the order of
    the file change nothing. A request for a batch counts as one for each sample. All that are kept have the sizes that
    most have. scaling: of images, see `read_requests`. Raises DataError for what cannot be read or does not fit the
    inputs, for NaN and infinities, and for fewer than two different requests.
    """
    some: dict[_Shapes, dict[str, Tensors]] = {}
    seen, counts, count = set[str](), Counter[_Shapes](), 0
    samples = read_samples(path, inputs, dims, scaling)
    for request in itertools.islice(samples, MOST_READ):
        digest, count = _digest(request), count + 1
        if digest not in seen:
            seen.add(digest)
            shapes = _shapes(request)
            counts[shapes] += 1
            _keep(some.setdefault(shapes, {}), digest, request)
    if not count:
        raise DataError(f"{path} holds no requests; give at least two")
    usual, most = counts.most_common(1)[0]
    if most < 2:
        held = f"{pluralize(count, 'request')}, {most} of equal sizes that differ"
        raise DataError(f"{path} holds {held}; two are the least: give a list or a folder of them")
    kept = [request for _, request in sorted(some[usual].items(), key=lambda item: item[0])]
    golden = max(1, min(MOST_GOLDEN, int(most * SHARE)))
    rest = kept[golden : golden + MOST_CALIBRATION]
    left = [
        (count - len(seen), "equal to others"),
        (len(seen) - most, f"of other sizes than {_format(usual)}"),
        (most - golden - len(rest), f"beyond {MOST_CALIBRATION} for calibration"),
    ]
    notes = [f"{pluralize(number, 'request')} left out: {why}" for number, why in left if number]
    if count == MOST_READ and next(samples, None) is not None:
        notes.append(f"only the first {MOST_READ} requests were read")
    return SplitRequests(tuple(rest), tuple(kept[:golden]), tuple(notes), check_inputs(inputs, kept[0]))


def _keep(some: dict[str, Tensors], digest: str, request: Tensors) -> None:
    """In place: add a request, and now and then drop those whose digests are too great to be chosen."""
    some[digest] = request
    if len(some) > 2 * (MOST_GOLDEN + MOST_CALIBRATION):
        for other in sorted(some)[MOST_GOLDEN + MOST_CALIBRATION :]:
            del some[other]


def read_samples(path: Path, inputs: Sequence[TensorSpec], dims: Sequence[Dim], scaling: Scaling) -> Iterator[Tensors]:
    """The requests, each checked; one for a batch as one for each of its samples. Raises DataError with its number."""
    batch = leading_dim(inputs)
    single = any(dim.name == batch and dim.min == dim.multiple == 1 for dim in dims) and is_batch(batch or "")
    single = single and not any(batch in spec.shape[1:] for spec in inputs)
    for number, request in enumerate(read_requests(path, inputs, dims, scaling)):
        where = f"{path}: request {number}"
        try:
            sizes = check_inputs(inputs, request)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        for name, array in request.items():
            if array.dtype.kind == "f" and (held := describe_nonfinite(array)):
                raise DataError(f"{where}: input {name!r} holds {held}; remove or repair that request")
        if not single or batch is None:
            yield request
            continue
        for row in range(sizes[batch]):
            yield {name: array[row : row + 1] for name, array in request.items()}


def write_samples(file: Path | IO[bytes], requests: Sequence[Tensors]) -> None:
    """Write requests of equal sizes as an .npz that a spec can name: one complete input per entry of axis 0."""
    arrays: dict[str, Any] = {name: np.stack([request[name] for request in requests]) for name in requests[0]}
    np.savez_compressed(file, **arrays)


def _digest(request: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(request):
        digest.update(f"{name} {request[name].dtype} {request[name].shape}".encode())
        digest.update(np.ascontiguousarray(request[name]).tobytes())
    return digest.hexdigest()


def _shapes(request: Tensors) -> _Shapes:
    return tuple((name, array.shape) for name, array in sorted(request.items()))


def _format(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes)
