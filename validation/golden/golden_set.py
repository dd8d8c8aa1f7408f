"""Golden sets, and the changes between two."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal, overload

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import (
    DataError,
    IntegrityError,
    ModelError,
    canonical_json,
    digest_of_bytes,
    digest_of_file,
)
from enginesmith.core.golden import golden_prefix
from enginesmith.core.state import State
from enginesmith.core.text import pluralize
from enginesmith.core.types import Dim, Tensors, TensorSpec, Untyped, sizes_product
from validation.data.batches import enough_samples
from validation.data.joined import BEGINS
from validation.data.samples import Samples, resize
from validation.limits.noise_floor import Noise
from validation.metrics.drift import is_exact, measure

# The golden set: inputs and the original model's outputs for these inputs, frozen by digest.
#
# Golden cases are the golden samples in groups. Edge cases have the sizes at the ends of the dims' buckets, in every
# combination, because compilers switch kernels and profiles there; they are made of the same samples, repeated if
# needed. The number of combinations grows exponentially with the dims, and the model runs once for each.
MAX_EDGE_CASES = 64
_KINDS = "biuf"
_NO_GOLDEN = (OSError, IntegrityError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_FORMAT = 1
# The prefix of the names of sequences' tensors.
SEQUENCES = "sequences/"

CaseKind = Literal["golden", "edge"]


@dataclass(frozen=True, eq=False)
class Case:
    """One run of the model: inputs and expected outputs, by name.  kind: 'golden' for real data, 'edge' for sizes at
    the end of a dim."""

    name: str
    kind: CaseKind
    inputs: Tensors
    expected: Tensors


@dataclass(frozen=True)
class CaseName:
    """The name and the kind of a case, as files of a golden set have them."""

    name: str
    kind: CaseKind


@dataclass(frozen=True)
class _SequencesHeader:
    """Names of the sequences, and the rest of `GoldenSequences`."""

    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    cases: tuple[CaseName, ...]
    noise: Noise | None = None
    places: tuple[tuple[int, ...], ...] = ()
    dim: str = ""


@dataclass(frozen=True)
class _GoldenHeader:
    """The metadata of a golden set's file."""

    format: int
    cases: tuple[CaseName, ...]
    noise: Noise | None = None
    sequences: _SequencesHeader | None = None


@dataclass(frozen=True, eq=False)
class GoldenSet:
    """Frozen cases. The cases of a loaded set are read from its file (`source`) one at a time.

    labels: the true answers of all golden cases in order, if known.  noise: the model's own noise floor on these cases;
    None if it was not measured.  sequences: for a model with state.
    """

    cases: Sequence[Case]
    labels: Array | None = None
    source: Path | None = field(default=None, repr=False)
    noise: Noise | None = None
    sequences: "GoldenSequences | None" = None

    @cached_property
    def digest(self) -> str:
        """The digest of the bytes that `save` writes."""
        return digest_of_file(self.source) if self.source else digest_of_bytes(_encode(self))

    def of_kind(self, kind: CaseKind) -> Iterator[Case]:
        """The golden cases, or the edge cases, in order."""
        return (self.cases[index] for index, case_kind in enumerate(case_kinds(self)) if case_kind == kind)

    @property
    def real_inputs(self) -> Tensors:
        """The inputs of the first golden case without an empty input (states of first steps can be empty); if every
        case has one, those of the first case. Raises DataError without any case."""
        first_inputs = None
        for case in self.of_kind("golden"):
            if all(array.size for array in case.inputs.values()):
                return case.inputs
            first_inputs = first_inputs or case.inputs
        if first_inputs is None:
            raise DataError("the golden set has no case of kind 'golden'; make it again with golden data")
        return first_inputs

    def save(self, path: Path) -> str:
        """Write a safetensors file, the same bytes for the same set, and return its digest."""
        file_bytes = _encode(self)
        path.write_bytes(file_bytes)
        return digest_of_bytes(file_bytes)

    @classmethod
    def load(cls, path: Path) -> "GoldenSet":
        """Open a file that `save` wrote; tensors are read case by case. Raises DataError for any other file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                header = parsing.load_json((file.metadata() or {}).get("golden", "{}"))
                names = tuple(file.keys())
                labels = file.get_tensor("labels") if "labels" in names else None
            if isinstance(header, dict) and (format_name := header.get("format", _FORMAT)) != _FORMAT:
                raise ValueError(f"format {str(format_name)[:40]}; this version reads {_FORMAT}")
            golden_header = decode(header, _GoldenHeader)
        except (SafetensorError, *_NO_GOLDEN) as error:
            raise DataError(f"{path} is not a golden set ({str(error)[:300]}); freeze it again") from error
        sequences = None
        if sequence_header := golden_header.sequences:
            rollout = GoldenSet(
                _StoredCases(path, sequence_header.cases, names, SEQUENCES), noise=sequence_header.noise
            )
            sequences = GoldenSequences(
                sequence_header.states, sequence_header.ends, rollout, sequence_header.places, sequence_header.dim
            )
        return cls(_StoredCases(path, golden_header.cases, names), labels, path, golden_header.noise, sequences)


@dataclass(frozen=True, eq=False)
class GoldenSequences:
    """Sequences of steps for runs in which a model passes its own states on. ends: as in `Streams`.

    golden: a case is a sequence: inputs of its steps, without states, along a new axis 0 (`FreeRunningSession`).
    places: for each golden case of single steps, in order, the positions of its steps in their sequences.  dim: the dim
    along which several samples of a step are joined; '' if each sample is a step. With a dim, cases have the samples,
    and an array of the steps' beginnings (`joined.BEGINS`).
    """

    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    golden: GoldenSet
    places: tuple[tuple[int, ...], ...] = ()
    dim: str = ""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of steps of each sequence."""
        return tuple(_count_steps(case.inputs) for case in self.golden.cases)


