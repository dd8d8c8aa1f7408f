"""The data of an ensemble: samples of the inputs of the whole; where graphs have state, steps in order."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.core.codec import OMIT_DEFAULT, OMIT_NONE, encode
from enginesmith.core.state import State, step_inputs
from enginesmith.core.types import Dim, TensorSpec
from pipeline.values import Json

if TYPE_CHECKING:
    from enginesmith.arrays import Array
    from validation.data.joined import Steps
    from validation.data.samples import Samples


@dataclass(frozen=True)
class WholeData:
    """Data of the whole. path: its file.  digest: of that.  inputs, dims: of the whole.  labels: name of the array of
    right answers; '' without one.

    states: of all graphs, under the names of the whole; they are among its inputs, and not in data.  sequence: name of
    the array that says which sequence each sample is a step of; '' where all are of one.  steps: as in `read_steps`.
    """

    path: Path
    digest: str
    inputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    labels: str = field(default="", metadata=OMIT_DEFAULT)
    states: tuple[State, ...] = field(default=(), metadata=OMIT_DEFAULT)
    sequence: str = field(default="", metadata=OMIT_DEFAULT)
    steps: tuple[str, str] | None = field(default=None, metadata=OMIT_NONE)

    @property
    def key(self) -> Json:
        """What the key of a step holds of it: wherever it lies."""
        labels = {"labels": self.labels} if self.labels else {}
        found = {"digest": self.digest, "inputs": encode(self.inputs), "dims": encode(self.dims), **labels}
        if not self.states:
            return found
        return {**found, "states": encode(self.states), "sequence": self.sequence, "steps": list(self.steps or ())}

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest size of each dim."""
        return {dim.name: (dim.min, dim.max) for dim in self.dims}

    def open(self) -> "Samples":
        """The samples. Raises DataError where they do not suit the inputs."""
        from validation.data.samples import Samples

        extra = [name for name in (self.labels, self.sequence, self.steps and self.steps[1]) if name]
        return Samples.open(self.path, step_inputs(self.inputs, self.states), self.dims, extra)

    def open_steps(self) -> "tuple[Samples, Array | None, Steps | None]":
        """The samples, for each which sequence it is a step of, and which of them are one step. Raises as `open`,
        `read_order` and `read_steps`."""
        from validation.data.joined import read_steps
        from validation.data.sequences import read_order

        samples = self.open()
        order = read_order(samples, self.sequence or None)
        return samples, order, read_steps(samples, self.steps, order, self.dims)
