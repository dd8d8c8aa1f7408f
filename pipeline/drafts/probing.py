"""The sizes at which a graph runs, found by running it."""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx

from builders.onnx_graphs.bodies import copied
from builders.onnx_graphs.outline import lacks_lists
from builders.onnx_graphs.structure import find_tables
from builders.onnx_graphs.weights import embed, has_external, is_external, size_of
from builders.reference import open_interpreter, run_within, words_of
from enginesmith.arrays import check_inputs
from enginesmith.core.errors import DataError, ModelError
from enginesmith.core.types import PLUS, Dim, Tensors, TensorSpec, rename_dims
from pipeline.drafts.facts import LARGEST_BATCH, LARGEST_SIZE, FoundDim, FoundModel, is_batch
from pipeline.sources.request import MOST_EMBEDDED_BYTES
from validation.data.samples import resize
from validation.golden.golden_set import edge_sizes

# Sizes to try for a dim other than the batch, the likeliest first: multiples of 32 suit networks that halve five
# times; 512 and 576 are windows of audio.
_SIZES = (64, 128, 32, 256, 16, 224, 320, 512, 576, 640, 1024, 48, 28, 96, 160, 192, 299, 384, 10, 8, 4, 3, 2)
# Batches to try if 1 does not run: groups of frames or views along axis 0.
_BATCHES = (2, 4, 8, 16, 3, 32)
_STEPS = (1, 2, 4, 8, 16, 32, 64)
_SECONDS = 20
# The time limit of one run: without a limit, an endless loop could not be interrupted.
RUN_SECONDS = 40
# The number of requests that are tried at other sizes.
_SAMPLES = 8
# The limit for all inputs together; a video of 16 frames at 1024x1024 has 50 million elements.
_MOST_ELEMENTS = 1 << 26


# Runs a model once on inputs, and raises any exception if it fails.
Run = Callable[[Tensors], object]


def open_graph(model: onnx.ModelProto, path: Path, title: str, constants: Tensors = MappingProxyType({})) -> Run:
    """A function that runs an ONNX graph; it limits indices to the sizes of tables. A graph whose weights or lists are
    in files is opened as its source file. constants: inputs of that file that the graph does not have.

    Raises ModelError if the graph does not load.
    """
    is_file = has_external(model) or lacks_lists(model)
    try:
        session = open_interpreter(path if is_file else model.SerializeToString(), title)
    except ModelError:
        if not has_external(model) or size_of(model) > MOST_EMBEDDED_BYTES:
            raise
        # onnxruntime does not read the file's IR version, and the graph has an older one.
        is_file, whole_model = False, copied(model)
        for tensor in filter(is_external, whole_model.graph.initializer):
            embed(tensor)
        session = open_interpreter(whole_model.SerializeToString(), title)
    tables, fixed_inputs = find_tables(model.graph), constants if is_file else {}

    def run(inputs: Tensors) -> object:
        indices = {name: np.minimum(inputs[name], tables[name] - 1) for name in inputs.keys() & tables.keys()}
        return run_within(session, {**inputs, **indices, **fixed_inputs}, RUN_SECONDS)

    return run


def find_dims(
    facts: FoundModel,
    open_model: Callable[[], Run],
    known_sizes: Mapping[str, int] = MappingProxyType({}),
    likely_sizes: Sequence[int] = (),
) -> FoundModel:
    """The model with the sizes that its dims may have, and with one name for dims that must be equal.

    open_model: returns a function that runs the model, or raises ModelError.  known_sizes: tried first.  likely_sizes:
    of any dim; tried in addition to the usual ones. If the graph does not load, or runs at no tried size, sizes are
    guessed and the reason says so.
    """
    shapes = (spec.shape for spec in facts.inputs)
    names = list(dict.fromkeys(dim for dim in chain(*shapes) if isinstance(dim, str) and PLUS not in dim))
    if not names:
        return facts
    try:
        probe = _Probe(open_model(), facts.inputs)
    except ModelError as error:
        return _guess_all(facts, names, f"not tried: {str(error)[:160]}")
    sizes = probe.find_running(names, known_sizes, likely_sizes)
    if sizes is None:
        reason = f"a guess: the graph ran at no size that was tried ({probe.last_error})"
        return _guess_all(facts, names, reason)
    twin_names = probe.find_equal(names, sizes)
    inputs = tuple(
        replace(spec, shape=tuple(rename_dims(dim, twin_names) if isinstance(dim, str) else dim for dim in spec.shape))
        for spec in facts.inputs
    )
    probe.inputs = inputs
    dims = {name: probe.bounds(name, sizes) for name in names if name not in twin_names}
    return replace(facts, inputs=inputs, dims=_hold_edges(probe, inputs, _fit_memory(dims, inputs), sizes))