def _count_steps(inputs: Tensors) -> int:
    begin_flags = inputs.get(BEGINS)
    return len(next(iter(inputs.values()))) if begin_flags is None else int(begin_flags.sum())


def freeze(
    samples: Samples | Iterable[Tensors],
    specs: Sequence[TensorSpec],
    dims: Sequence[Dim],
    run: Callable[[Tensors], Tensors],
    labels: Array | None = None,
) -> GoldenSet:
    """Make the golden set of a model, which runs once for each case.

    samples: opened samples, or groups of inputs.  labels: of the samples. Raises DataError without samples and for
    tensors that are no numpy numbers, and ModelError if the model does not run (with the sizes, for an edge case).
    """
    groups = list(samples.batches() if isinstance(samples, Samples) else samples)
    if not groups:
        raise DataError("the golden data has no samples; give at least one")
    cases = [_case(f"golden {index}", "golden", inputs, run) for index, inputs in enumerate(groups)]
    for index, sizes in enumerate(edge_sizes(specs, dims)):
        inputs = resize(enough_samples(groups, index % len(groups), specs, sizes), specs, sizes)
        cases.append(_case(" ".join(f"{name}={size}" for name, size in sizes.items()), "edge", inputs, run))
    return GoldenSet(tuple(cases), labels)


def case_names(golden: GoldenSet) -> list[str]:
    """The names of all cases in order, without reading their tensors."""
    return [case.name for case in _headings(golden)]


def case_kinds(golden: GoldenSet) -> list[CaseKind]:
    """The kinds of all cases in order, without reading their tensors."""
    return [case.kind for case in _headings(golden)]


def _headings(golden: GoldenSet) -> "Sequence[Case] | Sequence[CaseName]":
    return golden.cases.named if isinstance(golden.cases, _StoredCases) else golden.cases


