"""Generation in a spec: the sampler that is put behind a model's graph."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from enginesmith.core.errors import DataError, SpecError, UnavailableError
from enginesmith.core.sampling import SEEN_NEXT
from enginesmith.core.types import Precision, Sampling, TensorSpec
from pipeline.spec.value_types import GraphName, Size, SpecPart

# Greatest mean KL divergence in nats. tinylm has 4e-13, 4e-7, 1e-4 and 5e-3 in fp32, fp16, int8 and int4; 0.1 is a
# perplexity that is some 10 % worse on text of the model's own.
KL_NATS: Mapping[Precision, float] = {
    "fp32": 1e-6, "fp16": 1e-4, "bf16": 5e-3, "fp8": 0.05, "int8": 0.02, "int8-dynamic": 0.02, "int4": 0.1
}  # fmt: skip
LimitName = Literal["kl_nats", "top_1_agreement", "top_5_agreement", "same_tokens"]
Limit = Annotated[float, Field(ge=0)]


class AnswerGrammar(SpecPart):
    """What the engine's own answers to golden prompts must keep, of a model over bytes: one of these."""

    json_schema: dict[str, JsonValue] | None = Field(None, description="a JSON schema, without references to files")
    regex: str | None = Field(None, description="a regular expression that a whole answer matches")
    lark: str | None = Field(None, description="a grammar in llguidance's variant of Lark's syntax")

    @property
    def named(self) -> tuple[str, str]:
        """(kind, text), as `enginesmith.grammars.read_grammar` takes it."""
        (found,) = self._given()
        return found

    def _given(self) -> list[tuple[str, str]]:
        schema = None if self.json_schema is None else json.dumps(self.json_schema)
        texts = {"json_schema": schema, "regex": self.regex, "lark": self.lark}
        return [(kind, text) for kind, text in texts.items() if text is not None]

    @model_validator(mode="after")
    def _one_that_is_valid(self) -> Self:
        """Where llguidance is not installed, only the proof finds out what is wrong with a grammar."""
        from enginesmith.grammars import read_grammar  # with numpy, which a spec without a grammar does not need

        if len(self._given()) != 1:
            raise ValueError("give one of json_schema, regex and lark")
        with suppress(UnavailableError):
            try:
                read_grammar(*self.named).begin(256)
            except DataError as error:
                raise ValueError(str(error)) from error
        return self


class GoldenPrompts(SpecPart):
    """Prompts that every engine answers when it is proven, beside the exported model."""

    omitted: ClassVar[frozenset[str]] = frozenset({"constraint"})

    given: tuple[str | tuple[Annotated[int, Field(strict=True, ge=0)], ...], ...] = Field(
        min_length=1, description="texts, of a model over bytes, or lists of token ids"
    )
    most: Size = Field(32, description="tokens of each answer")
    limits: dict[Precision, dict[LimitName, Limit]] = Field(
        {}, description="by precision; default: kl_nats alone, from 1e-6 (fp32) to 0.1 (int4)"
    )

    constraint: AnswerGrammar | None = Field(None, description="what each engine's own answers must keep")

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, text) of the constraint."""
        return self.constraint.named if self.constraint else None

    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each prompt."""
        return tuple(tuple(item.encode()) if isinstance(item, str) else item for item in self.given)

    def limits_of(self, precision: Precision) -> dict[str, float]:
        """The limits of an engine."""
        own = {str(name): value for name, value in self.limits.get(precision, {}).items()}
        return {"kl_nats": KL_NATS[precision], **own}

    def find_vain_limits(self) -> Iterator[tuple[Precision, str, str]]:
        """Limits that no engine can keep: (precision, limit, what is wrong with it)."""
        greatest = {"top_1_agreement": 1.0, "top_5_agreement": 1.0, "same_tokens": float(self.most)}
        for precision, limits in self.limits.items():
            for name, value in limits.items():
                if value > (bound := greatest.get(name, value)):
                    yield precision, name, f"is {value:g}, and there can be no more than {bound:g}; lower it"

    def find_misfit(self, vocabulary: int) -> str | None:
        """Why the prompts are none of such a vocabulary; None where they are."""
        texts = [item for item in self.given if isinstance(item, str)]
        if texts and vocabulary != 256:
            return f"{texts[0]!r} is a text, and the vocabulary has {vocabulary} tokens, not 256 bytes; give token ids"
        if self.constraint and vocabulary != 256:
            return f"a constraint is over 256 bytes, and the vocabulary has {vocabulary} tokens; remove constraint"
        wrong = [token for prompt in self.tokens() for token in prompt if token >= vocabulary]
        return f"token {wrong[0]} is none of a vocabulary of {vocabulary}; give others" if wrong else None


class SamplingSection(SpecPart):
    """A sampler in the graph: greedy or drawn tokens, with settings of each request (docs/guides/generation.md)."""

    omitted: ClassVar[frozenset[str]] = frozenset({"prompts"})

    ids: GraphName = Field(description="the input of token ids, [batch, ..]")
    logits: GraphName = Field(description="the output [batch, vocabulary] or [batch, places, vocabulary]")
    token: GraphName = Field("next_token", min_length=1, description="name of the output [batch] that the sampler adds")
    candidates: Size = Field(1024, description="so many of the likeliest tokens can be drawn; bounds top_k too")
    prompts: GoldenPrompts | None = Field(None, description="golden prompts, which each engine answers at its proof")

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
        # Exporters may name an axis of outputs by itself; a name of an input's axis is another axis.
        named = {size for spec in inputs for size in spec.shape}
        if taken := {self.token, SEEN_NEXT}.intersection(spec.name for spec in (*inputs, *outputs)):
            raise SpecError([f"sampling.token: {taken.pop()!r} is a name of the model's own and of the sampler's; give "
                             "another, or rename it in the model"])  # fmt: skip
        if logits.shape[0] != ids.shape[0] and (logits.shape[0] in named or isinstance(logits.shape[0], int)):
            raise SpecError(
                [f"sampling: {self.ids!r} has {ids.shape[0]!r} rows and {self.logits!r} {logits.shape[0]!r}; the first "
                 "axis of both must be the batch"]
            )  # fmt: skip
        if self.prompts and (misfit := self.prompts.find_misfit(vocabulary)):
            raise SpecError([f"sampling.prompts: {misfit}"])
        return Sampling(self.ids, self.logits, self.token, vocabulary, min(self.candidates, vocabulary))
