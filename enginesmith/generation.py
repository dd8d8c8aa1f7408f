"""Prompts in, tokens out: a decoder with state, pulled as an engine, step by step.

An engine with a sampler draws in its graph; of one without, the logits are drawn from here (`enginesmith.sampling`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.errors import DataError
from enginesmith.core.sampling import SEEN
from enginesmith.core.types import Tensors
from enginesmith.decoders import Decoder, read_decoder
from enginesmith.opening import open_onnx
from enginesmith.prompts import Prompt, TokenConstraint, check_prompt
from enginesmith.sampling import first_inputs, sample, settings_inputs, uniforms
from enginesmith.streams import Streams

if TYPE_CHECKING:
    from enginesmith.client.pull import Pulled

# Numbers that are made of a seed at a time.
_BLOCK = 256


@dataclass
class _Answer:
    """An answer as far as it came. read: tokens of the prompt that were given to the engine.  made: tokens drawn."""

    index: int
    prompt: Prompt
    most: int
    constraint: TokenConstraint | None
    read: int = 0
    made: int = 0
    last: int = 0
    _drawn: Sequence[float] = ()

    @property
    def begins(self) -> bool:
        """Whether its prompt was read, so that a token is to be drawn."""
        return self.read >= len(self.prompt.tokens)

    def give(self, count: int) -> Sequence[int]:
        """The next tokens for the engine."""
        if self.begins:
            return (self.last,)
        self.read += count
        return list(self.prompt.tokens[self.read - count : self.read])

    def uniform(self) -> float:
        """The number that its next token is drawn by: the n-th of its seed for its n-th token."""
        if self.made >= len(self._drawn):
            self._drawn = uniforms(self.prompt.seed, self.made + _BLOCK).tolist()
        return self._drawn[self.made]

    def take(self, token: int) -> None:
        """Go on behind a token."""
        self.last, self.made = token, self.made + 1
        if self.constraint:
            self.constraint.take(token)

    @property
    def ended(self) -> bool:
        """Whether its last token was drawn."""
        return self.made >= self.most or (self.made > 0 and self.last in self.prompt.stop)


class Generator:
    """Answers to prompts by one engine, several at once. Not for several threads at once.

    run: runs the engine once on all of its inputs, by name.
    """

    def __init__(self, run: Callable[[Tensors], Tensors], decoder: Decoder) -> None:
        self.decoder = decoder
        self._streams = Streams(run, decoder.inputs, decoder.states, decoder.ends)
        self._dtype, self._flat = dtype_of(decoder.ids.dtype), len(decoder.ids.shape) == 1

    @classmethod
    def described(
        cls, run: Callable[[Tensors], Tensors], description: Path | str, ids: str = "ids", logits: str = "logits"
    ) -> "Generator":
        """A generator over a pulled engine. description: the JSON beside it.  ids, logits: names, where the engine has
        no sampler. Raises DataError for an engine that is no decoder."""
        return cls(run, read_decoder(description, ids, logits))

    @classmethod
    def opened(cls, pulled: "Pulled", ids: str = "ids", logits: str = "logits") -> "Generator":
        """A generator over a pulled engine of ONNX Runtime, opened. Raises as `described` and `open_onnx`."""
        return cls.described(open_onnx(pulled), pulled.description, ids, logits)

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens after each prompt. Raises as `stream`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for index, token in self.stream(prompts):
            answers[index].append(token)
        return answers

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int]]:
        """(number of the prompt, token), as tokens come.

        An answer is the same alone and beside others, but for the rounding of the engine's sums. Prompts may have
        different lengths: shorter ones are answered while the others are read. More prompts than the engine takes rows
        are answered one batch after the other.
        Raises DataError, before anything runs, for settings that draw nothing, a prompt without tokens, with unknown
        ones, with no seed, or that passes the cache's bound with its answer, and for a constraint that no token can
        begin or that is of another vocabulary; then for an answer that no token can continue.
        """
        answers = [
            _Answer(index, prompt, self._check(index, prompt), self._begin(index, prompt))
            for index, prompt in enumerate(prompts)
        ]
        rows = self.decoder.rows or max(len(answers), 1)
        for begin in range(0, len(answers), rows):
            yield from self._batch(answers[begin : begin + rows])

    def _check(self, index: int, prompt: Prompt) -> int:
        """The most tokens of an answer. Raises DataError for a prompt that cannot be answered so."""
        check_prompt(prompt, index, self.decoder.sampling.vocabulary)
        tokens, bound = prompt.tokens, self.decoder.bound
        if bound is None:
            if prompt.most is None:
                raise DataError(f"prompt {index}: nothing bounds its answer; give `most`, the number of its tokens")
            return prompt.most
        room = bound.whole - len(tokens)
        if room < 1 or (prompt.most or 0) > room:
            wanted = f" and asks for {prompt.most}" if prompt.most else ""
            raise DataError(
                f"prompt {index} has {len(tokens)} tokens{wanted}; the engine's cache takes {bound.takes}, which is "
                f"{bound.whole} tokens in all: ask for fewer, or {bound.remedy}"
            )
        return room if prompt.most is None else prompt.most

    def _begin(self, index: int, prompt: Prompt) -> TokenConstraint | None:
        """The constraint of an answer. Raises DataError for one that cannot be kept from the beginning."""
        try:
            return prompt.constraint.begin(self.decoder.sampling.vocabulary) if prompt.constraint else None
        except DataError as error:
            raise DataError(f"prompt {index}: {error}") from error

    def _batch(self, answers: list[_Answer]) -> Iterator[tuple[int, int]]:
        self._streams.reset()
        answers = [answer for answer in answers if not answer.ended]
        step = _Step(self.decoder, answers)
        unread = min((len(answer.prompt.tokens) for answer in answers), default=0)
        past = 0
        while answers:
            count = max(1, min(unread, self.decoder.places or unread))
            unread = max(unread - count, 0)
            ids = np.array([answer.give(count) for answer in answers], self._dtype)
            context = {item.spec.name: item.value(len(ids), past, count) for item in self.decoder.progress}
            tokens = step.run(self._streams, ids[:, 0] if self._flat else ids, context)
            past += count
            going: list[int] = []
            for row, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
                if answer.begins and token is not None:
                    answer.take(token)
                    yield answer.index, token
                if not answer.ended and token is not None:
                    going.append(row)
            if len(going) < len(answers):
                answers = [answers[row] for row in going]
                self._streams.keep(going)
                step = step.keep(going, answers)


class _Step:
    """Draws the tokens of one batch: by the engine's sampler, or here. Kept while the rows are the same."""

    def __init__(self, decoder: Decoder, answers: Sequence[_Answer], seen: Array | None = None) -> None:
        self._decoder, self._answers = decoder, answers
        settings = settings_inputs([answer.prompt.settings for answer in answers])
        self._given = first_inputs(decoder.sampling, len(answers)) | settings
        nothing = self._given.pop(SEEN) > 0  # the streams hold it
        self._seen = nothing if seen is None else seen
        self._limited = any(answer.constraint for answer in answers)
        self._drawing = [row for row, answer in enumerate(answers) if answer.prompt.settings.temperature > 0]

    def keep(self, rows: Sequence[int], answers: Sequence[_Answer]) -> "_Step":
        """The same for these rows alone."""
        return _Step(self._decoder, answers, self._seen[list(rows)])

    def run(self, streams: Streams, ids: Array, context: Tensors) -> Sequence[int | None]:
        """The next token of each row; None where its constraint says that the answer is complete. context: the inputs
        that follow from how far the answers are.

        Raises DataError where no token can follow."""
        done = self._limit() if self._limited else ()
        uniform, sampling = self._given["uniform"], self._decoder.sampling
        if self._drawing:
            uniform[self._drawing] = [self._answers[row].uniform() for row in self._drawing]
        if self._decoder.drawn_here:
            found = self._draw(np.asarray(streams.run({sampling.ids: ids, **context})[sampling.logits]), ids)
        else:
            found = streams.run({sampling.ids: ids, **context, **self._given})[sampling.token].tolist()
        if min(found) < 0:
            self._check(found, done)
        return [None if row in done else token for row, token in enumerate(found)] if done else found

    def _limit(self) -> set[int]:
        """Write what may follow in each row; the rows whose answers are complete."""
        done = set[int]()
        for row, answer in enumerate(self._answers):
            if answer.constraint is None or not answer.begins:
                continue
            allowed = answer.constraint.allowed()
            if allowed is None:
                done.add(row)
            elif allowed.any():
                self._given["allowed"][row] = allowed
            else:
                raise DataError(f"prompt {answer.index}: its constraint allows no token behind {answer.made} of them")
        return done

    def _check(self, tokens: Sequence[int], done: Collection[int]) -> None:
        for row, (answer, token) in enumerate(zip(self._answers, tokens, strict=True)):
            if token < 0 and answer.begins and row not in done:
                raise DataError(
                    f"prompt {answer.index}: no token can follow {answer.made} of them; the logits of those allowed "
                    "are no numbers"
                )

    def _draw(self, logits: Array, ids: Array) -> list[int]:
        last = logits if logits.ndim == 2 else logits[:, -1]
        np.put_along_axis(self._seen, ids.reshape(len(ids), -1), True, 1)
        uniform, allowed = self._given["uniform"], self._given["allowed"]
        count, hows = self._decoder.sampling.candidates, [answer.prompt.settings for answer in self._answers]
        rows = zip(last, hows, uniform, self._seen, allowed, strict=True)
        return [sample(row, how, float(by), seen, may, count) for row, how, by, seen, may in rows]
