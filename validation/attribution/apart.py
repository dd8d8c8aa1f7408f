"""Segments cut apart: all in one session, each on activations that it is given."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from enginery.arrays.arrays import Array
from enginery.core.errors import EngineryError
from enginery.core.types import Session, Tensors, TensorSpec
from validation.attribution.cuts import GraphSegment
from validation.attribution.onnx_graph import LOCAL
from validation.attribution.tappable import Tappable
from validation.comparison.sessions import run


@dataclass
class Apart:
    """Segments in one session, all on given activations; where that fails, one by one, to find which of them does."""

    candidate: Tappable
    window: Sequence[GraphSegment]
    given: Mapping[str, TensorSpec]
    sessions: dict[tuple[str, ...], Session] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def run(self, values: Tensors) -> dict[str, tuple[Array | None, str]]:
        """What each segment gives, or why it gives nothing. values: the model's inputs and activations by name."""
        names = [segment.target for segment in self.window]
        try:
            return {name: (value, "") for name, value in self._run(self.window, values).items()}
        except EngineryError as error:
            if len(names) == 1:
                return {names[0]: (None, str(error))}
        return {segment.target: self._alone(segment, values) for segment in self.window}

    def _alone(self, segment: GraphSegment, values: Tensors) -> tuple[Array | None, str]:
        try:
            return self._run([segment], values)[segment.target], ""
        except EngineryError as error:
            return None, str(error)

    def _run(self, window: Sequence[GraphSegment], values: Tensors) -> dict[str, Array]:
        names = tuple(segment.target for segment in window)
        if names not in self.sessions:
            inside = {name for segment in window for name in segment.boundary}
            ranked_as = {
                name: TensorSpec(name, spec.dtype, values[name].shape)
                for name, spec in self.given.items()
                if name in inside
            }
            self.sessions[names] = self.stack.enter_context(self.candidate.open_segment(names, ranked_as))
        session = self.sessions[names]
        fed = {spec.name: values[spec.name] for spec in session.inputs}
        cast = {name: fed[name].astype(spec.dtype) for name, spec in self.given.items() if name in fed}
        results = run(session, {**fed, **cast})
        return {name: results.get(f"{name}{LOCAL}", results.get(name)) for name in names}  # type: ignore[misc]