def hold_samples(
    facts: FoundModel, run: Run, samples: Sequence[Tensors], ranges: Mapping[str, tuple[int, int]]
) -> FoundModel:
    """The model with dims narrowed to the sizes of requests if it fails on requests cut or repeated to other sizes.

    A build cuts and repeats golden data to such sizes, and an index in a request may point at a part that was cut off.
    Batch dims do not change. No dim changes if the model fails on the requests themselves, or after `_SECONDS`.

    samples: requests of equal sizes.  ranges: by dim, the least and the greatest size of all requests.
    """
    usual_sizes, probe = check_inputs(facts.inputs, samples[0]), _Probe(run, facts.inputs)

    def runs(sizes: Mapping[str, int]) -> bool:
        for sample in samples[:_SAMPLES]:
            try:
                inputs = resize(sample, facts.inputs, {**usual_sizes, **sizes})
            except DataError as error:
                probe.last_error = str(error)
                return False
            if not probe.is_over and not probe.ends(partial(run, inputs)):
                return False
        return True

    if not runs({}):
        return facts
    dims = dict(facts.dims)
    for name, dim in facts.dims.items():
        low, high = (
            size if is_batch(name) or runs({name: size}) else bound
            for size, bound in zip((dim.min, dim.max), ranges[name], strict=True)
        )
        if failed_sizes := {dim.min, dim.max} - {low, high}:
            reason = f"{dim.why}; requests cut or repeated to {max(failed_sizes)} fail: {probe.last_error}"
            dims[name] = replace(dim, min=low, max=high, why=reason)
    return replace(facts, dims=dims)


def _hold_edges(
    probe: "_Probe", inputs: Sequence[TensorSpec], dims: Mapping[str, FoundDim], sizes: Mapping[str, int]
) -> dict[str, FoundDim]:
    """The dims, narrowed towards `sizes` until the graph runs at every edge that a build tries. Each bound was found
    with the other dims at `sizes`."""
    narrow_dims = dict(dims)
    while True:
        spec_dims = [Dim(name, dim.min, dim.opt, dim.max, multiple=dim.multiple) for name, dim in narrow_dims.items()]
        edge = next((edge for edge in edge_sizes(inputs, spec_dims) if not probe.runs(edge)), {})
        names = sorted(edge, key=lambda name: edge[name] > sizes[name])
        name = next((name for name in names if probe.runs({**edge, name: sizes[name]})), None)
        if name is None or probe.is_over:  # no edge fails, no single dim helps, or the time is over
            return narrow_dims
        dim, usual_size = narrow_dims[name], sizes[name]
        low, high = dim.min, dim.max
        if edge[name] < usual_size:
            trial_sizes = (edge[name] << power for power in range(1, 20))
            low = min(
                usual_size, next(size for size in trial_sizes if size >= usual_size or probe.runs({**edge, name: size}))
            )
        else:
            high = usual_size
        reason = f"the graph ran at {low} and {high} with all sizes of the other dims"
        narrow_dims[name] = replace(dim, min=low, opt=min(max(dim.opt, low), high), max=high, why=reason)


