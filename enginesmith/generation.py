"""Generates tokens from prompts with a decoder with state, greedy or sampled.

>>> import numpy as np
>>> from enginesmith.core.types import TensorSpec
>>> from enginesmith.generation import Decoder, Generator, Prompt
>>> ids = TensorSpec("ids", "int64", ("batch", "tokens"))
>>> decoder = Decoder((ids,), (), {}, ids, "logits", vocabulary=5, rows=None, places=None)
>>> generator = Generator(lambda inputs: {"logits": np.eye(5)[inputs["ids"] + 1]}, decoder)  # the next number
>>> generator.generate([Prompt([1], most=3), Prompt([0], most=2)])
[[2, 3, 4], [1, 2]]
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array, dtype_of
from enginesmith.core.errors import DataError
from enginesmith.core.state import State
from enginesmith.core.types import PLUS, ShapeProfile, Tensors, TensorSpec
from enginesmith.descriptions import DescribedGraph, DescribedStates, decode_description, read_description
from enginesmith.opening import open_onnx
from enginesmith.streams import Streams

if TYPE_CHECKING:
    from enginesmith.client.pull import Pulled


@dataclass(frozen=True)
class CacheBound:
    """The maximum length of an answer. whole: tokens of the prompt and answer together.  takes: describes the cache's
    limit.  remedy: how to raise it."""

    whole: int
    takes: str
    remedy: str


@dataclass(frozen=True)
class Progress:
    """An input computed from the number of tokens read: a mask of visible tokens, or token positions.

    axis: of the tokens of a call, or of all so far; None for an input with the position of only the first one.
    size: of that axis if it is fixed, as in a cache that is filled place by place.
    spec: name, dtype and shape of the input.  mask: True for a mask, False for positions.
    """

    spec: TensorSpec
    mask: bool
    axis: int | None
    size: int | None

    def value(self, rows: int, past: int, count: int) -> Array:
        """The array for a call with this many rows and tokens, after `past` tokens that were read before."""
        dtype, total_count = dtype_of(self.spec.dtype), past + count
        if self.mask:
            row_values = (np.arange(total_count if self.size is None else self.size) < total_count).astype(dtype)
        else:
            row_values = np.arange(past, past + 1 if self.axis is None else total_count, dtype=dtype)
        shape = [size if isinstance(size, int) else rows for size in self.spec.shape]
        if self.axis is None:
            return np.full(shape, row_values[0], dtype)
        shape[self.axis] = len(row_values)
        row_shape = [-1 if axis == self.axis else 1 for axis in range(len(shape))]
        return np.ascontiguousarray(np.broadcast_to(row_values.reshape(row_shape), shape))


@dataclass(frozen=True)
class Decoder:
    """A decoder, from the description beside its engine. inputs: of the engine.  ends: as in `Streams`.

    ids: its input of token ids.  logits: name of its output [rows, vocabulary] or [rows, places, vocabulary].  rows,
    places: the most that a call takes; None if unlimited.  progress: the other inputs, computed from the number of
    tokens read.
    states: its inputs and outputs that are carried from call to call.  vocabulary: number of tokens.
    """

    inputs: tuple[TensorSpec, ...]
    states: tuple[State, ...]
    ends: Mapping[str, tuple[int, int]]
    ids: TensorSpec
    logits: str
    vocabulary: int
    rows: int | None
    places: int | None
    progress: tuple[Progress, ...] = ()

    @property
    def bound(self) -> "CacheBound | None":
        """The limit of the cache that fills first, among initially empty and fixed-size ones; None without one."""
        bounds = [
            CacheBound(max_size + 2, f"{dim}={max_size} at most", f"build with a larger dims.{dim}.max")
            for dim, (min_size, max_size) in self.ends.items()
            if min_size == 0
        ]
        shapes = {spec.name: spec.shape for spec in self.inputs}
        for state in (state for state in self.states if state.places):
            size = shapes[state.input][state.places.axis] if state.places else 0
            remedy = "export the model with a larger cache"
            bounds.append(CacheBound(int(size) + 1, f"{size} places in {state.input!r}", remedy))
        return min(bounds, key=lambda bound: bound.whole, default=None)


def read_decoder(description: Path | str, ids: str = "ids", logits: str = "logits") -> Decoder:
    """The decoder that the JSON beside an engine describes. Raises DataError if the engine is not a decoder."""
    document = read_description(description)
    graph = decode_description(document, DescribedGraph, description)
    state_spec = decode_description(document, DescribedStates, description)
    inputs, states, profiles, ends = graph.inputs, state_spec.state, graph.profiles, state_spec.ends
    outputs = {spec.name: spec for spec in graph.outputs}
    vocabulary_size = outputs[logits].shape[-1] if logits in outputs and outputs[logits].shape else None
    token_spec = next((spec for spec in inputs if spec.name == ids), None)
    if not isinstance(vocabulary_size, int) or token_spec is None:
        raise DataError(
            f"{description}: there is no input {ids!r}, or no output {logits!r} whose last axis has a fixed size (the "
            "vocabulary); give their names as `ids` and `logits`"
        )
    handled_names = {ids, *(state.input for state in states)}
    other_inputs = {spec.name: _find_one(spec, token_spec, states) for spec in inputs if spec.name not in handled_names}
    if unknown_inputs := [name for name, progress in other_inputs.items() if progress is None]:
        raise DataError(
            f"{description}: the model also needs {', '.join(unknown_inputs)}; a Generator gives only ids, a mask of "
            "the tokens so far and their positions: use Streams"
        )
    max_rows, max_places = (_most(inputs, profiles, ids, axis) for axis in (0, 1))
    progress_inputs = tuple(progress for progress in other_inputs.values() if progress)
    return Decoder(inputs, states, ends, token_spec, logits, vocabulary_size, max_rows, max_places, progress_inputs)


def _find_one(spec: TensorSpec, ids: TensorSpec, states: Sequence[State]) -> Progress | None:
    """The role of an input beside the ids, by its name and shape, as HuggingFace's exporters write them, or None: a
    mask [rows, tokens so far], or the positions of the tokens [rows, tokens], [tokens], [rows] or []."""
    position_inputs = {state.places.at for state in states if state.places}
    token_dim = ids.shape[1] if len(ids.shape) > 1 else None
    axes = [axis for axis, size in enumerate(spec.shape) if token_dim and str(token_dim) in str(size).split(PLUS)]
    name, axis = spec.name.lower(), axes[0] if axes else None
    if "mask" in name and len(spec.shape) == 2:
        size = spec.shape[1]
        return Progress(spec, True, 1, size if isinstance(size, int) else None) if axis == 1 or axis is None else None
    is_places = spec.dtype in ("int32", "int64") and (spec.name in position_inputs or "position" in name)
    other_sizes = [size for index, size in enumerate(spec.shape) if index != axis]
    if not is_places or any(size not in (1, ids.shape[0]) for size in other_sizes):
        return None
    return Progress(spec, False, axis, None)


def _most(inputs: Sequence[TensorSpec], profiles: Sequence[ShapeProfile], name: str, axis: int) -> int | None:
    """The largest size of an axis of an input; None if it has no limit or no such axis."""
    shape = next(spec.shape for spec in inputs if spec.name == name)
    if axis >= len(shape):
        return 1
    sizes = [high[axis] for profile in profiles for input_name, _, _, high in profile.inputs if input_name == name]
    size = shape[axis]
    return size if isinstance(size, int) else max(sizes, default=None)


# Prompts of a generator, and the draw of the next token from logits, in numpy.

# Number of likeliest tokens that can be drawn, and limit of top_k. Only these are sorted.
CANDIDATES = 1024
# The number of seeds: Philox 4x64 has keys of 128 bits.
_SEEDS = 2**128


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is drawn. temperature: 0 takes the likeliest.  top_k: 0 for all.  top_p: 1 for all.

    repetition_penalty: 1 for none; above it, tokens that were read become less likely.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


GREEDY = SamplingSettings()


@dataclass(frozen=True)
class Prompt:
    """A request to a generator. tokens: ids, at least one.  most: tokens of the answer; default: until the cache is
    full.  seed: of the random numbers for drawing tokens.  stop: tokens that end the answer, as its last one."""

    tokens: Sequence[int]
    settings: SamplingSettings = GREEDY
    most: int | None = None
    seed: int = 0
    stop: Collection[int] = ()


def check_prompt(prompt: Prompt, index: int, vocabulary: int) -> None:
    """Raise DataError, with the prompt's number, for a prompt that no engine with this vocabulary can answer."""
    _check_settings(prompt.settings, index)
    prompt_tokens: object = prompt.tokens
    if isinstance(prompt_tokens, str):
        raise DataError(f"prompt {index} is text; give its token ids (for a byte-level model, its bytes)")
    if not len(prompt.tokens):
        raise DataError(f"prompt {index} has no tokens; give at least one, such as the begin-of-sequence token")
    if not isinstance(prompt.stop, Collection):
        raise DataError(f"prompt {index}: stop is {prompt.stop!r}; give the tokens that end an answer, as {{0}}")
    for label, tokens in (("", prompt.tokens), ("stop ", prompt.stop)):
        if unknown_tokens := [token for token in tokens if not _is_whole(token) or not 0 <= token < vocabulary]:
            raise DataError(
                f"prompt {index} has {label}token {unknown_tokens[0]!r}; the vocabulary's token ids are whole numbers "
                f"from 0 to {vocabulary - 1}"
            )
    if not _is_whole(prompt.seed) or not 0 <= prompt.seed < _SEEDS:
        raise DataError(f"prompt {index}: seed is {prompt.seed}; it must be a whole number from 0 to 2^128 - 1")
    if prompt.most is not None and (not _is_whole(prompt.most) or prompt.most < 0):
        raise DataError(f"prompt {index}: most is {prompt.most}; it must be a whole number, 0 or more")


