"""Prompts in, tokens out: a decoder with state, pulled as an engine, step by step, its logits drawn from in numpy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.errors import DataError
from enginesmith.core.types import Tensors
from enginesmith.decoders import Decoder, read_decoder
from enginesmith.opening import open_onnx
from enginesmith.sampling import Prompt, check_prompt, sample, uniforms
from enginesmith.streams import Streams

if TYPE_CHECKING:
    from enginesmith.client.pull import Pulled

# Numbers that are made of a seed at a time.
_BLOCK = 256


@dataclass
class _Answer:
    """An answer as far as it came. seen: tokens that were read.  read: tokens of the prompt that were given to the
    engine.  made: tokens drawn."""

    index: int
    prompt: Prompt
    most: int
    seen: Array
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
            found: Sequence[int] = (self.last,)
        else:
            self.read += count
            found = list(self.prompt.tokens[self.read - count : self.read])
        self.seen[list(found)] = True
        return found

    def uniform(self) -> float:
        """The number that its next token is drawn by: the n-th of its seed for its n-th token."""
        if self.made >= len(self._drawn):
            self._drawn = uniforms(self.prompt.seed, self.made + _BLOCK).tolist()
        return self._drawn[self.made]

    def draw(self, logits: Array) -> int:
        """The next token. logits: [vocabulary]. Raises DataError where one is no number."""
        settings = self.prompt.settings
        token = sample(logits, settings, self.uniform() if settings.temperature > 0 else 0.0, self.seen)
        if token < 0:
            raise DataError(
                f"prompt {self.index}: no token can follow {self.made} of them; the engine's logits are no numbers"
            )
        self.last, self.made = token, self.made + 1
        return token

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
        """A generator over a pulled engine. description: the JSON beside it.  ids, logits: names of the input of
        token ids and of the output. Raises DataError for an engine that is no decoder."""
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
        ones, with no seed, or that passes the cache's bound with its answer; then for an answer that no token can
        continue.
        """
        answers = [
            _Answer(index, prompt, self._check(index, prompt), np.zeros(self.decoder.vocabulary, np.bool_))
            for index, prompt in enumerate(prompts)
        ]
        rows = self.decoder.rows or max(len(answers), 1)
        for begin in range(0, len(answers), rows):
            yield from self._batch(answers[begin : begin + rows])

    def _check(self, index: int, prompt: Prompt) -> int:
        """The most tokens of an answer. Raises DataError for a prompt that cannot be answered so."""
        check_prompt(prompt, index, self.decoder.vocabulary)
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

    def _batch(self, answers: list[_Answer]) -> Iterator[tuple[int, int]]:
        self._streams.reset()
        answers = [answer for answer in answers if not answer.ended]
        unread = min((len(answer.prompt.tokens) for answer in answers), default=0)
        past = 0
        while answers:
            count = max(1, min(unread, self.decoder.places or unread))
            unread = max(unread - count, 0)
            ids = np.array([answer.give(count) for answer in answers], self._dtype)
            context = {item.spec.name: item.value(len(ids), past, count) for item in self.decoder.progress}
            given = {self.decoder.ids.name: ids[:, 0] if self._flat else ids, **context}
            logits = np.asarray(self._streams.run(given)[self.decoder.logits])
            past += count
            for answer, row in zip(answers, logits if logits.ndim == 2 else logits[:, -1], strict=True):
                if answer.begins:
                    yield answer.index, answer.draw(row)
            going = [row for row, answer in enumerate(answers) if not answer.ended]
            if len(going) < len(answers):
                answers = [answers[row] for row in going]
                self._streams.keep(going)