def edge_sizes(specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> list[dict[str, int]]:
    """Distinct combinations of the dims' test sizes, those of min and max first; at most MAX_EDGE_CASES."""
    used_dims = [dim for dim in dims if any(dim.name in spec.shape for spec in specs)]
    if not used_dims:
        return []
    corner_sizes = sizes_product(used_dims, {dim.name: sorted({dim.min, dim.max}) for dim in used_dims})
    distinct_sizes: dict[tuple[int, ...], dict[str, int]] = {}
    for sizes in chain(corner_sizes, sizes_product(used_dims, {dim.name: dim.test_sizes() for dim in used_dims})):
        distinct_sizes.setdefault(tuple(sizes.values()), sizes)
        if len(distinct_sizes) == MAX_EDGE_CASES:
            break
    return list(distinct_sizes.values())


def _case(name: str, kind: CaseKind, inputs: Tensors, run: Callable[[Tensors], Tensors]) -> Case:
    try:
        outputs = {output: np.asarray(value) for output, value in run(inputs).items()}
    except ModelError as error:
        detail = f"; it was run at {name}, which the spec's dims allow, on golden data cut or repeated to these sizes"
        hint = "" if kind == "golden" else f"{detail}: narrow the dims to sizes at which such values mean something"
        raise ModelError(f"{error}{hint}") from error
    for output, value in {**inputs, **outputs}.items():
        if value.dtype.kind not in _KINDS:
            raise DataError(
                f"case {name!r}: tensor {output!r} is {value.dtype}; golden data can hold only numpy's own booleans, "
                "integers and floats"
            )
    return Case(name, kind, dict(inputs), outputs)


@dataclass(frozen=True)
class _StoredCases(Sequence[Case]):
    """The cases of a file, each read on access. named: name and kind of cases.  names: of tensors.  root: prefix."""

    path: Path
    named: tuple[CaseName, ...]
    names: tuple[str, ...]
    root: str = ""

    def __len__(self) -> int:
        return len(self.named)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Case, ...]: ...
    def __getitem__(self, index: int | slice) -> Case | tuple[Case, ...]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        position = range(len(self))[index]
        return Case(self.named[position].name, self.named[position].kind, *self._tensors(position))

    def _tensors(self, index: int) -> Iterator[dict[str, Array]]:
        """The inputs, then the expected outputs, of the case at an index."""
        for prefix in (self.root + golden_prefix(index, "in"), self.root + golden_prefix(index, "out")):
            names = self._by_prefix.get(prefix, ())
            yield {name.removeprefix(prefix): self._file.get_tensor(name) for name in names}

    @cached_property
    def _file(self) -> Untyped:
        """The open file, kept because reading the header of many small cases takes longer than reading a case."""
        from safetensors import safe_open

        return safe_open(self.path, framework="numpy")

    @cached_property
    def _by_prefix(self) -> dict[str, list[str]]:
        names_by_prefix: dict[str, list[str]] = {}
        for name in (name for name in self.names if name.startswith(self.root)):
            index, _, suffix = name.removeprefix(self.root).partition("/")
            names_by_prefix.setdefault(f"{self.root}{index}/{suffix.partition('/')[0]}/", []).append(name)
        return names_by_prefix


def _encode(golden: GoldenSet) -> bytes:
    from safetensors.numpy import save

    tensors: dict[str, Array] = {} if golden.labels is None else {"labels": np.asarray(golden.labels, order="C")}
    tensors |= name_tensors(golden)
    sequences = None
    if rollouts := golden.sequences:
        fields = name_cases(rollouts.golden), rollouts.golden.noise, rollouts.places, rollouts.dim
        sequences = _SequencesHeader(rollouts.states, rollouts.ends, *fields)
    header = encode(_GoldenHeader(_FORMAT, name_cases(golden), golden.noise, sequences))
    return save(tensors, {"golden": canonical_json(header).decode()})


def name_cases(golden: GoldenSet) -> tuple[CaseName, ...]:
    """The name and the kind of each case, in order."""
    return tuple(CaseName(case.name, case.kind) for case in _headings(golden))


def name_tensors(golden: GoldenSet) -> dict[str, Array]:
    """The tensors of all cases and sequences, in C order, by their names in a file."""
    tensors: dict[str, Array] = {}
    for index, case in enumerate(golden.cases):
        for role, arrays in (("in", case.inputs), ("out", case.expected)):
            prefix = golden_prefix(index, role)
            tensors |= {prefix + name: np.asarray(value, order="C") for name, value in arrays.items()}
    if golden.sequences:
        tensors |= {SEQUENCES + name: array for name, array in name_tensors(golden.sequences.golden).items()}
    return tensors


