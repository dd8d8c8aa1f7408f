"""Generation in a spec: the sampler that is put behind a model's graph."""

from collections.abc import Sequence

from pydantic import Field

from enginery.core.errors import SpecError
from enginery.core.types import Sampling, TensorSpec
from pipeline.spec.value_types import GraphName, Size, SpecPart


class SamplingSection(SpecPart):
    """A sampler in the graph: greedy or drawn tokens, with settings of each request (docs/guides/generation.md)."""

    ids: GraphName = Field(description="the input of token ids, [batch, ..]")
    logits: GraphName = Field(description="the output [batch, vocabulary] or [batch, places, vocabulary]")
    token: GraphName = Field("next_token", description="name of the output [batch] that the sampler adds")
    candidates: Size = Field(1024, description="so many of the likeliest tokens can be drawn; bounds top_k too")

    def to_sampling(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Sampling:
        """As the plan takes it. Raises SpecError where the model has other inputs or outputs than a sampler needs."""
        ids = next(spec for spec in inputs if spec.name == self.ids)
        logits = next((spec for spec in outputs if spec.name == self.logits), None)
        if logits is None:
            names = ", ".join(spec.name for spec in outputs)
            raise SpecError([f"sampling.logits {self.logits!r} is not one of the outputs: {names}"])
        vocabulary = logits.shape[-1] if logits.shape else None
        if len(logits.shape) not in (2, 3) or not isinstance(vocabulary, int) or not logits.dtype.startswith("float"):
            shape = f"{logits.dtype} {list(logits.shape)}"
            raise SpecError(
                [f"sampling.logits {self.logits!r} is {shape}; it must be floats [batch, vocabulary] or "
                 "[batch, places, vocabulary], with a vocabulary of one size"]
            )  # fmt: skip
        if logits.shape[0] != ids.shape[0]:
            raise SpecError(
                [f"sampling: {self.ids!r} has {ids.shape[0]!r} rows and {self.logits!r} {logits.shape[0]!r}; the first "
                 "axis of both must be the batch"]
            )  # fmt: skip
        return Sampling(self.ids, self.logits, self.token, vocabulary, min(self.candidates, vocabulary))
