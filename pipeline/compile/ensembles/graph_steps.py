"""The samples of a graph of an ensemble with state: what it takes at each step of the sequences of the whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginesmith.core.ensemble import name_dims
from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import Session, TensorSpec
from pipeline.compile.ensembles.whole import WholeData

if TYPE_CHECKING:
    from enginesmith.arrays import Array
    from enginesmith.core.types import Tensors

# Arrays of computed samples: the sequence and the step that each is of. No input has such a name.
SEQUENCE, STEP = "sequence number", "step number"


@dataclass(frozen=True)
class GraphSteps:
    """How the samples of a graph are steps. state: whether it has state; without, a sample that is the same as that of
    the step before is left out.  dim: of its inputs, along which several samples of the whole are one step; '' where
    each step is one sample of the graph."""

    state: bool
    dim: str

    @property
    def arrays(self) -> tuple[str | None, dict[str, str] | None]:
        """`sequence` and `steps` of the graph's data."""
        return (SEQUENCE if self.state else None), ({self.dim: STEP} if self.state and self.dim else None)


@dataclass(frozen=True)
class RolledStep:
    """A step of the whole. numbers: of its sequence, and of the step.  samples: how many of the whole it is of.

    tensors: what it is given, without what steps before it gave, and what the graphs answered.
    """

    numbers: tuple[int, int]
    samples: int
    tensors: "Tensors"


def find_graph_steps(
    whole: WholeData, state: bool, inputs: Sequence[TensorSpec], sources: Mapping[str, str]
) -> GraphSteps:
    """Of a graph. state: whether it has state.  inputs: without its states.  sources: what gives them."""
    joined = whole.steps[0] if whole.steps else ""
    own = next((dim for dim, name in name_dims(inputs, sources, whole.inputs).items() if name == joined), "")
    return GraphSteps(state, own)


def roll_steps(chain: Session, whole: WholeData, states: Sequence[State]) -> Iterator[RolledStep]:
    """All steps of the sequences of the whole, run by a chain that carries its states. states: of the chain. Raises
    DataError for data that are no steps."""
    import numpy as np

    from enginesmith.streams import Streams
    from validation.data.joined import GrownInputs, JoinedSteps
    from validation.data.sequences import split

    samples, order, steps = whole.open_steps()
    firsts = steps.firsts if steps else np.arange(samples.count)
    counts = np.diff(np.append(firsts, samples.count)).tolist()
    source = JoinedSteps(samples, steps) if steps else samples
    streams = Streams(chain.run, tuple(chain.inputs), states, whole.ends)
    for number, sequence in enumerate(split(source, None if order is None else order[firsts])):
        streams.reset()
        grown = GrownInputs(streams.inputs)
        for end, given in sequence:
            answer = streams.run(grown.take(given))
            yield RolledStep((number, end - 1), counts[end - 1], {**given, **answer})


def list_rows(
    rolled: Iterator[RolledStep],
    steps: GraphSteps,
    inputs: Sequence[TensorSpec],
    sources: Mapping[str, str],
    complete: bool,
) -> "Iterator[dict[str, Array]]":
    """The samples of a graph, one after the other. inputs, sources: of the graph, without its states.  complete: as in
    `write_samples`. Raises DataError for what cannot be cut into the samples of a step."""
    import numpy as np

    before: Tensors = {}
    numbers = -1, -1
    for step in rolled:
        taken = {name: step.tensors[source] for name, source in sources.items()}
        parts = _cut(taken, steps.dim, step.samples, inputs) if steps.dim else [taken]
        for part in parts:
            if steps.state:
                of = {SEQUENCE: step.numbers[0], STEP: step.numbers[1]} if steps.dim else {SEQUENCE: step.numbers[0]}
                yield part | {name: np.array(at if complete else [at]) for name, at in of.items()}
            elif numbers[0] != step.numbers[0] or not all(np.array_equal(part[name], before[name]) for name in part):
                yield part
            before, numbers = part, step.numbers


def _cut(step: "Tensors", dim: str, count: int, inputs: Sequence[TensorSpec]) -> "list[dict[str, Array]]":
    """The samples that a step was joined of: inputs with the dim in equal parts, the others in each."""
    import numpy as np

    parts = [dict(step) for _ in range(count)]
    for spec in (spec for spec in inputs if dim in spec.shape):
        axis = spec.shape.index(dim)
        size = step[spec.name].shape[axis]
        if size % count:
            raise DataError(
                f"input {spec.name!r} gets {size} along {dim!r} in a step of {count} samples, which is no multiple; "
                "rename the dim of what is not of the step's samples"
            )
        for part, piece in zip(parts, np.split(step[spec.name], count, axis), strict=True):
            part[spec.name] = piece
    return parts