@dataclass(frozen=True)
class GoldenChange:
    """The change from one golden set to another. cases: the number of cases after.

    inputs, expected: names of cases of both sets whose inputs, or outputs, differ.
    largest: by output, the greatest absolute difference (for integers, the share of elements that differ) and its case;
    infinite if the output has another shape or kind, or a value is not finite.  labels, noise, sequences: whether the
    two sets differ in these.
    """

    before: str
    after: str
    cases: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    inputs: tuple[str, ...]
    expected: tuple[str, ...]
    largest: dict[str, tuple[float, str]]
    labels: bool
    noise: bool
    sequences: bool

    @property
    def same(self) -> bool:
        """Whether the two sets have the same digest."""
        return self.before == self.after

    def __str__(self) -> str:
        if self.same:
            return "the same golden set"
        total_text = f"of {self.cases} cases"
        counts = [
            (self.added, "case added", "cases added"),
            (self.removed, "case removed", "cases removed"),
            (self.inputs, f"{total_text} has other inputs", f"{total_text} have other inputs"),
            (self.expected, f"{total_text} has other expected outputs", f"{total_text} have other expected outputs"),
        ]
        clauses = [
            *[pluralize(len(names), singular, plural) for names, singular, plural in counts if names],
            *[_describe(name, value, case) for name, (value, case) in self.largest.items()],
            *(["other labels"] if self.labels else []),
            *(["another noise floor"] if self.noise else []),
            *(["other sequences, or other states handed on in them"] if self.sequences else []),
        ]
        return "; ".join(clauses) or "the same tensors, written by another version of the format"

    def to_json(self) -> dict[str, object]:
        """A JSON object; an infinite difference is null."""
        largest_by_output = {
            name: {"difference": value if math.isfinite(value) else None, "case": case}
            for name, (value, case) in self.largest.items()
        }
        lists = {name: list(getattr(self, name)) for name in ("added", "removed", "inputs", "expected")}
        totals = {"before": self.before, "after": self.after, "same": self.same, "cases": self.cases}
        extra_fields = {name: getattr(self, name) for name in ("labels", "noise", "sequences")}
        return {**totals, **lists, "largest": largest_by_output, **extra_fields, "summary": str(self)}


def change(before: GoldenSet, after: GoldenSet) -> GoldenChange:
    """The change from one golden set to another, compared case by case, by name."""
    old_indices = {case: index for index, case in enumerate(case_names(before))}
    new_indices = {case: index for index, case in enumerate(case_names(after))}
    inputs, changed_outputs = list[str](), list[str]()
    largest_differences: dict[str, tuple[float, str]] = {}
    for name in new_indices.keys() & old_indices.keys() if before.digest != after.digest else ():
        old_case, new_case = before.cases[old_indices[name]], after.cases[new_indices[name]]
        if not _equal(old_case.inputs, new_case.inputs):
            inputs.append(name)
        if not _equal(old_case.expected, new_case.expected):
            changed_outputs.append(name)
            for output in old_case.expected.keys() | new_case.expected.keys():
                value = _difference(old_case.expected.get(output), new_case.expected.get(output))
                if value > largest_differences.get(output, (0.0, ""))[0]:
                    largest_differences[output] = (value, name)
    return GoldenChange(
        before.digest,
        after.digest,
        len(new_indices),
        tuple(name for name in new_indices if name not in old_indices),
        tuple(name for name in old_indices if name not in new_indices),
        tuple(name for name in new_indices if name in inputs),
        tuple(name for name in new_indices if name in changed_outputs),
        dict(sorted(largest_differences.items())),
        not _same(before.labels, after.labels),
        before.noise != after.noise,
        _sequences(before) != _sequences(after),
    )


def _describe(output: str, difference: float, case: str) -> str:
    if math.isinf(difference):
        return f"{output}: another shape or kind of numbers, or values that are not finite, in case {case}"
    return f"{output}: by up to {difference:.4g}, in case {case}"


def _sequences(golden: GoldenSet) -> tuple[object, ...]:
    sequences = golden.sequences
    return (sequences.states, sequences.ends, sequences.golden.digest) if sequences else ()


def _equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Array | None, right: Array | None) -> bool:
    """Whether two arrays are equal in every bit."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _difference(left: Array | None, right: Array | None) -> float:
    if left is None or right is None or left.shape != right.shape or is_exact(left) != is_exact(right):
        return math.inf
    drift = measure(left, right)
    if is_exact(left):
        return 1 - drift.agreement
    return math.inf if drift.nonfinite else float(np.nan_to_num(drift.max_abs, nan=math.inf))