def _fit_memory(dims: Mapping[str, FoundDim], inputs: Sequence[TensorSpec]) -> dict[str, FoundDim]:
    """The dims; the widest are halved until the inputs with every dim at `max` have at most `_MOST_ELEMENTS`. Each size
    was tried with small other dims."""
    bounded_dims = dict(dims)
    while _count_elements(inputs, {name: dim.max for name, dim in bounded_dims.items()}) > _MOST_ELEMENTS:
        name, dim = max(bounded_dims.items(), key=lambda named_dim: named_dim[1].max // named_dim[1].min)
        half_size = max(dim.min, dim.max // 2 // dim.multiple * dim.multiple)
        if half_size == dim.max:
            break
        reason = f"{dim.why.partition(';')[0]}; more would be too large with the other dims"
        bounded_dims[name] = replace(dim, opt=min(dim.opt, half_size), max=half_size, why=reason)
    return bounded_dims


def _count_elements(inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    return sum(math.prod(spec.at(sizes)) for spec in inputs)


class _Probe:
    """Runs a graph at sizes of its dims, for `_SECONDS` in total. inputs: of the graph; they are set again when dims
    are renamed."""

    def __init__(self, run: Run, inputs: Sequence[TensorSpec]) -> None:
        self._run, self.inputs = run, inputs
        self._until = time.monotonic() + _SECONDS
        self._normal = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        self.last_error = ""

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._until

    def runs(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph runs without an error at these sizes. False when the time is over."""
        if self.is_over:
            return False
        if _count_elements(self.inputs, sizes) > _MOST_ELEMENTS:
            self.last_error = self.last_error or f"inputs of more than {_MOST_ELEMENTS} elements are not tried"
            return False
        return self.ends(lambda: self._run({spec.name: self._array(spec, sizes) for spec in self.inputs}))

    def ends(self, call: Callable[[], object]) -> bool:
        """Whether a call ends without an error. `last_error` is set to its error."""
        try:
            call()
        except Exception as error:  # onnxruntime's errors share no base class, and a module can raise anything
            self.last_error = (words_of(error).strip() or type(error).__name__).splitlines()[0][:160]
            return False
        return True

    def find_running(
        self, names: Sequence[str], known_sizes: Mapping[str, int], likely_sizes: Sequence[int]
    ) -> dict[str, int] | None:
        """Sizes at which the graph runs; the known ones are tried first. None if it runs at no tried sizes."""
        for sizes in chain([dict(known_sizes)] if known_sizes else [], _candidates(names, likely_sizes)):
            if self.runs(sizes):
                return sizes
            if self.is_over:  # a dozen dims have 8**12 sizes and more
                break
        return None

    def find_equal(self, names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, str]:
        """Dim -> the earlier dim that it must equal: the graph runs if both grow, and not if only one does."""
        twin_names: dict[str, str] = {}
        stuck_dims = [name for name in names if not self._grows((name,), sizes)]
        for earlier_dim, later_dim in itertools.combinations(stuck_dims, 2):
            is_pair = not {earlier_dim, later_dim} & twin_names.keys() and sizes[earlier_dim] == sizes[later_dim]
            if is_pair and self._grows((earlier_dim, later_dim), sizes):
                twin_names[later_dim] = earlier_dim
        # With three or more inputs, all batches must grow together.
        leading_dims = {spec.shape[0] for spec in self.inputs if spec.shape}
        batch_dims = [name for name in stuck_dims if name in leading_dims and sizes[name] == 1]
        if len(batch_dims) > 2 and not twin_names and self._grows(batch_dims, sizes):
            twin_names = dict.fromkeys(batch_dims[1:], batch_dims[0])
        return twin_names

    def _grows(self, names: Sequence[str], sizes: Mapping[str, int]) -> bool:
        return any(self.runs({**sizes, **{name: sizes[name] + step for name in names}}) for step in _STEPS)

    def bounds(self, name: str, sizes: Mapping[str, int]) -> FoundDim:
        """The smallest and largest size at which the graph ran, with all other dims unchanged."""
        base_size, max_size = sizes[name], LARGEST_BATCH if is_batch(name) else LARGEST_SIZE
        step = next(
            (
                step
                for sign in (1, -1)  # if this is the size of a table of positions, no larger size runs
                for step in _STEPS
                if base_size % step == 0
                and base_size + sign * step > 0
                and self.runs({**sizes, name: base_size + sign * step})
            ),
            0,
        )
        if not step:
            timeout_text = f"was tried: the {_SECONDS} s were over; widen it"
            reason = timeout_text if self.is_over else "ran of the sizes that were tried"
            return FoundDim(base_size, base_size, base_size, f"only {base_size} {reason}")
        small_sizes = (size for size in sorted({step, 2 * step, 4 * step}) if size < base_size)
        low = next((size for size in small_sizes if self.runs({**sizes, name: size})), base_size)
        high = max(max_size // step * step, low) if base_size < max_size else 2 * base_size
        if not self.runs({**sizes, name: high}):
            # Ascending: the first size that fails is beyond the end of a table, as CLIP's 77.
            trial_sizes = range(base_size + step, high, step)
            fail_index = bisect.bisect_left(trial_sizes, True, key=lambda size: not self.runs({**sizes, name: size}))
            high = trial_sizes[fail_index - 1] if fail_index else base_size
        if low == high:
            return FoundDim(low, low, low, f"only {low} ran of the sizes that were tried")
        trial_text = f"the graph ran at {low} and {high}"
        multiple_text = "" if step == 1 else f", and only at multiples of {step}"
        opt = low if is_batch(name) else min(max(base_size, low), high)
        return FoundDim(low, opt, high, trial_text + multiple_text, step)

    def _array(self, spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
        shape = spec.at(sizes)
        if np.dtype(spec.dtype).kind == "f":
            # Values repeat beyond a million: only the shape decides whether a graph runs; drawing 2**26 takes seconds.
            return np.resize(self._normal, shape).astype(spec.dtype, copy=False)
        return np.ones(shape, spec.dtype)


def _candidates(names: Sequence[str], likely_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Sizes to try: 1 for batches and for a growing number of the other dims, one common size for the rest; then
    others.

    likely_sizes: tried after the usual ones where free dims have one size, before them where their sizes differ."""
    batch_names = [name for name in names if is_batch(name)]
    free_dims = [name for name in names if name not in batch_names]
    unit_sizes, all_sizes = dict.fromkeys(names, 1), dict.fromkeys((*_SIZES, *likely_sizes))
    for count in range(len(free_dims), 0, -1):
        for name_group in itertools.combinations(free_dims, count):
            yield from ({**unit_sizes, **dict.fromkeys(name_group, size)} for size in all_sizes)
    yield unit_sizes
    yield from (
        {**dict.fromkeys(free_dims, _SIZES[0]), **dict.fromkeys(batch_names, size)} for size in _BATCHES if batch_names
    )
    for sizes in itertools.product(dict.fromkeys((*likely_sizes, *_SIZES[:8])), repeat=len(free_dims)):
        if len(set(sizes)) > 1:
            yield {**unit_sizes, **dict(zip(free_dims, sizes, strict=True))}


def _guess_all(facts: FoundModel, names: Sequence[str], why: str) -> FoundModel:
    dims = {}
    for name in names:
        max_size = LARGEST_BATCH if is_batch(name) else LARGEST_SIZE
        dims[name] = FoundDim(1, 1 if is_batch(name) else max_size, max_size, why, guessed=True)
    return replace(facts, dims=_fit_memory(dims, facts.inputs))