def _check_settings(settings: SamplingSettings, index: int) -> None:
    """Raise DataError for settings that leave no token to draw, or that float32 or int64 cannot represent."""
    max_float, min_float = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
    temperature, top_k, penalty = settings.temperature, settings.top_k, settings.repetition_penalty
    settings_ranges = {
        "temperature": (0 <= temperature <= max_float, f"from 0 to {max_float:.1e}"),
        "top_k": (_is_whole(top_k) and 0 <= top_k < 2**63, "a whole number, 0 for all tokens, below 2^63"),
        "top_p": (0 <= settings.top_p <= 1, "from 0 to 1"),
        "repetition_penalty": (min_float <= penalty <= max_float, f"above 0, from {min_float:.1e} to {max_float:.1e}"),
    }
    for name, (is_valid, range_text) in settings_ranges.items():
        if not is_valid:
            raise DataError(f"prompt {index}: {name} is {getattr(settings, name)}; it must be {range_text}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer)


def uniforms(seed: int, count: int) -> Array:
    """The first `count` random numbers in [0, 1) of a seed, float32: the highest 24 bits of each word of numpy's Philox
    4x64-10, whose key is the seed (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    random_words = np.random.Philox(key=seed).random_raw(count)
    return ((random_words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(count)


def sample(logits: Array, settings: SamplingSettings, uniform: float, seen: Array) -> int:
    """The token drawn from a row of logits [vocabulary], in float64; -1 if a logit is NaN, or the greatest is infinite.

    seen: for each token, whether it was read.
    uniform: a random number from [0, 1); not used at temperature 0.
    """
    scores = logits.astype(np.float64)
    penalty = settings.repetition_penalty
    scores = np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)
    if np.isnan(scores).any() or not np.isfinite(scores.max()):
        return -1
    if settings.temperature <= 0:
        return int(np.argmax(scores))
    count = min(settings.top_k or CANDIDATES, CANDIDATES)
    ranked_tokens: Array = np.argsort(-scores, kind="stable")[:count]
    weights = np.exp((scores[ranked_tokens] - scores[ranked_tokens[0]]) / settings.temperature)
    if settings.top_p < 1:
        earlier_mass = (np.cumsum(weights) - weights) / weights.sum()
        weights = weights[: max(1, int(np.count_nonzero(earlier_mass < settings.top_p)))]
    cumulative = np.cumsum(weights)
    position = int(np.count_nonzero(cumulative <= uniform * cumulative[-1]))
    return int(ranked_tokens[min(position, int(np.count_nonzero(weights)) - 1)])


# The number of random numbers that are computed from a seed at a time.
_BLOCK = 256


@dataclass
class _Answer:
    """An unfinished answer. seen: tokens that were read.  read: number of the prompt's tokens given to the engine.
    token_count: of tokens drawn."""

    index: int
    prompt: Prompt
    max_tokens: int
    seen: Array
    read: int = 0
    token_count: int = 0
    last: int = 0
    _drawn: Sequence[float] = ()

    @property
    def begins(self) -> bool:
        """Whether its whole prompt was read, so that a token can be drawn."""
        return self.read >= len(self.prompt.tokens)

    def give(self, count: int) -> Sequence[int]:
        """The next tokens for the engine: `count` of the prompt, or the last one drawn."""
        if self.begins:
            next_tokens: Sequence[int] = (self.last,)
        else:
            self.read += count
            next_tokens = list(self.prompt.tokens[self.read - count : self.read])
        self.seen[list(next_tokens)] = True
        return next_tokens

    def uniform(self) -> float:
        """The random number for its next token: the n-th of its seed for its n-th token."""
        if self.token_count >= len(self._drawn):
            self._drawn = uniforms(self.prompt.seed, self.token_count + _BLOCK).tolist()
        return self._drawn[self.token_count]

    def draw(self, logits: Array) -> int:
        """Draw the next token. logits: [vocabulary]. Raises DataError if one is NaN."""
        settings = self.prompt.settings
        token = sample(logits, settings, self.uniform() if settings.temperature > 0 else 0.0, self.seen)
        if token < 0:
            raise DataError(
                f"prompt {self.index}: no token can follow the {self.token_count} drawn ones; the engine's logits are "
                "NaN or infinite"
            )
        self.last, self.token_count = token, self.token_count + 1
        return token

    @property
    def ended(self) -> bool:
        """Whether its last token was drawn."""
        return self.token_count >= self.max_tokens or (self.token_count > 0 and self.last in self.prompt.stop)


class Generator:
    """Answers several prompts at once with one engine. Not thread-safe.

    run: runs the engine once on all of its inputs, by name.
    """

    def __init__(self, run: Callable[[Tensors], Tensors], decoder: Decoder) -> None:
        self.decoder, self._run = decoder, run
        self._dtype, self._flat = dtype_of(decoder.ids.dtype), len(decoder.ids.shape) == 1

    @classmethod
    def described(
        cls, run: Callable[[Tensors], Tensors], description: Path | str, ids: str = "ids", logits: str = "logits"
    ) -> "Generator":
        """A generator over a pulled engine. description: the JSON beside it.  ids, logits: names of the input of
        token ids and of the output. Raises DataError for an engine that is no decoder.

        run: runs the engine once on all of its inputs, by name.
        """
        return cls(run, read_decoder(description, ids, logits))

    @classmethod
    def opened(cls, pulled: "Pulled", ids: str = "ids", logits: str = "logits") -> "Generator":
        """Open a pulled engine of ONNX Runtime; return a generator over it. Raises as `described` and `open_onnx`."""
        return cls.described(open_onnx(pulled), pulled.description, ids, logits)

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens after each prompt. Raises as `stream`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for index, token in self.stream(prompts):
            answers[index].append(token)
        return answers

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int]]:
        """Yield (number of the prompt, token) for each drawn token.

        An answer does not depend on the other prompts, except for rounding in the engine's sums. Prompts may have
        different lengths: shorter ones are answered while the others are read. More prompts than the engine takes rows
        are answered one batch after the other.
        Raises DataError, before anything runs, for settings that leave no token to draw, a prompt without tokens, with
        unknown ones, with an invalid seed, or that passes the cache's limit with its answer; then for an answer that no
        token can continue.
        """
        answers = [
            _Answer(index, prompt, self._check(index, prompt), np.zeros(self.decoder.vocabulary, np.bool_))
            for index, prompt in enumerate(prompts)
        ]
        batch_rows = self.decoder.rows or max(len(answers), 1)
        for first_row in range(0, len(answers), batch_rows):
            yield from self._batch(answers[first_row : first_row + batch_rows])

    def _check(self, index: int, prompt: Prompt) -> int:
        """The maximum number of tokens of an answer. Raises DataError for a prompt that cannot be answered."""
        check_prompt(prompt, index, self.decoder.vocabulary)
        tokens, cache_bound = prompt.tokens, self.decoder.bound
        if cache_bound is None:
            if prompt.most is None:
                raise DataError(f"prompt {index}: nothing bounds its answer; give `most`, the number of its tokens")
            return prompt.most
        max_answer = cache_bound.whole - len(tokens)
        if max_answer < 1 or (prompt.most or 0) > max_answer:
            request_text = f" and asks for {prompt.most}" if prompt.most else ""
            raise DataError(
                f"prompt {index} has {len(tokens)} tokens{request_text}; the engine's cache takes "
                f"{cache_bound.takes}, which is "
                f"{cache_bound.whole} tokens in all: ask for fewer, or {cache_bound.remedy}"
            )
        return max_answer if prompt.most is None else prompt.most

    def _batch(self, answers: list[_Answer]) -> Iterator[tuple[int, int]]:
        # A local list: another call of `stream` may begin before this one has ended.
        streams = Streams(self._run, self.decoder.inputs, self.decoder.states, self.decoder.ends)
        answers = [answer for answer in answers if not answer.ended]
        unread_count = min((len(answer.prompt.tokens) for answer in answers), default=0)
        read_count = 0
        while answers:
            count = max(1, min(unread_count, self.decoder.places or unread_count))
            unread_count = max(unread_count - count, 0)
            ids = np.array([answer.give(count) for answer in answers], self._dtype)
            progress_arrays = {p.spec.name: p.value(len(ids), read_count, count) for p in self.decoder.progress}
            step_tensors = {self.decoder.ids.name: ids[:, 0] if self._flat else ids, **progress_arrays}
            logits = np.asarray(streams.run(step_tensors)[self.decoder.logits])
            read_count += count
            for answer, row in zip(answers, logits if logits.ndim == 2 else logits[:, -1], strict=True):
                if answer.begins:
                    yield answer.index, answer.draw(row)
            open_rows = [row for row, answer in enumerate(answers) if not answer.ended]
            if len(open_rows) < len(answers):
                answers = [answers[row] for row in open_rows]
                streams.keep(open_rows)
